"""Activations of the Hopper GEMM, defined step by step.

Modes "fp8" and "int8" have one scale for a row of x [M, K]; all in float32, one IEEE rounding per
written operation:

    x'    = (x + shift) * inverse_smooth     without what is absent
    amax  = max |x'| of the row
    scale = the smallest power of two with amax / scale <= 448     fp8
            amax / 127                                             int8
    act   = x' / scale, rounded to nearest even:  to E4M3 (fp8), to integers (int8)

The scale is at least 2^-126, 1 for a row of zeros, NaN for a row that holds a NaN or an infinity:
then nothing is said about its act.

Any other mode is an activation format, quantized as in `halfbyte.reference.quantize_act_lora`, and
act holds the values: element times stored block scale in float16 (without the global scale), or the
integers of INT4 and UINT4 beside the float16 scales of their groups.

    lora_act = x @ lora_down^T * factor / (scale of the row, or the dynamic global scale)

Source of E4M3: OCP OFP8, as in `halfbyte.reference.decode`.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from halfbyte.formats.input_rule import InputRule
from halfbyte.reference.decode import Float64Array, make_value_table
from halfbyte.reference.quantize_act_lora import (
    Float32Array,
    encode_nearest_magnitude,
    quantize_input,
)

TOKEN_MODES: Final = ("fp8", "int8")
_E4M3_MAX: Final = 448.0
_INT8_MAX: Final = np.float32(127)
_SMALLEST_NORMAL: Final = 2.0**-126


@dataclass(frozen=True)
class ReferenceTokens:
    """Activations [M, K] as the GEMM multiplies them, columns in their logical order.

    Attributes:
        act: [M, K] float64: E4M3 numbers, integers, or exact values of a format.
        token_scale: [M] float32, None in exact modes.
        group_scale: [M, groups] float64, the float16 scales of integers; None without.
        global_scale: the float32 multiplier as a float; 1.0 where there is none.
    """

    act: Float64Array
    token_scale: Float32Array | None
    group_scale: Float64Array | None
    global_scale: float


def quantize_tokens(
    x: Float64Array, mode: str, inverse_smooth: Float32Array | None, shift: float = 0.0
) -> ReferenceTokens:
    """Return x [M, K], exact values of its dtype, with one scale a row; mode "fp8" or "int8"."""
    scaled = x.astype(np.float32)
    with np.errstate(all="ignore"):
        if shift != 0.0:
            scaled = (scaled + np.float32(shift)).astype(np.float32)
        if inverse_smooth is not None:
            scaled = (scaled * inverse_smooth).astype(np.float32)
        amax = np.abs(scaled).max(axis=1, initial=0)
        scale = _choose_token_scale(amax, mode)
        quotient = (scaled / scale[:, None]).astype(np.float32)
    if mode == "int8":
        act = np.rint(quotient).astype(np.float64)
    else:
        act = _round_to_e4m3(quotient)
    return ReferenceTokens(act, scale, None, 1.0)


def quantize_exactly(x: Float64Array, rule: InputRule) -> ReferenceTokens:
    """Return x [M, K], exact values of its dtype, in the values of a 4-bit activation format."""
    quantized = quantize_input(x, rule)
    block_format = quantized.block_format
    act = make_value_table(block_format.element)[quantized.codes]
    group_scale = None
    if block_format.element == "e2m1":
        act = act * np.repeat(quantized.scales, block_format.block_size, axis=1)
    else:
        group_scale = quantized.scales
    return ReferenceTokens(act[:, : x.shape[1]], None, group_scale, quantized.global_scale)


def _choose_token_scale(amax: Float32Array, mode: str) -> Float32Array:
    """Return one float32 scale for each row's largest |x'|."""
    if mode == "int8":
        scale = np.maximum((amax / _INT8_MAX).astype(np.float32), np.float32(_SMALLEST_NORMAL))
    else:
        wanted = np.where(np.isfinite(amax), amax.astype(np.float64), 1.0) / _E4M3_MAX
        wanted = np.maximum(wanted, _SMALLEST_NORMAL)
        mantissa, exponent = np.frexp(wanted)  # wanted = mantissa * 2^exponent, in [0.5, 1)
        power = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale = np.ldexp(1.0, power).astype(np.float32)
    scale = np.where(amax == 0, np.float32(1), scale)
    spoilt: Float32Array = np.where(np.isfinite(amax), scale, np.float32(np.nan)).astype(np.float32)
    return spoilt


def _round_to_e4m3(values: Float32Array) -> Float64Array:
    """Return the nearest E4M3 number to each value, ties to even, at most 448 in magnitude."""
    table = make_value_table("e4m3")[:127]
    exact = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    rounded = np.empty_like(exact)
    for row, numbers in enumerate(exact):  # a row at a time: the search is [row, 127]
        rounded[row] = table[encode_nearest_magnitude(np.abs(numbers), table)]
    signed: Float64Array = np.copysign(rounded, exact)
    return signed
