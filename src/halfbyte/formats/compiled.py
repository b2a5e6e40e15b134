"""The way from format records to the compiled quantizer: the same bytes as the torch path.

`formats.quantize` asks here first; where the answer is no it does the work in torch.
"""

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_format import BlockFormat
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.elements import encode_scalar
from halfbyte.formats.nvfp4 import GlobalScale
from halfbyte.formats.quantize_plan import QuantizePlan
from halfbyte.native import NativeLibrary, library
from halfbyte.native.packed_linear import PackedOperand, dequantize_packed
from halfbyte.native.quantize_blocks import (
    QuantizedBlocks,
    QuantizeSettings,
    is_supported,
    measure_amax,
    quantize_blocks,
)

_ELEMENTS = ("e2m1", "int4", "uint4")


def find_library(x: torch.Tensor, record: BlockFormat) -> NativeLibrary | None:
    """Return the compiled library where it can quantize `x` to `record`, else None."""
    if x.device.type != "cpu" or record.element not in _ELEMENTS:
        return None
    return library()


def measure_amax_compiled(x: torch.Tensor) -> torch.Tensor | None:
    """Return the largest magnitude of `x` as [] float32.

    None without the library, for a tensor that it cannot read in place, and for one that holds a
    NaN or an infinity.
    """
    loaded = library()
    if loaded is None or not is_supported(x):
        return None
    amax, is_finite = measure_amax(loaded, x)
    return torch.tensor(amax) if is_finite else None


def quantize_compiled(
    loaded: NativeLibrary, x: torch.Tensor, plan: QuantizePlan, scale: GlobalScale
) -> QuantizedBlocks:
    """Return the codes, scales and counts of `x`; `nonfinite` blocks are for the caller to refuse.

    Args:
        loaded: what `find_library` returned.
        x: [rows, columns] float32, bfloat16 or float16, any strides.
        plan: the checked request.
        scale: the global scale; ones for formats without.
    """
    values = x if is_supported(x) else x.contiguous()
    return quantize_blocks(loaded, values, make_settings(plan, scale))


def make_settings(plan: QuantizePlan, scale: GlobalScale) -> QuantizeSettings:
    """Return `plan` and the global scale as the plain settings of the compiled loops."""
    record, mode = plan.format, plan.mode
    return QuantizeSettings(
        element=record.element,  # type: ignore[arg-type]  # find_library admits these three
        block_size=record.block_size,
        scale=record.scale,
        scale_dtype=plan.scale_dtype,
        multiplier=float(scale.multiplier),
        divisor=float(scale.divisor),
        min_scale=mode.min_scale,
        block_scale_order=mode.block_scale_order,
        payload_order=mode.payload_order,
        zero_scale=encode_scalar(mode.zero_block_scale, "e4m3"),
        flushed_scale=encode_scalar(mode.flushed_block_scale, "e4m3"),
        keeps_minus_zero=mode.keeps_minus_zero,
        e8m0_rounding=plan.e8m0_rounding,
        is_optimal=plan.scale_search == "optimal",
    )


def count_blocks(blocks: QuantizedBlocks) -> BlockCounts:
    """Return the counts of a compiled run as the record of the formats."""
    return BlockCounts(blocks.scales.numel(), blocks.saturated, blocks.flushed, blocks.zero)


def make_operand(t: BlockScaledTensor) -> PackedOperand:
    """Return `t` as the compiled loops take it; 4-bit formats alone."""
    return PackedOperand(
        codes=t.data.contiguous(),
        scales=t.scales.contiguous(),
        element=t.format.element,
        scale=t.format.scale,
        block_size=t.format.block_size,
        multiplier=1.0 if t.global_scale is None else float(t.global_scale),
    )


def dequantize_compiled(t: BlockScaledTensor) -> torch.Tensor | None:
    """Return the float32 numbers of `t`: [rows, columns]; None where the loops cannot do it."""
    loaded = find_library(t.data, t.format)
    if loaded is None:
        return None
    out = torch.empty(t.shape, dtype=torch.float32)
    dequantize_packed(loaded, make_operand(t), out)
    return out
