"""What quantizing a file cost: one record for each layer, and the JSON report of a run."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfbyte.formats.elements import get_element
from halfbyte.formats.quantize import decode_scales, dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.rows import iter_row_ranges, slice_rows

REPORT_VERSION = 1


@dataclass(frozen=True)
class LayerReport:
    """One quantized linear.

    Attributes:
        name: of the layer.
        out_features: N.
        in_features: K.
        format: of the weight.
        rank: R.
        group: layers that share its lora_down, itself among them.
        relative_error: Frobenius norm of (stored weight - original) over that of the original.
        snr_db: -20 log10 of it; None where nothing was lost.
        blocks: blocks of the weight.
        saturated: blocks that wanted a scale beyond the largest of the format.
        flushed: blocks with a nonzero element whose scale rounded to zero.
        zero: blocks of zeros alone.
        bytes_before: of weight and bias in the input.
        bytes_after: of everything stored for the layer.
    """

    name: str
    out_features: int
    in_features: int
    format: str
    rank: int
    group: tuple[str, ...]
    relative_error: float
    snr_db: float | None
    blocks: int
    saturated: int
    flushed: int
    zero: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class WeightError:
    """Sums over one weight: squared error, squared norm, and blocks at the ends of the scale."""

    squared_error: float = 0.0
    squared_norm: float = 0.0
    saturated: int = 0
    flushed: int = 0
    zero: int = 0

    def __add__(self, other: "WeightError") -> "WeightError":
        """Return the sums over both parts."""
        return WeightError(
            self.squared_error + other.squared_error,
            self.squared_norm + other.squared_norm,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            self.zero + other.zero,
        )

    @property
    def relative_error(self) -> float:
        """Relative Frobenius error; 0 for a weight of zeros that stayed zeros."""
        if self.squared_norm == 0:
            return 0.0 if self.squared_error == 0 else math.inf
        return math.sqrt(self.squared_error / self.squared_norm)


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


def make_report(
    settings: dict[str, Any], layers: list[LayerReport], others: dict[str, Any]
) -> dict[str, Any]:
    """Return the report of a run as JSON values, the same for the same input and settings."""
    elements = sum(layer.out_features * layer.in_features for layer in layers)
    after = sum(layer.bytes_after for layer in layers)
    return {
        "report": "halfbyte quantize",
        "report_version": REPORT_VERSION,
        **settings,
        "totals": {
            "layers": len(layers),
            "linear_bytes_before": sum(layer.bytes_before for layer in layers),
            "linear_bytes_after": after,
            "bits_per_weight": after * 8 / elements if elements else 0.0,
            "worst_relative_error": max((layer.relative_error for layer in layers), default=0.0),
            "mean_relative_error": sum(layer.relative_error for layer in layers)
            / max(len(layers), 1),
            "blocks": sum(layer.blocks for layer in layers),
            "saturated": sum(layer.saturated for layer in layers),
            "flushed": sum(layer.flushed for layer in layers),
            "zero": sum(layer.zero for layer in layers),
        },
        "layers": [asdict(layer) for layer in sorted(layers, key=lambda layer: layer.name)],
        **others,
    }


def encode_report(report: dict[str, Any]) -> bytes:
    """Return the bytes of a report file."""
    return json.dumps(report, indent=1, ensure_ascii=False).encode() + b"\n"


def make_snr_db(relative_error: float) -> float | None:
    """Return the signal-to-noise ratio in dB, None where there is no noise."""
    return None if relative_error == 0 else -20 * math.log10(relative_error)


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
    return WeightError(_sum_squares(stored.sub_(residual)), _sum_squares(original)) + counts


def _sum_squares(values: torch.Tensor) -> float:
    # one row in float32, the rows in float64: float32's error does not grow with the tensor
    return float(torch.linalg.vector_norm(values, dim=1).double().square().sum())


def _count_blocks(residual: torch.Tensor, linear: QuantizedLinear) -> WeightError:
    """Count blocks at the ends of the scale format (see `formats.block_counts`)."""
    block_format = linear.weight.format
    padding = block_format.padded_columns(linear.in_features) - linear.in_features
    padded = torch.nn.functional.pad(residual, (0, padding))
    blocks = padded.reshape(len(padded), -1, block_format.block_size)
    amax = blocks.abs().amax(-1)  # [rows, blocks]
    scales = decode_scales(linear.weight)
    largest = get_element(block_format.element).max_value
    limit = {"e4m3": 448.0, "e8m0": 2.0**127}.get(block_format.scale)
    if limit is None:
        limit = torch.finfo(linear.weight.scales.dtype).max
    global_scale = linear.weight.global_scale
    unit = 1.0 if global_scale is None else float(global_scale)
    is_saturated = amax / largest / unit > limit * (1 + 2.0**-12)
    return WeightError(
        saturated=int(is_saturated.sum()),
        flushed=int(((amax > 0) & (scales == 0)).sum()),
        zero=int((amax == 0).sum()),
    )
