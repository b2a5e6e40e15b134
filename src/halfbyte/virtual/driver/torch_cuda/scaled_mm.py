"""torch._scaled_mm in float64: what stands for the library kernel that a CPU does not have.

Formats as torch documents them: FP8 operands with scalar or per-row scales, MXFP8 (E8M0 scale per
32 elements) and NVFP4 (E4M3 scale per 16 elements, two E2M1 values per byte, the low one first);
block scales lie in 128 x 4 tiles of 32 x 4 x 4 bytes as cuBLAS wants them.
"""

from typing import Any

import torch

from halfbyte.errors import FormatError

Tensor = torch.Tensor
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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
    scales = unswizzle_scales(decode(scale.contiguous().reshape(-1)), rows, blocks)
    return (decoded.reshape(rows, blocks, -1) * scales[:, :, None]).reshape(rows, k)


def decode(values: Tensor) -> Tensor:
    """Return float64 of FP8, E8M0 or packed FP4 values; FP4 doubles the last dimension."""
    if values.dtype == torch.float8_e8m0fnu:
        exponents = values.view(torch.uint8).to(torch.int64)
        powers = torch.exp2((exponents - 127).double())
        return torch.where(exponents == 255, torch.nan, powers)
    if values.dtype == torch.float4_e2m1fn_x2:
        codes = values.contiguous().view(torch.uint8)
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)
        pair = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
        return pair.reshape(*codes.shape[:-1], -1)
    return values.to(torch.float32).double()


def unswizzle_scales(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Return [rows, blocks] of block scales that lie in 128 x 4 tiles.

    Raises:
        FormatError: their number is not that of whole tiles.
    """
    row_tiles, block_tiles = -(-rows // 128), -(-blocks // 4)
    wanted = row_tiles * block_tiles * 512
    if scales.numel() != wanted:
        raise FormatError(f"{scales.numel()} block scales; {rows} x {blocks} blocks need {wanted}")
    tiles = scales.reshape(row_tiles, block_tiles, 32, 4, 4)
    grid = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, block_tiles * 4)
    return grid[:rows, :blocks]
