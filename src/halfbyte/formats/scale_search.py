"""Error-optimal block scales: for each block the stored scale with the least squared error.

THE RULE, so that every implementation gives the same bytes. All arithmetic is float32, each
operation rounded on its own (no fused multiply-add: compile with -ffp-contract=off).

Error of block x under stored scale c: D = the divisor of c; q[i] = element value of
encode(x[i] / D); r[i] = x[i] - q[i] * D (product rounded, then difference); e[i] = r[i] * r[i];
the sum is a halving tree over the block: for h = n/2, n/4, ..., 1: e[i] = e[i] + e[i + h] for
i < h; the error is e[0].

Candidates are tried in the listed order; a later one replaces the best so far only when its
error is strictly smaller (`<`, so a NaN error never replaces and the first never loses to one).
The final codes are encode(x / D) under the winner, exactly as without the search. Blocks of
zeros are not searched: they are stored as without the search.

NVFP4 (`nvfp4`, `nvfp4_one_level`): c0 = the byte that mode "halfbyte" stores without the search
(e4m3_rne_saturating((amax / 6) / g)); candidates: c0, then c0 + d for d = -2, -1, 1, 2, 3, 4, 5,
6 in that order, those below 0x01 or above 0x7E left out. D = decode(c) * g. c0 may be 0x00 (a
block that would be flushed): its codes are 0 and its error is the tree sum of x[i] * x[i].
A block counts as flushed when the winner is 0x00, as saturated when (amax / 6) / g > 448. Where
the caller gives no global scale, `nvfp4` takes g = amax_of_tensor / (6 * 256) instead of
/ (6 * 448), so that the widest blocks can be raised.

MX: c0 = the byte of the chosen E8M0 rounding; candidates: c0, then c0 + d for d = -2, -1, 1 in
that order, those outside 0x00..0xFE left out. D = 2**(c - 127).

INT4, UINT4: t = 7 or 15 (the element's largest number); candidates: round(amax / (t * m)) to the
scale dtype for m = 32/32, 33/32, ..., 48/32 in that order; t * m is exact in float32. Rounding
saturates; a result of zero is stored as 1.0. D = float32(stored). INT4 codes reach -8. Counts are
those of the first candidate.
"""

from collections.abc import Iterator

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.e8m0 import E8M0_MAX, choose_e8m0, decode_e8m0
from halfbyte.formats.elements import (
    ElementFormat,
    decode_table,
    encode_elements,
    get_element,
)
from halfbyte.formats.int4 import count_integer_blocks, measure_amax, round_scale
from halfbyte.formats.mx import count_mx_blocks
from halfbyte.formats.nvfp4 import E2M1_MAX, E4M3_MAX, GlobalScale

NVFP4_OFFSETS = (-2, -1, 1, 2, 3, 4, 5, 6)
MX_OFFSETS = (-2, -1, 1)
INTEGER_MULTIPLIERS = tuple(numerator / 32 for numerator in range(32, 49))
# Scales of the widest blocks stay at 256 of 448, so that the search can also raise them.
SEARCH_E4M3_MAX = 256.0

