"""Sixteen values of a 4-bit activation format, as numbers: what float16 and int8 operands hold.

E2M1 has no code to make here: a number is rounded to one bit of mantissa by adding a constant whose
last place is the step wanted, and multiplied by the stored scale; the product has six significant
bits at most, and is exact in float16 where its exponent fits.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Uint16, Uint32

from halfbyte.device.float_arithmetic import (
    add_rn_f32,
    copy_sign,
    cvt_f32_f16x2,
    cvt_rn_f16x2_e4m3x2,
    cvt_rn_f16x2_f32,
    max_f32,
    min_f32,
    min_magnitude_f32,
    mov_b32_to_f32,
    mov_b32_to_u32,
    mul_rn_f32,
)
from halfbyte.device.packed_words import pack_low_bytes
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    Divisors,
    ScaledBlock,
    find_exactness,
    scale_values,
)

_E2M1_LARGEST = 6.0
_EXPONENT = 0x7F800000
_STEP_EXPONENT = 22 << 23  # from a binade to the number whose last place is half of it
_SMALLEST_E8M0 = 0x00400000  # 2^-127, a subnormal float32
_NAN = 0x7FFFFFFF
_NAN_FLOAT16 = 0x7E00
_INTEGER_RANGES = {"int4": (-8.0, 7.0), "uint4": (0.0, 15.0)}
_ROUND_TO_INTEGER = 1.5 * 2.0**23  # adding it leaves the integer, two's complement, in the low bits


@dataclass(frozen=True)
class BlockValues:
    """Sixteen elements of a row as operands hold them.

    Attributes:
        words: eight of two float16, or four of four int8, in order.
        scale: bits of the float16 scale of integers.
        is_exact: these are the reference's values.
    """

    words: list[Any]
    scale: Uint32
    is_exact: Boolean


def make_block_values(
    values: list[Any], signs: list[Any], divisors: Divisors, config: Any
) -> BlockValues:
    """Return the values of sixteen z of one row; arguments as for `scale_values`."""
    block = scale_values(values, signs, divisors, config)
    element = config.activation.block_format.element
    scale = Uint32(block.scale.bits)
    if element == "e2m1":
        words = _make_float16_words(block, config)
    else:
        words = _make_int8_words(block, element)
        scale = Uint32(cutlass.select_(block.is_spoilt, Uint32(_NAN_FLOAT16), scale))
    return BlockValues(words, scale, find_exactness(block))


def _make_float16_words(block: ScaledBlock, config: Any) -> list[Any]:
    """Return element times stored scale; of a zero block 0, of a spoilt one NaN."""
    stored = _decode_scale(block.scale.bits, config.activation.block_format.scale)
    stored = cutlass.select_(block.scale.is_zero, Float32(0.0), stored)
    stored = cutlass.select_(block.is_spoilt, mov_b32_to_f32(Uint32(_NAN)), stored)
    products = [mul_rn_f32(round_e2m1(value), stored) for value in block.values]
    return [cvt_rn_f16x2_f32(*products[first : first + 2]) for first in range(0, 16, 2)]


def round_e2m1(value: Float32) -> Float32:
    """Return the E2M1 number nearest to a value, ties to even, at most 6; its sign is kept.

    A NaN becomes 6: the scale of its block is NaN.
    """
    magnitude = min_magnitude_f32(value, Float32(_E2M1_LARGEST))
    binade = mov_b32_to_u32(max_f32(magnitude, Float32(1.0))) & Uint32(_EXPONENT)
    step = mov_b32_to_f32(binade + Uint32(_STEP_EXPONENT))
    rounded = add_rn_f32(add_rn_f32(magnitude, step), -step)
    return copy_sign(rounded, value)


def _decode_scale(bits: Uint32, scale: str) -> Float32:
    if scale == "e4m3":
        stored, _ = cvt_f32_f16x2(cvt_rn_f16x2_e4m3x2(Uint16(bits)))
        return stored
    power = cutlass.select_(bits == Uint32(0), Uint32(_SMALLEST_E8M0), bits << 23)
    return mov_b32_to_f32(Uint32(power))


def _make_int8_words(block: ScaledBlock, element: str) -> list[Any]:
    low, high = (Float32(end) for end in _INTEGER_RANGES[element])
    is_empty = block.scale.is_zero | block.is_spoilt
    integers = []
    for value in block.values:
        rounded = add_rn_f32(max_f32(min_f32(value, high), low), Float32(_ROUND_TO_INTEGER))
        integers.append(mov_b32_to_u32(rounded))
    words = [pack_low_bytes(integers[first : first + 4]) for first in range(0, 16, 4)]
    return [Uint32(cutlass.select_(is_empty, Uint32(0), word)) for word in words]
