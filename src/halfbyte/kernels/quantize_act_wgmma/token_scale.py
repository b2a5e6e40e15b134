"""One scale for a row: chosen from its largest |x'|, and values divided by it.

    fp8   scale = the smallest power of two with amax / scale <= 448; act = E4M3(x' / scale)
    int8  scale = amax / 127;                                         act = rint(x' / scale)

Both are at least 2^-126, 1 for a row of zeros, and NaN for a row that is not finite.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32

from halfbyte.device.float_arithmetic import (
    Divisor,
    add_rn_f32,
    cvt_rn_satfinite_e4m3x2_f32,
    div_rn_f32,
    divide,
    make_divisor,
    max_s32,
    max_u32,
    mov_b32_to_f32,
    mov_b32_to_u32,
    mul_rn_f32,
)
from halfbyte.device.packed_words import pack_low_bytes

_INFINITY = 0x7F800000
_NAN = 0x7FFFFFFF
_ONE = 0x3F800000
_SMALLEST_NORMAL = 0x00800000  # 2^-126
_MANTISSA_ABOVE_448 = 0x1FFFFF  # carries into the exponent where the mantissa is above 1.75
_E4M3_EXPONENT = 8  # 448 = 1.75 * 2^8
_INT8_LARGEST = 127.0
_ROUND_TO_INTEGER = 1.5 * 2.0**23  # adding it leaves the integer, two's complement, in the low bits


@dataclass(frozen=True)
class TokenScale:
    """The scale of a row and what its values are scaled with.

    Attributes:
        scale: what is stored.
        factor: a power of two: fp8: 1 / scale, exactly; int8: 2^-e for a scale of m * 2^e.
        divisor: int8: m, in [1, 2), None in fp8.
    """

    scale: Float32
    factor: Float32
    divisor: Divisor | None


def choose_token_scale(largest: Uint32, mode: str) -> TokenScale:
    """Return the scale of a row from the bits of its largest |x'|."""
    if mode == "fp8":
        exponent = Int32((largest + Uint32(_MANTISSA_ABOVE_448)) >> 23) - _E4M3_EXPONENT
        bits = Uint32(max_s32(exponent, Int32(1))) << 23
    else:
        quotient = div_rn_f32(mov_b32_to_f32(largest), Float32(_INT8_LARGEST))
        bits = max_u32(mov_b32_to_u32(quotient), Uint32(_SMALLEST_NORMAL))
    bits = cutlass.select_(largest == Uint32(0), Uint32(_ONE), bits)
    power = bits & Uint32(_INFINITY)
    factor = Uint32(254 << 23) - power
    is_spoilt = largest >= Uint32(_INFINITY)
    bits = cutlass.select_(is_spoilt, Uint32(_NAN), bits)
    factor = cutlass.select_(is_spoilt, Uint32(_NAN), factor)
    divisor = None
    if mode == "int8":
        mantissa = (bits & Uint32(_SMALLEST_NORMAL - 1)) | Uint32(_ONE)
        divisor = make_divisor(mov_b32_to_f32(mantissa))
    return TokenScale(mov_b32_to_f32(bits), mov_b32_to_f32(factor), divisor)


def encode_words(values: list[Any], scale: TokenScale) -> list[Any]:
    """Return sixteen values of a row as four words of E4M3 or INT8, in order."""
    scaled = [mul_rn_f32(value, scale.factor) for value in values]
    if scale.divisor is None:
        return [_encode_e4m3(scaled[first : first + 4]) for first in range(0, len(scaled), 4)]
    quotients = [divide(value, scale.divisor) for value in scaled]
    return [_encode_int8(quotients[first : first + 4]) for first in range(0, len(scaled), 4)]


def _encode_e4m3(values: list[Any]) -> Uint32:
    low = cvt_rn_satfinite_e4m3x2_f32(values[0], values[1])
    high = cvt_rn_satfinite_e4m3x2_f32(values[2], values[3])
    return Uint32(low) | (Uint32(high) << 16)


def _encode_int8(values: list[Any]) -> Uint32:
    words = [mov_b32_to_u32(add_rn_f32(value, Float32(_ROUND_TO_INTEGER))) for value in values]
    return pack_low_bytes(words)
