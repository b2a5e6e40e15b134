"""What the Hopper GEMM reads and computes, in float64 from the bytes of its operands.

    y[m, n] = (sum_k act[m, k] * w[n, k] + sum_r lora_act[m, r] * lora_up'[n, r])
              * channel_scale[n] * token_scale[m] * alpha + bias[n]

INT4 on integer tensor cores sums 64 columns at a time, and scales each sum before it is added:
act_group_scale[m, j] * weight_scale[n, j] in mode "exact", weight_scale[n, j] in mode "int8".

The places of codes, scales and factors are written here as the formulas of
`kernels/gemm_w4_wgmma/weight_layout.py`, one element at a time; nothing is shared with it.
`fold_weight` says the same numbers from the record:

    s' = s * p        p: the largest power of two with p * (largest s of the channel) <= L
    w  = e4m3(q * s')                 mode "fp8": rounded to nearest even
    w  = q * s'                       mode "exact", E2M1
    L  = 72 (E2M1), 64 (INT4)

where a block with s' < F = 2^-5 (INT4: 2^-6) has q = nearest code of q * s' / F and s' = F in mode
"fp8"; in mode "exact" its channel has p = 1 (E8M0: L = 256 and F = 2^-9). Blocks without a nonzero
number have no part in this. INT4 in the modes "exact" and "int8" is w = q * s.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.reference.decode import (
    ByteArray,
    Float64Array,
    decode_code_values,
    make_value_table,
    read_bytes,
    read_floats,
)
from halfbyte.reference.quantize_act_lora import encode_nearest_even, encode_nearest_magnitude

_BLOCK: Final = 128  # channels, and columns
_WARPGROUP_BYTES: Final = 4608
_SCALE_OFFSET: Final = 4096
_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 1.5, 3.0, 6.0)
_LIMITS: Final = {"e2m1": (72.0, 2.0**-5), "int4": (64.0, 2.0**-6)}  # L and F of mode "fp8"
_EXACT_E8M0_LIMITS: Final = (2.0**8, 2.0**-9)

_Words = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class WgmmaOperands:
    """The tensors that one GEMM reads.

    Attributes:
        mode: "fp8", "exact" or "int8". weight: "e2m1" or "int4".
        act: [M, K_pad] float8_e4m3fn, float16 or int8, columns in the order of operands.
        weight_blocks: [N_pad/128, K_pad/128, 9216] uint8.
        token_scale: [M] float32, modes "fp8" and "int8".
        act_group_scale: [M, K_pad/64] float16, mode "exact" of INT4.
        channel_scale: [N_pad] float32.
        lora_act: [M, R_pad] float16 or bfloat16. lora_blocks: [N_pad/128, R_pad/32, 8192] uint8.
        bias: [N_pad] float32. alpha: [1] float32.
    """

    mode: str
    weight: str
    act: torch.Tensor
    weight_blocks: torch.Tensor
    channel_scale: torch.Tensor
    token_scale: torch.Tensor | None = None
    act_group_scale: torch.Tensor | None = None
    lora_act: torch.Tensor | None = None
    lora_blocks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: torch.Tensor | None = None


def gemm_w4_wgmma(operands: WgmmaOperands) -> Float64Array:
    """Return y [M, N_pad] float64, unrounded; NaN and infinities follow IEEE 754."""
    act = decode_act(operands.act)
    weight = decode_weight_blocks(operands.weight_blocks, operands.mode, operands.weight)
    if operands.act_group_scale is not None:
        act = act * np.repeat(read_floats(operands.act_group_scale), 64, axis=1)
    with np.errstate(invalid="ignore", over="ignore"):
        total = act @ weight.T
        if operands.lora_act is not None and operands.lora_blocks is not None:
            lora_act = read_floats(operands.lora_act)
            total += lora_act @ decode_lora_blocks(operands.lora_blocks, operands.lora_act.dtype).T
        total *= read_floats(operands.channel_scale)
        if operands.token_scale is not None:
            total *= read_floats(operands.token_scale)[:, None]
        if operands.alpha is not None:
            total *= read_floats(operands.alpha)
        if operands.bias is not None:
            total += read_floats(operands.bias)
    return total


def decode_act(act: torch.Tensor) -> Float64Array:
    """Return activations [M, K_pad] float64 in the order of columns."""
    if act.dtype == torch.float16:
        values = read_floats(act)
    elif act.dtype == torch.int8:
        values = read_bytes(act).view(np.int8).astype(np.float64)
    elif act.dtype == torch.float8_e4m3fn:
        values = make_value_table("e4m3")[read_bytes(act)]
    else:
        raise FormatError(f"act: dtype {act.dtype}, wanted float8_e4m3fn, float16 or int8")
    column = np.arange(act.shape[1])
    within, t = column % 16, column % 64 // 16
    if act.element_size() == 1:
        jj, half, i = within // 8, within % 8 // 4, within % 4
        position = 32 * jj + 16 * half + 4 * t + i
    else:
        j, h, e = within // 4, within % 4 // 2, within % 2
        position = 16 * j + 8 * h + 2 * t + e
    return values[:, column // 64 * 64 + position]


def decode_weight_blocks(blocks: torch.Tensor, mode: str, weight: str) -> Float64Array:
    """Return the weights [N_pad, K_pad] float64 that the products see, scales included."""
    data = read_bytes(blocks)
    row, column = np.arange(_BLOCK)[:, None], np.arange(_BLOCK)[None, :]
    warpgroup, warp, upper, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
    half, t, within = column // 64, column % 64 // 16, column % 16
    thread = 32 * warp + 4 * g + t
    code_place = warpgroup * _WARPGROUP_BYTES + 2048 * half + 16 * thread + 8 * upper
    word = _read_words(data, code_place + 4 * (within // 8))
    c = within % 8
    scale_start = warpgroup * _WARPGROUP_BYTES + _SCALE_OFFSET
    if weight == "e2m1":
        scale_byte = data[..., scale_start + 4 * thread + 2 * half + upper].astype(np.int64)
        values = _look_up_e2m1(_read_sign_magnitude(word, c), scale_byte, mode)
    else:
        place = scale_start + 16 * (8 * warp + g) + 4 * (2 * half + upper) + 0 * column
        scale_word = _read_words(data, place)
        if mode == "fp8":
            values = _look_up_int4(_read_sign_magnitude(word, c), scale_word)
        else:
            nibble = word >> np.where(c < 4, 8 * c + 4, 8 * (c - 4)) & 0xF
            scale = scale_word.astype(np.uint32).view(np.float32).astype(np.float64)
            values = np.where(nibble >= 8, nibble - 16, nibble) * scale
    row_blocks, column_blocks = data.shape[:2]
    ordered = values.transpose(0, 2, 1, 3)
    return ordered.reshape(row_blocks * _BLOCK, column_blocks * _BLOCK)


def _read_words(data: ByteArray, place: npt.NDArray[np.int_]) -> _Words:
    """Return little-endian 32-bit words at byte offsets `place` of the last dimension."""
    parts = [data[..., place + i].astype(np.int64) << (8 * i) for i in range(4)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _read_sign_magnitude(word: _Words, c: npt.NDArray[np.int_]) -> tuple[_Words, Float64Array]:
    """Return (magnitude index, sign 1.0 or -1.0) of code c of each word."""
    index = word >> (4 * c) & 7
    sign = word >> np.where(c < 4, 8 * c + 7, 8 * (c - 4) + 3) & 1
    return index, np.where(sign == 1, -1.0, 1.0)


def _look_up_e2m1(code: tuple[_Words, Float64Array], scale_byte: _Words, mode: str) -> Float64Array:
    index, sign = code
    e4m3 = make_value_table("e4m3")
    b, rounding = scale_byte & 0x7F, scale_byte >> 7
    if mode != "fp8":
        exact: Float64Array = sign * np.array(_E2M1_MAGNITUDES)[index] * e4m3[b]
        return exact
    c = b + 4 + rounding
    table = np.stack([np.zeros_like(b), b - 8, b, b + 8, b + 16, c, c + 8, c + 16])
    values: Float64Array = sign * e4m3[np.take_along_axis(table, index[None], 0)[0]]
    return values


def _look_up_int4(code: tuple[_Words, Float64Array], scale_word: _Words) -> Float64Array:
    index, sign = code
    one, three, five, seven = (scale_word >> (8 * i) & 0xFF for i in range(4))
    # of magnitudes 0, 1, 2, 4, 3, 6, 5, 7: eight more in a code is twice the number
    table = np.stack([0 * one, one, one + 8, one + 16, three, three + 8, five, seven])
    found = np.take_along_axis(table, index[None], 0)[0]
    values: Float64Array = sign * make_value_table("e4m3")[found]
    return values


def decode_lora_blocks(blocks: torch.Tensor, dtype: torch.dtype) -> Float64Array:
    """Return lora_up' [N_pad, R_pad] float64 of fragments [N_pad/128, R_pad/32, 8192] uint8."""
    values = read_floats(blocks.contiguous().view(dtype))
    row, rank = np.arange(_BLOCK)[:, None], np.arange(32)[None, :]
    warpgroup, warp, upper, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
    step, rank_upper, t, e = rank // 16, rank % 16 // 8, rank % 8 // 2, rank % 2
    thread = 32 * warp + 4 * g + t
    place = ((2 * step + warpgroup) * 128 + thread) * 8 + 4 * rank_upper + 2 * upper + e
    ordered = values[..., place].transpose(0, 2, 1, 3)
    return ordered.reshape(values.shape[0] * _BLOCK, values.shape[1] * 32)


