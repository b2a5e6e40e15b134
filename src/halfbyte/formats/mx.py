"""MX blocks: 32 elements (E2M1, E2M3, E3M2, E4M3, E5M2) under one E8M0 scale; one chunk at a time.

Rule: OCP MX v1.0, section 6.3, with the scale chosen by one of the named roundings.
"""

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.e8m0 import choose_e8m0, decode_e8m0
from halfbyte.formats.elements import ElementFormat, encode_elements


def quantize_mx_blocks(
    blocks: torch.Tensor, element: ElementFormat, rounding: str
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 32] uint8, E8M0 bytes [rows, blocks] uint8, and the counts.

    codes = element(x / 2**(byte - 127)); the division by a power of two is exact.

    Args:
        blocks: [rows, blocks, 32] float32, finite.
        element: the element format.
        rounding: the E8M0 rounding, one of `E8M0_ROUNDINGS`.
    """
    amax = blocks.abs().amax(-1)
    stored = choose_e8m0(amax, element, rounding)
    codes = encode_mx_payload(blocks, stored, element)
    codes.masked_fill_((amax == 0).unsqueeze(-1), 0)
    return codes, stored, count_mx_blocks(amax)


def count_mx_blocks(amax: torch.Tensor) -> BlockCounts:
    """Return the counts of blocks with these largest magnitudes ([rows, blocks] float32).

    E8M0 reaches further than float32 in both directions: nothing saturates or is flushed.
    """
    return BlockCounts(blocks=amax.numel(), zero=int((amax == 0).sum()))


def encode_mx_payload(
    blocks: torch.Tensor, stored: torch.Tensor, element: ElementFormat
) -> torch.Tensor:
    """Return the element codes of blocks whose scale bytes are chosen: uint8, shape of `blocks`."""
    return encode_elements(blocks / decode_e8m0(stored).unsqueeze(-1), element)
