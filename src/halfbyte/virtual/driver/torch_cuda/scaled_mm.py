"""torch._scaled_mm in float64: what stands for the library kernel that a CPU does not have.

Formats as torch documents them: FP8 operands with scalar or per-row scales, MXFP8 (E8M0 scale per
32 elements) and NVFP4 (E4M3 scale per 16 elements, two E2M1 values per byte, the low one first);
block scales lie in 128 x 4 tiles of 32 x 4 x 4 bytes as cuBLAS wants them.
"""

from typing import Any

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.e8m0 import decode_e8m0
from halfbyte.formats.elements import decode_elements
from halfbyte.formats.packing import unpack_nibbles
from halfbyte.formats.scale_layout import unpack_scales

Tensor = torch.Tensor
BLOCK_SCALE_LAYOUT = "swizzled_128x4"  # as cuBLAS wants them


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **rest: Any,
) -> Tensor:
    """Return `(a * scale_a) @ (b * scale_b) + bias` in `out_dtype`, rounded once from float64.

    Raises:
        FormatError: the scales have no known layout for the operands.
    """
    left = _dequantize(a, scale_a)
    right = _dequantize(b.t(), _transpose_scale(scale_b)).t()
    product = left @ right
    if bias is not None:
        product = product + bias.double()
    if scale_result is not None:
        product = product / scale_result.double()
    return product.to(out_dtype or torch.bfloat16)


def _transpose_scale(scale: Tensor) -> Tensor:
    """Return the scale of `b` as that of its transpose; block scales are one flat buffer."""
    is_rowwise = scale.dtype == torch.float32 and scale.dim() == 2
    return scale.t() if is_rowwise else scale


def _dequantize(values: Tensor, scale: Tensor) -> Tensor:
    """Return float64 [rows, k] of the rows of an operand and its scales."""
    decoded = decode(values)
    rows, k = decoded.shape
    if scale.dtype == torch.float32:
        if scale.numel() == 1:
            return decoded * scale.double().reshape(1, 1)
        if scale.numel() == rows:
            return decoded * scale.double().reshape(rows, 1)
        raise FormatError(f"a float32 scale of shape {tuple(scale.shape)} fits no {rows} rows")
    block = 16 if scale.dtype == torch.float8_e4m3fn else 32
    blocks = -(-k // block)
    scales = unpack_scales(scale.contiguous(), BLOCK_SCALE_LAYOUT, rows, blocks)
    return (decoded.reshape(rows, blocks, -1) * decode(scales)[:, :, None]).reshape(rows, k)


def decode(values: Tensor) -> Tensor:
    """Return float64 of FP8, E8M0 or packed FP4 values; FP4 doubles the last dimension."""
    if values.dtype == torch.float8_e8m0fnu:
        return decode_e8m0(values).double()
    if values.dtype == torch.float4_e2m1fn_x2:
        codes = unpack_nibbles(values.contiguous().view(torch.uint8))
        return decode_elements(codes, "e2m1").double()
    return values.to(torch.float32).double()