def fold_weight(weight: BlockScaledTensor, mode: str) -> tuple[Float64Array, Float64Array]:
    """Return (w [N, K], normalizer [N]) float64 of a record: w * normalizer is in its units.

    The global scale is in neither.
    """
    element = weight.format.element
    size = weight.format.block_size
    codes = decode_code_values(weight).reshape(weight.shape[0], -1, size)
    if weight.format.scale == "float":
        scales = read_floats(weight.scales)
    else:
        scales = make_value_table(weight.format.scale)[read_bytes(weight.scales)]
    if weight.columns % size:  # what lies beyond the last column is not part of the weight
        codes[:, -1, weight.columns % size :] = 0
    if element == "int4" and mode != "fp8":
        values = (codes * scales[..., None]).reshape(weight.shape[0], -1)
        return values[:, : weight.columns], np.ones(weight.shape[0])
    is_used = (codes != 0).any(2) & (scales > 0)
    largest = np.where(is_used, scales, 0).max(1, initial=0)
    limit, floor = _LIMITS[element]
    power = _choose_power(largest, limit)
    is_low = is_used & (scales * power[:, None] < floor)
    if mode != "fp8":
        has_low = is_low.any(1)
        kept = np.ones_like(power)
        floor = _EXACT_E8M0_LIMITS[1]
        if weight.format.scale == "e8m0":
            kept = _choose_power(largest, _EXACT_E8M0_LIMITS[0])
        power = np.where(has_low, kept, power)
        is_low = is_used & (scales * power[:, None] < floor)
    folded = scales * power[:, None]
    table = make_value_table(element)
    wanted = (codes * folded[..., None] / floor).astype(np.float32)
    codes = np.where(is_low[..., None], table[encode_nearest_even(wanted, element)], codes)
    folded = np.where(is_low, floor, folded)
    values = codes * folded[..., None]
    if mode == "fp8":
        values = np.copysign(_round_e4m3(np.abs(values)), values)
    return values.reshape(weight.shape[0], -1)[:, : weight.columns], 1.0 / power


def _choose_power(largest: Float64Array, limit: float) -> Float64Array:
    """Return the largest powers of two p with largest * p <= limit; 1 where largest is 0."""
    safe = np.where(largest > 0, largest, limit)
    power = 2.0 ** np.floor(np.log2(limit / safe))
    power = np.where(safe * power > limit, power / 2, power)  # where log2 rounded up
    power = np.where(safe * power * 2 <= limit, power * 2, power)
    return np.where(largest > 0, power, 1.0)


def _round_e4m3(magnitudes: Float64Array) -> Float64Array:
    """Return the nearest E4M3 numbers, ties to even; products of a few distinct numbers."""
    distinct, inverse = np.unique(magnitudes.astype(np.float32), return_inverse=True)
    table = make_value_table("e4m3")[:128]
    rounded = table[encode_nearest_magnitude(distinct.astype(np.float64), table)]
    return rounded[inverse.reshape(magnitudes.shape)]
