"""The squared output error of a quantized group, on rows or on a Gram matrix.

Where activations stay wide (weight-only) the error is exact from the Gram matrix G = X^T X of the
held-out rows: |X D^T|^2 = sum (D G) * D for the weight error D; no row is read again. Quantized
activations are not linear in the factors: there the error is measured on the held-out rows.
"""

from copy import copy
from dataclasses import dataclass

import torch

from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.modes import get_mode
from halfbyte.formats.nvfp4 import make_global_scale
from halfbyte.formats.quantize import dequantize, quantize, quantize_activation
from halfbyte.svdquant.low_rank import ITERATIONS, LowRank, improve_basis, make_start
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.statistics import InputStatistics
from halfbyte.svdquant.weight_error import make_relative_error

SEARCH_ROWS = 256  # held-out rows that a candidate is judged on
SEARCH_OUTPUTS = 1536  # outputs that a candidate is judged on, evenly spread


@dataclass(frozen=True)
class OutputError:
    """Squared error of an output and the squared norm of the true one."""

    squared: float
    norm: float

    @property
    def relative(self) -> float:
        """Relative Frobenius error; 0 for an output of zeros that stayed zeros."""
        return make_relative_error(self.squared, self.norm)

    @staticmethod
    def measure(
        stacked: torch.Tensor,
        statistics: InputStatistics | None,
        activation: ActivationFormat | None,
        smooth: torch.Tensor | None,
        split: tuple[torch.Tensor, LowRank | None],
    ) -> "OutputError":
        """Return the error of a split on held-out rows; without data, that of the weight.

        Args:
            stacked: [N, K] float32, the true weight.
            statistics: of the input, or None.
            activation: how the input is quantized, or None.
            smooth: [K] float32 or None.
            split: the dequantized residual [N, K] and the low rank on the raw input.
        """
        effective, low_rank = split
        wide = effective if smooth is None else effective / smooth
        if low_rank is not None:
            wide = wide + low_rank.multiply()
        if statistics is None:
            return OutputError(_square(wide - stacked), _square(stacked))
        if activation is None and statistics.held_out_gram is not None:
            gram = statistics.held_out_gram
            return OutputError(_weigh(wide - stacked, gram), _weigh(stacked, gram))
        rows = statistics.held_out.rows
        true = rows @ stacked.T
        # (quantized - smoothed) @ effective^T + rows @ wide^T: the low rank sees the raw rows.
        quantized = quantize_rows(rows, smooth, activation)
        shifted = quantized - (rows if smooth is None else rows / smooth)
        return OutputError(_square(shifted @ effective.T + rows @ wide.T - true), _square(true))


class SmoothingSearch:
    """Measures candidates of smoothing factors for one group, with little work for each.

    Each candidate is judged with quantized activations, nearest rounding of the weight and an
    approximate low-rank branch: one pass of subspace iteration from the last candidate's basis.
    Candidates are best given in an order in which neighbours are alike.
    """

    def __init__(
        self,
        stacked: torch.Tensor,
        statistics: InputStatistics,
        activation: ActivationFormat | None,
        preset: SVDQuantPreset,
    ) -> None:
        """Take a sample of outputs and held-out rows.

        Args:
            stacked: [N, K] float32.
            statistics: of the input; has seen rows.
            activation: how the input is quantized, or None.
            preset: the weight format, rank and seed.
        """
        step = max(1, -(-stacked.shape[0] // SEARCH_OUTPUTS))
        self._weight = stacked[::step].contiguous()
        rows = statistics.held_out.rows
        self._rows = rows[:: -(-rows.shape[0] // SEARCH_ROWS)].contiguous()
        self._gram = statistics.held_out_gram if activation is None else None
        self._activation = activation
        self._preset = preset
        rank = min(preset.rank, *self._weight.shape)
        start = make_start(self._weight.shape[1], rank, preset.seed)[:, :rank]
        # Converged for the raw weight, which is judged first: from a random basis, identity would
        # lose to any candidate that comes later.
        self._basis = improve_basis(lambda: (self._weight,), start, ITERATIONS)

    def fork(self) -> "SmoothingSearch":
        """Return a search on the same sample that goes its own way from here."""
        return copy(self)

    def measure_error(self, factors: torch.Tensor | None) -> float:
        """Return the squared output error under `factors` ([K] float32, None for ones)."""
        smoothed = self._weight if factors is None else self._weight * factors
        residual = smoothed
        if self._basis.shape[1]:
            self._basis = improve_basis(lambda: (smoothed,), self._basis, 1)
            residual = torch.addmm(smoothed, smoothed @ self._basis, self._basis.T, alpha=-1)
        rounded = dequantize(quantize(residual, self._preset.weight_format))
        weight_error = rounded - residual
        if self._gram is not None:
            raw = weight_error if factors is None else weight_error / factors
            return _weigh(raw, self._gram)
        rows = self._rows if factors is None else self._rows / factors
        quantized = quantize_rows(self._rows, factors, self._activation)
        # Q(x) r^T - x R^T = (Q(x) - x) r^T + x (r - R)^T; the low rank is exact on both sides.
        error = (quantized - rows) @ rounded.T + rows @ weight_error.T
        return _square(error)


def quantize_rows(
    rows: torch.Tensor, smooth: torch.Tensor | None, activation: ActivationFormat | None
) -> torch.Tensor:
    """Return rows / smooth as the quantized product sees them: [T, K] float32.

    A shift is taken off again: the record's bias makes up for it. A static global scale is
    stood in for by that of these rows.
    """
    if activation is None:
        return rows if smooth is None else rows / smooth
    z = rows + activation.shift if activation.shift else rows
    if smooth is not None:
        z = z / smooth
    scale = None
    if activation.global_scale == "static":
        amax = z.abs().max() if z.numel() else torch.zeros(())
        scale = make_global_scale(amax, get_mode("halfbyte")).multiplier
    values, _ = quantize_activation(z, activation, scale)
    wide = dequantize(values)
    if activation.shift:
        wide = wide - (activation.shift if smooth is None else activation.shift / smooth)
    return wide


def _square(matrix: torch.Tensor) -> float:
    return float(matrix.square().sum(dtype=torch.float64))


def _weigh(matrix: torch.Tensor, gram: torch.Tensor) -> float:
    """Return |X matrix^T|^2 for gram = X^T X; a tiny negative rounding is 0."""
    return max(0.0, float(((matrix @ gram) * matrix).sum(dtype=torch.float64)))
