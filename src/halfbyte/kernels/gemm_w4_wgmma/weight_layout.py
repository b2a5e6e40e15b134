"""4-bit weights, low-rank factors and activations as the Hopper GEMM reads them; torch only.

A weight block is 128 channels by 128 columns, 9216 bytes: two warpgroups of 64 channels, each

    2048 bytes  codes of columns 0..63     thread i's 16 bytes at 16 * i
    2048 bytes  codes of columns 64..127   likewise
     512 bytes  block scales

Thread i = 32 * warp + 4 * g + t holds channels 16 * warp + g (8 bytes) and 16 * warp + g + 8 (the
next 8), of each 64 columns the columns 16 * t .. 16 * t + 15. So a thread owns whole blocks of 16,
and one table decodes 16 codes. The order of columns that this gives to the operands of `wgmma`
(PTX ISA, register fragments of m64k32 and m64k16) is the one that activations are written in: of
each 64 columns, with one and with two bytes an activation,

    position 32 * jj + 16 * half + 4 * t + i   holds column 16 * t + 8 * jj + 4 * half + i
    position 16 * j + 8 * h + 2 * t + e        holds column 16 * t + 4 * j + 2 * h + e

A word holds codes c = 0 .. 7 of 8 columns, c = 4 * half + i. The magnitude of c lies at bit 4 * c,
the sign of half 0 at bit 8 * i + 7, of half 1 at 8 * i + 3: both halves find four selectors of
`prmt` in 16 bits, and signs at the top of bytes after a shift by 0 or 4. A magnitude is an index
into a table that the block scale makes, in `E2M1_ORDER` or `INT4_ORDER`. For integer products the
word holds two's complement nibbles: code i of half 0 in bits 8 * i + 4 .. + 7, of half 1 below it.

Block scales, s being the scale times the channel's power of two (`PackedWeight.normalizer`):

    e2m1          4 bytes of thread i at 4 * i, byte 2 * (64-column half) + (channel + 8): bits 0..6
                  the E4M3 code b of s, bit 7 is code(1.5 * s) - b - 4, which is 0 or 1
    int4, fp8     16 bytes of channels warp * 8 + g, word 2 * half + (channel + 8): E4M3 codes of
                  1 * s, 3 * s, 5 * s, 7 * s
    int4, exact   the same words: s as float32; int8 likewise
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.e8m0 import decode_e8m0
from halfbyte.formats.elements import decode_table, encode_elements
from halfbyte.formats.packing import pack_nibbles, unpack_nibbles
from halfbyte.kernels.gemm_w4_wgmma.config import (
    BLOCK_K,
    CHANNELS,
    CHUNK_RANKS,
    CONSUMER_WARPGROUPS,
    HALF_K,
    LORA_BLOCK_BYTES,
    SCALE_BYTES,
    WARPGROUP_BLOCK_BYTES,
    WEIGHT_BLOCK_BYTES,
)

E2M1_ORDER: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 1.5, 3.0, 6.0)  # magnitude of each index
INT4_ORDER: Final = (0, 1, 2, 4, 3, 6, 5, 7)
INT4_TABLE_FACTORS: Final = (1.0, 3.0, 5.0, 7.0)  # 2 and 4 times them add 8 and 16 to their codes
SCALE_BLOCK: Final = 16  # columns of one e2m1 scale byte
INT4_GROUP: Final = 64

# E4M3(q * s) is exact for q = .5, 1, 2, 4 from 2^-5 on (.5 * s is a normal number), and finite for
# q = 6 up to 72: 6 * 72 = 432 rounds to 448. INT4: 1 * s is normal, 7 * 64 = 448.
E2M1_FLOOR: Final = 2.0**-5
E2M1_LARGEST: Final = 72.0
INT4_FLOOR: Final = 2.0**-6
INT4_LARGEST: Final = 64.0
E4M3_LARGEST_POWER: Final = 2.0**8
E4M3_SMALLEST: Final = 2.0**-9
_FLOOR_CODE: Final = 16  # E4M3 code of E2M1_FLOOR
_LARGEST_CODE: Final = 0x69  # of E2M1_LARGEST
_NIBBLE_SOURCE: Final = (4, 0, 5, 1, 6, 2, 7, 3)  # whose sign (or code) lies in nibble n
_CHUNK_ELEMENTS: Final = 1 << 22  # of one pass: a few dozen MB of intermediate tensors


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The weight of one linear in blocks.

    Attributes:
        blocks: [N_pad/128, K_pad/128, 9216] uint8; padding decodes to zeros.
        normalizer: [N] float32, powers of two: decoded numbers times it are the weight's numbers
            without its global scale.
        requantized: blocks of the format that got a larger scale, because theirs lies too far below
            the channel's largest one for the layout (`pack_weight`).
    """

    blocks: torch.Tensor
    normalizer: torch.Tensor
    requantized: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


