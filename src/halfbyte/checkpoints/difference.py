"""How far two quantized layers are apart, in what they compute rather than in how it is stored.

Two ways of looking, both in blocks of rows so that no whole float64 weight is ever held:
`measure_layer` gives figures for a report, `find_deviation` the proof that a conversion needs,
which compares stored numbers where that already settles it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from halfbyte.checkpoints.family import is_same_tensor
from halfbyte.formats.e8m0 import decode_e8m0
from halfbyte.formats.quantize import decode_codes
from halfbyte.formats.quantized_linear import QuantizedLinear

# A value that was turned into its reciprocal and back, or multiplied by such a one, has been
# rounded to float32 at most three times: 3 * 2^-24, and the products of those errors.
ROUNDING = 2.0**-22
BLOCK_ELEMENTS = 2**20  # of one block of rows: 8 MiB of float64
COMPONENTS = ("weight", "low_rank", "smooth", "bias", "activation_scale")


@dataclass(frozen=True)
class Difference:
    """Two tensors of one shape, compared as float64.

    Attributes:
        largest: max |left - right|.
        relative: Frobenius norm of left - right over that of left; infinite beside zeros.
        deviation: max |left - right| / |left| over elements; of a low-rank product, over
            |up| @ |down|, which its roundings are in proportion to. 0 where all are equal.
    """

    largest: float
    relative: float
    deviation: float

    @property
    def is_exact(self) -> bool:
        """Whether every element is equal."""
        return self.deviation == 0

    @property
    def is_within_rounding(self) -> bool:
        """Whether every element is equal or within `ROUNDING` of it."""
        return self.deviation <= ROUNDING


EQUAL = Difference(0.0, 0.0, 0.0)


class _Sums:
    """Collects differences block by block."""

    def __init__(self) -> None:
        self.largest = self.deviation = 0.0
        self.squared_error = self.squared_norm = 0.0

    def add(
        self, left: torch.Tensor, right: torch.Tensor, size: torch.Tensor | None = None
    ) -> None:
        error = (left - right).abs_()
        self.squared_norm += float(left.square().sum())
        if not bool(error.any()):
            return
        self.largest = max(self.largest, float(error.max()))
        self.squared_error += float(error.square().sum())
        ratio = error / (left.abs() if size is None else size)
        ratio.nan_to_num_(math.inf, math.inf).masked_fill_(error == 0, 0.0)
        self.deviation = max(self.deviation, float(ratio.max()))

    def get(self) -> Difference:
        if self.deviation == 0:
            return EQUAL
        norm = math.sqrt(self.squared_norm)
        relative = math.sqrt(self.squared_error) / norm if norm else math.inf
        return Difference(self.largest, relative, self.deviation)


def describe_shape(linear: QuantizedLinear) -> dict[str, object]:
    """Return what two layers must have in common to be compared."""
    return {
        "format": linear.weight.format.name,
        "activation": None if linear.activation is None else linear.activation.name,
        "out_features": linear.out_features,
        "in_features": linear.in_features,
    }


def measure_layer(left: QuantizedLinear, right: QuantizedLinear) -> dict[str, Difference]:
    """Return the difference of each of `COMPONENTS`, of layers of one N and K.

    "weight" is the 4-bit part with all its scales, channel_scale among them.
    """
    return {
        "weight": _measure_weight(left, right),
        "low_rank": _measure_low_rank(left, right),
        **_measure_vectors(left, right),
    }


def find_deviation(left: QuantizedLinear, right: QuantizedLinear) -> dict[str, float]:
    """Return the deviation of each of `COMPONENTS` (see `Difference`), as fast as can be proved.

    Equal codes and block scales dequantise to numbers in proportion to the scales above them, so
    that then only those are compared. Equal low-rank factors have equal products.
    """
    weight = find_scale_deviation(left, right)
    if weight is None:
        weight = _measure_weight(left, right).deviation
    low_rank = find_factor_deviation(left, right)
    if low_rank is None:
        low_rank = _measure_low_rank(left, right).deviation
    vectors = {name: one.deviation for name, one in _measure_vectors(left, right).items()}
    return {"weight": weight, "low_rank": low_rank, **vectors}


def find_scale_deviation(left: QuantizedLinear, right: QuantizedLinear) -> float | None:
    """Return the deviation of weights with the same codes and block scales; None for others."""
    one, other = left.weight, right.weight
    if not is_same_tensor(one.data, other.data) or not is_same_tensor(one.scales, other.scales):
        return None
    return _compare(_scale_rows(left), _scale_rows(right)).deviation


def find_factor_deviation(left: QuantizedLinear, right: QuantizedLinear) -> float | None:
    """Return twice the factors' worst deviation, which bounds their product's; None if too much."""
    if left.lora_down is None or left.lora_up is None:
        return 0.0 if right.lora_up is None else None
    if right.lora_down is None or right.lora_up is None or left.rank != right.rank:
        return None
    deviations = (
        _compare(left.lora_down.double(), right.lora_down.double()).deviation,
        _compare(left.lora_up.double(), right.lora_up.double()).deviation,
    )
    total = sum(deviations)
    return total if total <= ROUNDING else None


def iter_row_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) ranges that cover `rows`, each of about BLOCK_ELEMENTS elements."""
    step = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def dequantize_rows(linear: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of the 4-bit part with all its scales: [rows, K] float64.

    code * block scale is exact; the scales above them are multiplied first, and then once.
    """
    weight = linear.weight.take_rows(start, stop)
    values = decode_codes(weight).double()
    padding = weight.format.padded_columns(weight.columns) - weight.columns
    padded = torch.nn.functional.pad(values, (0, padding))
    blocks = padded.view(*weight.scales.shape, weight.format.block_size)
    blocks *= _read_scales(weight.scales).unsqueeze(-1)
    return padded[:, : weight.columns] * _scale_rows(linear)[start:stop, None]


def multiply_factors(linear: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of lora_up @ lora_down: [rows, K] float64, zeros without one."""
    if linear.lora_up is None or linear.lora_down is None:
        return torch.zeros(stop - start, linear.in_features, dtype=torch.float64)
    return linear.lora_up[start:stop].double() @ linear.lora_down.double()


def _measure_weight(left: QuantizedLinear, right: QuantizedLinear) -> Difference:
    sums = _Sums()
    if find_scale_deviation(left, right) == 0:
        return EQUAL
    for start, stop in iter_row_ranges(left.out_features, left.in_features):
        sums.add(dequantize_rows(left, start, stop), dequantize_rows(right, start, stop))
    return sums.get()


def _measure_low_rank(left: QuantizedLinear, right: QuantizedLinear) -> Difference:
    if find_factor_deviation(left, right) == 0:
        return EQUAL
    sums = _Sums()
    for start, stop in iter_row_ranges(left.out_features, left.in_features):
        size = multiply_factors(_take_magnitudes(left), start, stop)
        sums.add(multiply_factors(left, start, stop), multiply_factors(right, start, stop), size)
    return sums.get()


def _take_magnitudes(linear: QuantizedLinear) -> QuantizedLinear:
    if linear.lora_up is None or linear.lora_down is None:
        return linear
    return replace(linear, lora_up=linear.lora_up.abs(), lora_down=linear.lora_down.abs())


def _measure_vectors(left: QuantizedLinear, right: QuantizedLinear) -> dict[str, Difference]:
    size = left.in_features
    smooth = (_fill(left.smooth, size, 1.0), _fill(right.smooth, size, 1.0))
    bias = (_fill(left.bias, left.out_features, 0.0), _fill(right.bias, left.out_features, 0.0))
    scales = [one.activation_global_scale for one in (left, right)]
    return {
        "smooth": _compare(*smooth),
        "bias": _compare(*bias),
        "activation_scale": _compare(_fill(scales[0], 1, 1.0), _fill(scales[1], 1, 1.0)),
    }


def _fill(vector: torch.Tensor | None, size: int, default: float) -> torch.Tensor:
    if vector is None:
        return torch.full((size,), default, dtype=torch.float64)
    return vector.double().reshape(size)


def _scale_rows(linear: QuantizedLinear) -> torch.Tensor:
    """Return global scale times channel scale of every row: [N] float64, exact."""
    scale = linear.weight.global_scale
    rows = _fill(linear.channel_scale, linear.out_features, 1.0)
    return rows if scale is None else rows * scale.double()


def _read_scales(scales: torch.Tensor) -> torch.Tensor:
    values = decode_e8m0(scales) if scales.dtype == torch.float8_e8m0fnu else scales.float()
    return values.double()


def _compare(left: torch.Tensor, right: torch.Tensor) -> Difference:
    sums = _Sums()
    sums.add(left, right)
    return sums.get()
