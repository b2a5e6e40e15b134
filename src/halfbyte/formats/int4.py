"""INT4 and UINT4 blocks: 64 integers under one float scale; one chunk at a time.

INT4 is SVDQuant's symmetric group quantization (scale absmax / 7, codes -8..7); UINT4 serves
activations that a shift made nonnegative (scale max / 15, codes 0..15).
"""

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.elements import ElementFormat, encode_elements


def quantize_integer_blocks(
    blocks: torch.Tensor, element: ElementFormat, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 64] uint8, scales [rows, blocks] `scale_dtype`, and the counts.

    scale = amax / element.max_value in float32, rounded to `scale_dtype` (saturating, never inf),
    1.0 where that is zero; codes = clamp(round_half_even(x / scale)). For "uint4" amax is the
    largest value and negative values become 0.

    Args:
        blocks: [rows, blocks, 64] float32, finite.
        element: "int4" or "uint4".
        scale_dtype: float16, bfloat16 or float32.
    """
    amax = measure_amax(blocks, element)
    stored = round_scale(amax / element.max_value, scale_dtype)
    codes = encode_integer_payload(blocks, stored, element)
    return codes, stored, count_integer_blocks(amax, element, scale_dtype)


def count_integer_blocks(
    amax: torch.Tensor, element: ElementFormat, scale_dtype: torch.dtype
) -> BlockCounts:
    """Return the counts of blocks that `measure_amax` found to reach `amax` ([rows, blocks])."""
    unrounded = amax / element.max_value
    is_zero = amax == 0
    return BlockCounts(
        blocks=amax.numel(),
        saturated=int((unrounded > torch.finfo(scale_dtype).max).sum()),
        flushed=int(((unrounded.to(scale_dtype) == 0) & ~is_zero).sum()),
        zero=int(is_zero.sum()),
    )


def measure_amax(blocks: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    """Return what the scale must reach: [rows, blocks] float32, the largest |x| or max(x, 0)."""
    if element.kind == "uint":
        return blocks.amax(-1).clamp_(min=0.0)
    return blocks.abs().amax(-1)


def round_scale(scale: torch.Tensor, scale_dtype: torch.dtype) -> torch.Tensor:
    """Return float32 `scale` in `scale_dtype`: saturating; 1.0 where it rounds to zero."""
    stored = scale.clamp(max=torch.finfo(scale_dtype).max).to(scale_dtype)
    return stored.masked_fill_(stored == 0, 1.0)


def encode_integer_payload(
    blocks: torch.Tensor, stored: torch.Tensor, element: ElementFormat
) -> torch.Tensor:
    """Return the integer codes of blocks whose scales are chosen: uint8, shape of `blocks`."""
    return encode_elements(blocks / stored.to(torch.float32).unsqueeze(-1), element)
