"""What quantization needs to know of the input of a linear, gathered batch by batch.

Every fourth row is held out: choices are judged on rows that did not make the candidates.
"""

import torch

from halfbyte.errors import FormatError

HOLD_OUT_EVERY = 4
MAX_ROWS = 1024  # rows kept of each kind; more are thinned evenly


class RowSample:
    """Up to `max_rows` rows, evenly spread over all rows seen, whatever their number."""

    def __init__(self, columns: int, max_rows: int) -> None:
        """Start empty; `max_rows` is at least 1."""
        if max_rows < 1:
            raise FormatError(f"{max_rows=}: wanted at least 1")
        self.rows = torch.empty(0, columns)
        self._max_rows = max_rows
        self._stride = 1
        self._seen = 0

    def add(self, x: torch.Tensor) -> None:
        """Add rows [T, K] float32: those whose index is a multiple of the current stride."""
        first = -self._seen % self._stride
        self._seen += x.shape[0]
        self.rows = torch.cat((self.rows, x[first :: self._stride]))
        while self.rows.shape[0] > self._max_rows:
            self.rows = self.rows[::2].clone()
            self._stride *= 2


class InputStatistics:
    """Rows, Gram matrices and magnitudes of the input of one group of linears.

    Attributes:
        columns: K.
        num_rows: rows seen.
        absmax: [K] float32, largest magnitude of each column.
        squares: [K] float64, sum of squares of each column.
        fit: sample of three rows in four, [T, K] float32.
        held_out: sample of the fourth rows.
        fit_gram, held_out_gram: [K, K] float32, X^T X over all rows of each kind, or None where
            `keep_gram` is False (the quantized activations of W4A4 have no Gram in advance).
    """

    def __init__(self, columns: int, *, keep_gram: bool = True, max_rows: int = MAX_ROWS) -> None:
        """Start empty.

        Args:
            columns: K.
            keep_gram: gather the two Gram matrices, 8 * K * K bytes.
            max_rows: rows to keep of each kind.
        """
        self.columns = columns
        self.num_rows = 0
        self.absmax = torch.zeros(columns)
        self.squares = torch.zeros(columns, dtype=torch.float64)
        self.fit = RowSample(columns, max_rows)
        self.held_out = RowSample(columns, max_rows)
        self.fit_gram = torch.zeros(columns, columns) if keep_gram else None
        self.held_out_gram = torch.zeros(columns, columns) if keep_gram else None

    def update(self, x: torch.Tensor) -> None:
        """Add the rows of `x`, [..., K] float of any dtype.

        Raises FormatError for another K, or where `x` contains NaN or Inf.
        """
        if x.ndim < 1 or x.shape[-1] != self.columns:
            raise FormatError(f"calibration input: shape {tuple(x.shape)}, wanted {self.columns=}")
        rows = x.detach().reshape(x.shape[:-1].numel(), self.columns).to("cpu", torch.float32)
        if not bool(torch.isfinite(rows).all()):
            bad = int((~torch.isfinite(rows)).sum())
            raise FormatError(
                f"calibration input contains NaN/Inf: {bad} of {rows.numel()} elements; "
                "look for an overflow in the model before quantizing it"
            )
        if rows.shape[0] == 0:
            return
        is_held_out = (torch.arange(rows.shape[0]) + self.num_rows) % HOLD_OUT_EVERY == 0
        self.num_rows += rows.shape[0]
        self.absmax = torch.maximum(self.absmax, rows.abs().amax(0))
        self.squares += rows.square().sum(0, dtype=torch.float64)
        fit, held_out = rows[~is_held_out], rows[is_held_out]
        self.fit.add(fit)
        self.held_out.add(held_out)
        if self.fit_gram is not None and self.held_out_gram is not None:
            self.fit_gram.addmm_(fit.T, fit)
            self.held_out_gram.addmm_(held_out.T, held_out)

    @property
    def rms(self) -> torch.Tensor:
        """[K] float32, root mean square of each column; zeros where nothing was seen."""
        return (self.squares / max(self.num_rows, 1)).sqrt().float()
