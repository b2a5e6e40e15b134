"""How far a stored weight is from the one it stands for, and errors in relative terms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.elements import get_element
from halfbyte.formats.int4 import count_integer_blocks
from halfbyte.formats.mx import count_mx_blocks
from halfbyte.formats.nvfp4 import E4M3_MAX
from halfbyte.formats.quantize import decode_scales, dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.rows import iter_row_ranges, slice_rows

# The residual is taken anew and sums in another order than it did in the quantizer: a block at the
# very end of the scale does not count as beyond it.
_TOLERANCE = 2.0**-12


@dataclass(frozen=True)
class WeightError:
    """Sums over one weight.

    Attributes:
        squared_error: of the stored weight.
        squared_norm: of the original.
        counts: blocks at the ends of the scale format.
    """

    squared_error: float = 0.0
    squared_norm: float = 0.0
    counts: BlockCounts = field(default_factory=BlockCounts)

    def __add__(self, other: "WeightError") -> "WeightError":
        """Return the sums over both parts."""
        return WeightError(
            self.squared_error + other.squared_error,
            self.squared_norm + other.squared_norm,
            self.counts + other.counts,
        )

    @property
    def relative_error(self) -> float:
        """Relative Frobenius error; 0 for a weight of zeros that stayed zeros."""
        return make_relative_error(self.squared_error, self.squared_norm)


def make_relative_error(squared_error: float, squared_norm: float) -> float:
    """Return the root of error over norm; 0 without an error, infinite beside a norm of 0."""
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def make_snr_db(relative_error: float) -> float | None:
    """Return the signal-to-noise ratio in dB, None where there is no noise."""
    return None if relative_error == 0 else -20 * math.log10(relative_error)


def measure_weight_error(
    read_rows: Callable[[int, int], torch.Tensor], linear: QuantizedLinear
) -> WeightError:
    """Return how far `linear` is from the weight it stands for, a few rows at a time.

    Args:
        read_rows: gives rows [start, stop) of the original weight, [stop - start, K] float.
        linear: without an activation's error: the weight alone is judged.
    """
    total = WeightError()
    for start, stop in iter_row_ranges(*linear.weight.shape):
        total += _measure_rows(read_rows(start, stop).float(), slice_rows(linear, start, stop))
    return total


def _measure_rows(original: torch.Tensor, linear: QuantizedLinear) -> WeightError:
    residual = original  # what the 4-bit part had to store
    if linear.lora_up is not None and linear.lora_down is not None:
        up, down = linear.lora_up.float(), linear.lora_down.float()
        residual = torch.addmm(original, up, down, alpha=-1)
    stored = dequantize(linear.weight)
    codes_of = residual  # the same in the units of the codes
    if linear.channel_scale is not None:
        stored *= linear.channel_scale[:, None]
        codes_of = codes_of / linear.channel_scale[:, None]
    if linear.smooth is not None:
        stored /= linear.smooth.float()
        codes_of = codes_of * linear.smooth.float()
    counts = _count_blocks(codes_of, linear)
    return WeightError(_sum_squares(stored.sub_(residual)), _sum_squares(original), counts)


def _sum_squares(values: torch.Tensor) -> float:
    # one row in float32, the rows in float64: float32's error does not grow with the tensor
    return float(torch.linalg.vector_norm(values, dim=1).double().square().sum())


def _count_blocks(residual: torch.Tensor, linear: QuantizedLinear) -> BlockCounts:
    """Return the counts of a residual [rows, K] in the units of the codes."""
    block_format = linear.weight.format
    padding = block_format.padded_columns(linear.in_features) - linear.in_features
    padded = torch.nn.functional.pad(residual, (0, padding))
    blocks = padded.reshape(len(padded), -1, block_format.block_size)
    amax = blocks.abs().amax(-1)  # [rows, blocks]
    element = get_element(block_format.element)
    if block_format.scale == "float":
        return count_integer_blocks(amax, element, linear.weight.scales.dtype)
    if block_format.scale == "e8m0":
        return count_mx_blocks(amax)
    global_scale = linear.weight.global_scale
    unit = 1.0 if global_scale is None else float(global_scale)
    is_saturated = amax / element.max_value / unit > E4M3_MAX * (1 + _TOLERANCE)
    return BlockCounts(
        blocks=amax.numel(),
        saturated=int(is_saturated.sum()),
        flushed=int(((amax > 0) & (decode_scales(linear.weight) == 0)).sum()),
        zero=int((amax == 0).sum()),
    )