def name_weight(weight: BlockScaledTensor) -> str:
    """Return "e2m1" or "int4", the weight of a configuration.

    Raises UnsupportedHardwareError for formats that the layout cannot hold.
    """
    block_format = weight.format
    if block_format.element == "e2m1":
        return "e2m1"
    if block_format.element == "int4" and block_format.block_size == INT4_GROUP:
        return "int4"
    raise UnsupportedHardwareError(
        f"weight format {block_format.name!r}: the Hopper kernels read E2M1 codes, and INT4 in "
        f"groups of {INT4_GROUP}; mode='bf16' or the cpu backend runs it"
    )


def pack_weight(
    weight: BlockScaledTensor, mode: str, is_zero: torch.Tensor | None = None
) -> PackedWeight:
    """Return the weight in blocks, on its device.

    A channel's block scales are multiplied by the power of two that puts the largest one just below
    `E2M1_LARGEST` (`INT4_LARGEST`). In mode "fp8" a block whose scale is then below the floor gets
    the floor as its scale and the nearest codes. In mode "exact" such a channel keeps its E4M3
    scales; E8M0 scales start at the largest power of two of E4M3, and only blocks 2^-17 below the
    channel's largest get another scale. Without such blocks both modes have the same bytes. Integer
    products ("int8", and "exact" for INT4) keep every code and scale.

    Args:
        weight: [N, K] of "nvfp4", "nvfp4_one_level", "mxfp4" or "int4".
        mode: "fp8", "exact" or "int8".
        is_zero: [N] bool, channels to fill with zeros; None for no channel.

    Raises:
        UnsupportedHardwareError: another format, or an INT4 code -8 in mode "fp8".
        FormatError: block scales that are NaN, infinite or negative.
    """
    kind = name_weight(weight)
    n, k = weight.shape
    n_pad, k_pad = round_up(n, CHANNELS), round_up(k, BLOCK_K)
    device = weight.data.device
    blocks = torch.empty(
        (n_pad // CHANNELS, k_pad // BLOCK_K, WEIGHT_BLOCK_BYTES), dtype=torch.uint8, device=device
    )
    normalizer = torch.ones(n_pad, dtype=torch.float32, device=device)
    requantized = 0
    if k == 0:
        return PackedWeight(blocks, normalizer[:n], requantized)
    for rows in _list_row_chunks(n_pad, k_pad):
        codes, scales = _read_rows(weight, rows, k_pad, is_zero)
        if kind == "e2m1":
            chunk = _normalize_e2m1(codes, scales, mode, weight.format.scale)
            words = _pack_sign_magnitude(chunk.codes, E2M1_ORDER)
            scale_bytes = _encode_e2m1_scales(chunk.scales)
        elif mode == "fp8":
            _check_has_no_minus_8(codes, rows)
            chunk = _normalize_int4(codes, scales)
            words = _pack_sign_magnitude(chunk.codes, INT4_ORDER)
            scale_bytes = _encode_int4_tables(chunk.scales)
        else:
            chunk = _NormalizedRows(codes, scales, torch.ones(len(codes), device=device), 0)
            words = _pack_integers(codes)
            scale_bytes = scales.unsqueeze(-1).contiguous().view(torch.uint8)
        target = blocks[rows.start // CHANNELS : rows.stop // CHANNELS]
        _store_blocks(target, words, scale_bytes, kind)
        normalizer[rows] = chunk.normalizer
        requantized += chunk.requantized
    return PackedWeight(blocks, normalizer[:n].contiguous(), requantized)


@dataclass(frozen=True, eq=False)
class _NormalizedRows:
    """Rows ready to be packed.

    Attributes:
        codes: [rows, K_pad] float32 values of E2M1 or INT4 elements.
        scales: [rows, K_pad/16] (INT4: K_pad/64) float32.
        normalizer: [rows] float32.
        requantized: blocks with another scale than theirs.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    normalizer: torch.Tensor
    requantized: int


def _list_row_chunks(n_pad: int, k_pad: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // (k_pad * CHANNELS)) * CHANNELS if k_pad else CHANNELS
    for start in range(0, n_pad, step):
        yield slice(start, min(start + step, n_pad))


def _read_rows(
    weight: BlockScaledTensor, rows: slice, k_pad: int, is_zero: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (element values [rows, K_pad], scales a format block [rows, blocks]), float32.

    Rows and columns beyond the tensor are zeros under scale 1.
    """
    n, k = weight.shape
    stop = min(rows.stop, n)
    device = weight.data.device
    num_rows = rows.stop - rows.start
    values = torch.zeros((num_rows, k_pad), dtype=torch.float32, device=device)
    blocks = k_pad // weight.format.block_size
    scales = torch.ones((num_rows, blocks), dtype=torch.float32, device=device)
    if stop > rows.start and k:
        codes = unpack_nibbles(weight.data[rows.start : stop])[:, :k]
        table = decode_table(weight.format.element).to(device)
        values[: stop - rows.start, :k] = table[codes.to(torch.int32)]
        stored = _decode_scales(weight, slice(rows.start, stop))
        scales[: stop - rows.start, : stored.shape[1]] = stored
        if is_zero is not None:
            values[: stop - rows.start].masked_fill_(is_zero[rows.start : stop, None], 0.0)
    return values, scales


def _decode_scales(weight: BlockScaledTensor, rows: slice) -> torch.Tensor:
    """Return block scales [rows, blocks] float32, without the global scale."""
    stored = weight.scales[rows]
    scales = decode_e8m0(stored) if weight.format.scale == "e8m0" else stored.float()
    is_bad = ~torch.isfinite(scales) | (scales < 0)
    if bool(is_bad.any()):
        row, block = torch.nonzero(is_bad)[0].tolist()
        raise FormatError(
            f"weight_scales[{rows.start + row}, {block}] is {scales[row, block].item()}, wanted "
            "finite and not negative; quantize it again"
        )
    return scales


def _normalize_e2m1(
    values: torch.Tensor, scales: torch.Tensor, mode: str, scale_kind: str
) -> _NormalizedRows:
    """Return E2M1 rows with scales in the range of the layout, one a 16 columns."""
    values, largest, is_used = _drop_zero_blocks(values, scales)
    power = _choose_power(largest, E2M1_LARGEST)
    is_low = is_used & (scales.double() * power[:, None] < E2M1_FLOOR)
    floor = torch.full_like(largest, E2M1_FLOOR)
    if mode != "fp8":
        has_low = is_low.any(1)
        kept = torch.ones_like(power)  # E4M3 scales as they are: all of them are E4M3 numbers
        if scale_kind == "e8m0":
            kept = _choose_power(largest, E4M3_LARGEST_POWER)
        power = torch.where(has_low, kept, power)
        floor = torch.where(has_low, E4M3_SMALLEST, floor)
        is_low = is_used & (scales.double() * power[:, None] < E4M3_SMALLEST)
    scaled = (scales.double() * power[:, None]).float()
    # a block of zeros has any scale; one that the kernel can decode
    scaled = torch.where(is_used, scaled, E2M1_FLOOR)
    values, scaled = _raise_low_blocks(values, scaled, is_low, floor, "e2m1")
    repeats = values.shape[1] // scaled.shape[1] // SCALE_BLOCK
    return _NormalizedRows(
        codes=values,
        scales=scaled.repeat_interleave(repeats, 1),
        normalizer=(1.0 / power).float(),
        requantized=int(is_low.sum()),
    )


def _normalize_int4(values: torch.Tensor, scales: torch.Tensor) -> _NormalizedRows:
    """Return INT4 rows with scales in the range of an E4M3 table, one a 64 columns."""
    values, largest, is_used = _drop_zero_blocks(values, scales)
    power = _choose_power(largest, INT4_LARGEST)
    scaled = (scales.double() * power[:, None]).float()
    is_low = is_used & (scaled < INT4_FLOOR)
    scaled = torch.where(is_used, scaled, INT4_FLOOR)
    floor = torch.full_like(largest, INT4_FLOOR)
    values, scaled = _raise_low_blocks(values, scaled, is_low, floor, "int4")
    return _NormalizedRows(values, scaled, (1.0 / power).float(), int(is_low.sum()))


def _check_has_no_minus_8(values: torch.Tensor, rows: slice) -> None:
    is_lowest = values == -8
    if bool(is_lowest.any()):
        row, column = torch.nonzero(is_lowest)[0].tolist()
        raise UnsupportedHardwareError(
            f"weight[{rows.start + row}, {column}]: INT4 code -8, and E4M3 tables hold signs and "
            "magnitudes up to 7; take mode='exact' or 'int8'"
        )


def _drop_zero_blocks(
    values: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (values, zeros where the scale is zero; the largest scale of each row; used blocks).

    A used block holds a number that is not zero: the scales of others mean nothing.
    """
    blocks = values.reshape(*scales.shape, -1)
    if bool((scales == 0).any()):
        blocks = blocks.masked_fill((scales == 0).unsqueeze(-1), 0.0)
    is_used = blocks.any(2)
    return blocks.flatten(1), torch.where(is_used, scales, 0.0).amax(1), is_used


def _choose_power(largest: torch.Tensor, limit: float) -> torch.Tensor:
    """Return float64 powers of two: the largest p with largest * p <= limit; 1 for a zero."""
    mantissa, exponent = torch.frexp(largest.double())
    limit_mantissa, limit_exponent = torch.frexp(torch.tensor(limit, dtype=torch.float64))
    fits = mantissa <= limit_mantissa
    shift = torch.where(fits, int(limit_exponent), int(limit_exponent) - 1) - exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(mantissa), shift), 1.0)


def _raise_low_blocks(
    values: torch.Tensor,
    scales: torch.Tensor,
    is_low: torch.Tensor,
    floor: torch.Tensor,
    element: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, scales), blocks marked `is_low` quantized again with their row's floor."""
    if not bool(is_low.any()):
        return values, scales
    blocks = values.reshape(*scales.shape, -1).clone()
    row, block = torch.nonzero(is_low, as_tuple=True)
    wanted = blocks[row, block] * (scales[row, block] / floor[row])[:, None]
    table = decode_table(element).to(values.device)
    blocks[row, block] = table[encode_elements(wanted, element).to(torch.int32)]
    return blocks.flatten(1), torch.where(is_low, floor[:, None], scales)


def _pack_sign_magnitude(values: torch.Tensor, order: tuple[float, ...]) -> torch.Tensor:
    """Return packed words of values [rows, K_pad]: [rows, K_pad/2] uint8, 4 bytes for 8 columns."""
    index = torch.zeros(16, dtype=torch.uint8, device=values.device)
    for place, number in enumerate(order):
        index[int(2 * number)] = place
    magnitude = index[(values.abs() * 2).to(torch.int32)]
    sign = torch.signbit(values).to(torch.uint8) << 3
    source = torch.tensor(_NIBBLE_SOURCE, device=values.device)
    moved = sign.reshape(len(sign), -1, 8)[..., source].flatten(1)
    return pack_nibbles(magnitude | moved)


def _pack_integers(values: torch.Tensor) -> torch.Tensor:
    """Return two's complement nibbles of values [rows, K_pad]: [rows, K_pad/2] uint8."""
    nibbles = values.to(torch.int8).view(torch.uint8) & 0x0F
    source = torch.tensor(_NIBBLE_SOURCE, device=values.device)
    return pack_nibbles(nibbles.reshape(len(nibbles), -1, 8)[..., source].flatten(1))


def _encode_e2m1_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return scale bytes of scales [rows, K_pad/16] float32: [rows, K_pad/16, 1] uint8.

    The rounding bit of scales that an fp8 table cannot hold (kept in mode "exact") is 0.
    """
    code = encode_elements(scales, "e4m3")
    threes = encode_elements(scales * 1.5, "e4m3")
    has_table = (code >= _FLOOR_CODE) & (code <= _LARGEST_CODE)
    rounding = torch.where(has_table, threes - code - 4, 0).to(torch.uint8)
    return (code | (rounding << 7)).unsqueeze(-1)


def _encode_int4_tables(scales: torch.Tensor) -> torch.Tensor:
    """Return E4M3(1 s), (3 s), (5 s), (7 s) of scales [rows, groups]: [rows, groups, 4] uint8."""
    factors = torch.tensor(INT4_TABLE_FACTORS, device=scales.device)
    return encode_elements(scales.unsqueeze(-1) * factors, "e4m3")


def _store_blocks(
    target: torch.Tensor, words: torch.Tensor, scale_bytes: torch.Tensor, kind: str
) -> None:
    """Fill blocks [row blocks, column blocks, 9216] from rows of words and of scale bytes."""
    row_blocks, column_blocks = target.shape[:2]
    parts = target.view(row_blocks, column_blocks, CONSUMER_WARPGROUPS, WARPGROUP_BLOCK_BYTES)
    # channels of a block: warpgroup, warp, +8, g; columns: half, t
    channels = (row_blocks, CONSUMER_WARPGROUPS, 4, 2, 8)
    codes = words.view(*channels, column_blocks, 2, 4, 8)
    ordered = codes.permute(0, 5, 1, 6, 2, 4, 7, 3, 8)
    parts[..., : WARPGROUP_BLOCK_BYTES - SCALE_BYTES] = ordered.reshape(*parts.shape[:3], -1)
    if kind == "e2m1":
        scales = scale_bytes.view(*channels, column_blocks, 2, 4, 1)
        placed = scales.permute(0, 5, 1, 2, 4, 7, 6, 3, 8)
    else:
        scales = scale_bytes.view(*channels, column_blocks, 2, 4)
        placed = scales.permute(0, 5, 1, 2, 4, 6, 3, 7)
    parts[..., WARPGROUP_BLOCK_BYTES - SCALE_BYTES :] = placed.reshape(*parts.shape[:3], -1)


def pack_lora_up(lora_up: torch.Tensor) -> torch.Tensor:
    """Return low-rank factors as fragments of m64k16: [N_pad/128, R_pad/32, 8192] uint8.

    Of a chunk of 32 ranks: 2 steps of 16 ranks, 2 warpgroups, 128 threads with 16 bytes each.
    Thread 32 * warp + 4 * g + t has, of ranks 2 * t and 2 * t + 1, channels 16 * warp + g and that
    + 8, then the same of ranks 8 higher (PTX ISA, register fragments of wgmma.m64nNk16).

    Args:
        lora_up: [N, R] float16 or bfloat16.
    """
    n, rank = lora_up.shape
    n_pad, r_pad = round_up(n, CHANNELS), round_up(rank, CHUNK_RANKS)
    padded = torch.zeros((n_pad, r_pad), dtype=lora_up.dtype, device=lora_up.device)
    padded[:n, :rank] = lora_up
    chunks = r_pad // CHUNK_RANKS
    # channels: block, warpgroup, warp, +8, g; ranks: chunk, step, +8, t, element
    parts = padded.view(n_pad // CHANNELS, CONSUMER_WARPGROUPS, 4, 2, 8, chunks, 2, 2, 4, 2)
    ordered = parts.permute(0, 5, 6, 1, 2, 4, 8, 7, 3, 9).contiguous()
    return ordered.view(torch.uint8).view(n_pad // CHANNELS, chunks, LORA_BLOCK_BYTES)


def pack_act(act: torch.Tensor) -> torch.Tensor:
    """Return activations [M, K_pad] in the order that the GEMM multiplies them in; same dtype.

    Args:
        act: [M, K_pad], K_pad a multiple of 64, of one or two bytes an element.
    """
    tail = (4, 2, 2, 4) if act.element_size() == 1 else (4, 4, 2, 2)
    parts = act.reshape(act.shape[0], act.shape[1] // HALF_K, *tail)
    return parts.permute(0, 1, 3, 4, 2, 5).reshape(act.shape)


def unpack_act(packed: torch.Tensor) -> torch.Tensor:
    """Return activations [M, K_pad] in the order of columns; the inverse of `pack_act`."""
    tail = (2, 2, 4, 4) if packed.element_size() == 1 else (4, 2, 4, 2)
    parts = packed.reshape(packed.shape[0], packed.shape[1] // HALF_K, *tail)
    return parts.permute(0, 1, 4, 2, 3, 5).reshape(packed.shape)