_E4M3_MAX_BYTE = 0x7E
# One candidate: what is stored, its divisor D (float32), and where it may be chosen.
_Candidate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def search_nvfp4_blocks(
    blocks: torch.Tensor, scale: GlobalScale
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 16] uint8, E4M3 bytes [rows, blocks] uint8, and the counts.

    Args:
        blocks: [rows, blocks, 16] float32, finite.
        scale: the global scale; ones for the one-level format.
    """
    amax = blocks.abs().amax(-1)
    unrounded = amax / E2M1_MAX / scale.multiplier
    first = encode_elements(unrounded, "e4m3").to(torch.int32)
    table = decode_table("e4m3").to(blocks.device)
    is_zero = amax == 0

    def make_candidates() -> Iterator[_Candidate]:
        yield first, table[first] * scale.multiplier, is_zero
        for offset in NVFP4_OFFSETS:
            stored = first + offset
            is_legal = (stored >= 1) & (stored <= _E4M3_MAX_BYTE) & ~is_zero
            stored = stored.clamp_(1, _E4M3_MAX_BYTE)
            yield stored, table[stored] * scale.multiplier, is_legal

    codes, stored = _choose_scales(blocks, get_element("e2m1"), make_candidates())
    counts = BlockCounts(
        blocks=amax.numel(),
        saturated=int((unrounded > E4M3_MAX).sum()),
        flushed=int(((stored == 0) & ~is_zero).sum()),
        zero=int(is_zero.sum()),
    )
    return codes, stored.to(torch.uint8), counts


def search_mx_blocks(
    blocks: torch.Tensor, element: ElementFormat, rounding: str
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 32] uint8, E8M0 bytes [rows, blocks] uint8, and the counts.

    Args:
        blocks: [rows, blocks, 32] float32, finite.
        element: the element format.
        rounding: the E8M0 rounding of the first candidate.
    """
    amax = blocks.abs().amax(-1)
    first = choose_e8m0(amax, element, rounding).to(torch.int32)
    is_zero = amax == 0

    def make_candidates() -> Iterator[_Candidate]:
        yield first, decode_e8m0(first.to(torch.uint8)), is_zero
        for offset in MX_OFFSETS:
            stored = first + offset
            is_legal = (stored >= 0) & (stored <= E8M0_MAX) & ~is_zero
            stored = stored.clamp_(0, E8M0_MAX)
            yield stored, decode_e8m0(stored.to(torch.uint8)), is_legal

    codes, stored = _choose_scales(blocks, element, make_candidates())
    codes.masked_fill_(is_zero.unsqueeze(-1), 0)
    return codes, stored.to(torch.uint8), count_mx_blocks(amax)


def search_integer_blocks(
    blocks: torch.Tensor, element: ElementFormat, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 64] uint8, scales [rows, blocks] `scale_dtype`, and the counts.

    Args:
        blocks: [rows, blocks, 64] float32, finite.
        element: "int4" or "uint4".
        scale_dtype: float16, bfloat16 or float32.
    """
    amax = measure_amax(blocks, element)

    def make_candidates() -> Iterator[_Candidate]:
        for multiplier in INTEGER_MULTIPLIERS:
            stored = round_scale(amax / (element.max_value * multiplier), scale_dtype)
            yield stored, stored.to(torch.float32), amax != 0

    codes, stored = _choose_scales(blocks, element, make_candidates())
    return codes, stored, count_integer_blocks(amax, element, scale_dtype)


def measure_block_error(
    blocks: torch.Tensor, divisor: torch.Tensor, element: ElementFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, blocks, n] uint8 and squared errors [rows, blocks] float32 of a scale.

    Args:
        blocks: [rows, blocks, n] float32, n a power of two.
        divisor: [rows, blocks] float32, D of the rule; where it is zero all codes are zero.
        element: the element format.
    """
    wide = divisor.unsqueeze(-1)
    is_dead = wide == 0
    codes = encode_elements(blocks / wide.masked_fill(is_dead, 1.0), element)
    codes.masked_fill_(is_dead, 0)
    table = decode_table(element.name).to(blocks.device)
    residual = blocks - table[codes.to(torch.int32)] * wide
    return codes, _sum_tree(residual.mul_(residual))


def _choose_scales(
    blocks: torch.Tensor, element: ElementFormat, candidates: Iterator[_Candidate]
) -> tuple[torch.Tensor, torch.Tensor]:
    best, divisor, _ = next(candidates)
    codes, error = measure_block_error(blocks, divisor, element)
    for stored, divisor, is_legal in candidates:
        its_codes, its_error = measure_block_error(blocks, divisor, element)
        is_better = (its_error < error) & is_legal
        best = torch.where(is_better, stored, best)
        error = torch.where(is_better, its_error, error)
        codes = torch.where(is_better.unsqueeze(-1), its_codes, codes)
    return codes, best


def _sum_tree(terms: torch.Tensor) -> torch.Tensor:
    # A fixed order of additions: a different one could choose another scale at a near tie.
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms.squeeze(-1)
