"""Padding of swizzled scales: writers of real files fill it with zeros.

Scales where padding should be say that the scales are those of a larger weight.
"""

import torch

from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.scale_layout import padded_scale_shape, unpack_scales

LAYOUT = "swizzled_128x4"


def find_used_padding(name: str, scales: torch.Tensor, rows: int, blocks: int) -> str | None:
    """Return what is wrong with byte-wide scales of a [rows, blocks] grid; None where all is well.

    Scales of another size are not looked at: decoding names their shape.
    """
    height, width = padded_scale_shape(rows, blocks, LAYOUT)
    if scales.numel() != height * width or (height, width) == (rows, blocks):
        return None
    padded = unpack_scales(view_as_bytes(scales.contiguous()), LAYOUT, height, width)
    count = int(padded[rows:].count_nonzero() + padded[:rows, blocks:].count_nonzero())
    if count == 0:
        return None
    return (
        f"{name}: got {count} scales in the padding of {rows} rows and {blocks} blocks, wanted "
        "zeros; weight and scales are of different sizes"
    )
