"""One thread's part of quantization: sixteen elements of a row to codes and a block scale.

The formulas are those of `halfbyte.reference.quantize_act_lora`, one rounding per written
operation. A block of 32 or 64 elements is two or four neighbouring threads' work; they exchange
their maxima.

Every element is divided twice. `Divisor`s with reciprocals make that cheap, and exact for all
numbers that are not absurd; `Quantized.is_exact` tells, and the caller repeats what is not with
plain divisors. Why the limits below suffice: with smooth in [2^-16, 2^16] a quotient x / smooth is
zero only if x is, as no x is below 2^-133; where a block's largest |z| is in [2^-30, 2^60] it is
exact, as are all elements that are not 2^20 times smaller, and those have code 0 (with their sign)
whatever their last bits are.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16, Uint32

from halfbyte.device.float_arithmetic import (
    Divisor,
    add_rn_f32,
    copy_sign,
    cvt_f32_bf16x2,
    cvt_f32_f16,
    cvt_f32_f16x2,
    cvt_rn_f16_f32,
    cvt_rn_f16x2_e4m3x2,
    cvt_rn_satfinite_e4m3x2_f32,
    cvt_rni_s32_f32,
    div_rn_f32,
    divide,
    encode_e2m1x8,
    make_divisor,
    max_s32,
    max_u32,
    min_s32,
    min_u32,
    mov_b32_to_f32,
    mov_b32_to_u32,
    mul_rn_f32,
    pack_nibbles,
)
from halfbyte.kernels.quantize_act_lora.config import WIDTH, QuantizeConfig

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000  # float32 bits; larger magnitudes are NaN
_LARGEST = {"e2m1": 6.0, "int4": 7.0, "uint4": 15.0}
_CODE_RANGES = {"int4": (-8, 7), "uint4": (0, 15)}
_E2M1_MAX_EXPONENT = 2  # 4.0 = 2^2 is E2M1's largest power of two
_NAN_SCALES = {"e4m3": 0x7F, "e8m0": 0xFF, "float": 0x7E00}
_FLOAT16_MAX = 65504.0
_ONE_FLOAT16 = 0x3C00
_TWO_LEVEL_MAX = 6.0 * 448.0  # largest E2M1 value times largest E4M3 scale
_SMALLEST_NORMAL = 0x00800000  # float32 bits of 2^-126
# Exponents of (smallest, largest) for which three-instruction quotients are right; see above.
_SMOOTH_RANGE = (-16, 16)
_AMAX_RANGE = (-30, 60)
_DIVISOR_RANGE = (-60, 60)


@dataclass(frozen=True)
class Divisors:
    """What the elements of one thread are divided by.

    Attributes:
        smooth: sixteen, or None.
        global_scale: g, or None for a mode without one.
        are_tame: all of them are in the range of their reciprocals; None where there are none.
    """

    smooth: list[Divisor] | None
    global_scale: Divisor | None
    are_tame: Boolean | None


@dataclass(frozen=True)
class Quantized:
    """Sixteen codes and the scale of their block.

    Attributes:
        low, high: codes 0 to 7 and 8 to 15.
        scale: bits of the scale: E4M3, E8M0 or float16.
        is_exact: these are the reference's bits; without reciprocals they always are.
    """

    low: Uint32
    high: Uint32
    scale: Uint32
    is_exact: Boolean


@dataclass(frozen=True)
class BlockScale:
    """The scale of a block.

    Attributes:
        bits: what is stored: E4M3, E8M0 or float16.
        factor: what values are divided by, or multiplied with where `is_reciprocal`.
        is_reciprocal: an exact reciprocal: only powers of two have one.
        is_zero: all codes are 0: a zero block, or one whose scale rounds to zero.
    """

    bits: Uint32
    factor: Float32
    is_reciprocal: bool
    is_zero: Boolean


def make_divisors(
    smooth: list[Any] | None, global_scale: Float32 | None, *, is_fast: bool
) -> Divisors:
    """Return what is divided by, with reciprocals where `is_fast`."""
    make = make_divisor if is_fast else Divisor
    are_tame = Boolean(True)
    if smooth is not None:
        bits = [mov_b32_to_u32(value) for value in smooth]
        smallest, largest = bits[0], bits[0]
        for one in bits[1:]:  # a negative number is larger than every positive one
            smallest, largest = min_u32(smallest, one), max_u32(largest, one)
        are_tame = _is_between(smallest, largest, _SMOOTH_RANGE)
    if global_scale is not None:
        bits_of_scale = mov_b32_to_u32(global_scale)
        are_tame = are_tame & _is_between(bits_of_scale, bits_of_scale, _DIVISOR_RANGE)
    return Divisors(
        smooth=None if smooth is None else [make(value) for value in smooth],
        global_scale=None if global_scale is None else make(global_scale),
        are_tame=are_tame if is_fast else None,
    )


def _is_between(smallest: Uint32, largest: Uint32, exponents: tuple[int, int]) -> Boolean:
    low, high = (_make_power_of_two(exponent) for exponent in exponents)
    return (smallest >= low) & (largest <= high)


def _make_power_of_two(exponent: int) -> Uint32:
    """Return the float32 bits of 2^exponent."""
    return Uint32((exponent + 127) << 23)


def unpack_values(words: list[Any], dtype: str) -> list[Any]:
    """Return the float32 values of words of two float16 or bfloat16, in order."""
    convert = cvt_f32_f16x2 if dtype == "float16" else cvt_f32_bf16x2
    return [value for word in words for value in convert(word)]


def shift_and_smooth(values: list[Any], smooth: list[Divisor] | None, shift: float) -> list[Any]:
    """Return (x + shift) / smooth; a shift of 0 is not added, so that -0.0 keeps its sign."""
    if shift != 0.0:
        values = [add_rn_f32(value, Float32(shift)) for value in values]
    if smooth is not None:
        values = [divide(value, divisor) for value, divisor in zip(values, smooth, strict=True)]
    return values


def find_largest_magnitude(values: list[Any]) -> Uint32:
    """Return the float32 bits of the largest |value|, NaN above infinity above numbers."""
    largest = mov_b32_to_u32(values[0]) & Uint32(_MAGNITUDE)
    for value in values[1:]:
        largest = max_u32(largest, mov_b32_to_u32(value) & Uint32(_MAGNITUDE))
    return largest


def find_largest_finite_magnitude(values: list[Any]) -> Uint32:
    """Return the float32 bits of the largest finite |value|; 0 where there is none."""
    largest = Uint32(0)
    for value in values:
        bits = mov_b32_to_u32(value) & Uint32(_MAGNITUDE)
        largest = max_u32(largest, cutlass.select_(bits < Uint32(_INFINITY), bits, Uint32(0)))
    return largest


def choose_dynamic_global_scale(largest: Uint32) -> Float32:
    """Return g from the bits of the tensor's largest |z|: amax / 2688, at least 2^-126; 1 for 0."""
    quotient = div_rn_f32(mov_b32_to_f32(largest), Float32(_TWO_LEVEL_MAX))
    floored = max_u32(mov_b32_to_u32(quotient), Uint32(_SMALLEST_NORMAL))
    return mov_b32_to_f32(cutlass.select_(largest == Uint32(0), Uint32(0x3F800000), floored))


@dataclass(frozen=True)
class ScaledBlock:
    """Sixteen values of one row divided by the scale of their block.

    Attributes:
        values: sixteen float32, not rounded to elements yet.
        scale: of the block.
        magnitude: bits of the block's largest |z|, NaN above infinity above numbers.
        largest: bits of the amax that made the scale.
        are_tame: of the divisors, None without reciprocals.
    """

    values: list[Any]
    scale: BlockScale
    magnitude: Uint32
    largest: Uint32
    are_tame: Boolean | None

    @property
    def is_spoilt(self) -> Boolean:
        """Whether the block holds a NaN or an infinity."""
        return self.magnitude >= Uint32(_INFINITY)


def scale_values(
    values: list[Any], signs: list[Any], divisors: Divisors, config: Any
) -> ScaledBlock:
    """Return sixteen values of one row divided by their block's scale.

    The lanes of a block are neighbours, and all lanes of the warp take part.

    Args:
        values: sixteen float32 z.
        signs: numbers with the signs of z: dividing by reciprocals turns -0.0 into 0.0.
        divisors: with or without reciprocals.
        config: names the mode: its `activation` and `block_size`.
    """
    is_fast = divisors.are_tame is not None
    element = config.activation.block_format.element
    magnitude = _share(find_largest_magnitude(values), max_u32, config.block_size)
    largest = magnitude
    if element == "uint4":  # negative numbers are code 0 and have no say in the scale
        positive = Int32(0)
        for value in values:
            positive = max_s32(positive, Int32(mov_b32_to_u32(value)))
        largest = Uint32(_share(positive, max_s32, config.block_size))
    scale = _choose_scale(largest, divisors, config)
    if scale.is_reciprocal:
        scaled = [mul_rn_f32(value, scale.factor) for value in values]
    else:
        divisor = make_divisor(scale.factor) if is_fast else Divisor(scale.factor)
        scaled = [divide(value, divisor) for value in values]
    if is_fast and element == "e2m1":  # code 8 is -0; integers have no such code
        scaled = [copy_sign(value, sign) for value, sign in zip(scaled, signs, strict=True)]
    return ScaledBlock(scaled, scale, magnitude, largest, divisors.are_tame)


def find_exactness(block: ScaledBlock) -> Boolean:
    """Return whether values are the reference's bits; without reciprocals they always are."""
    if block.are_tame is None:
        return Boolean(True)
    # a block that holds a NaN or an infinity is not exact here
    low_end, high_end = (_make_power_of_two(exponent) for exponent in _AMAX_RANGE)
    is_exact = block.are_tame & ((block.largest == Uint32(0)) | (block.largest >= low_end))
    is_exact = is_exact & (block.magnitude <= high_end)
    scale = block.scale
    if not scale.is_reciprocal:
        factor = mov_b32_to_u32(scale.factor)
        is_exact = is_exact & (scale.is_zero | _is_between(factor, factor, _DIVISOR_RANGE))
    return is_exact


def quantize_values(
    values: list[Any], signs: list[Any], divisors: Divisors, config: QuantizeConfig
) -> Quantized:
    """Return the codes and the block scale of sixteen values of one row; see `scale_values`."""
    block = scale_values(values, signs, divisors, config)
    block_format = config.activation.block_format
    halves = block.values[:8], block.values[8:]
    if block_format.element == "e2m1":
        low, high = (encode_e2m1x8(half, config.target) for half in halves)
    else:
        low, high = (_encode_integers(half, block_format.element) for half in halves)
    bits = block.scale.bits
    is_empty = block.scale.is_zero
    if block.are_tame is None:
        is_empty = is_empty | block.is_spoilt
        bits = cutlass.select_(block.is_spoilt, Uint32(_NAN_SCALES[block_format.scale]), bits)
    return Quantized(
        low=Uint32(cutlass.select_(is_empty, Uint32(0), low)),
        high=Uint32(cutlass.select_(is_empty, Uint32(0), high)),
        scale=Uint32(bits),
        is_exact=find_exactness(block),
    )


def _share(value: Any, larger: Any, block_size: int) -> Any:
    """Return the largest value among the lanes of a block."""
    for offset in (1, 2):
        if offset * WIDTH < block_size:
            value = larger(value, type(value)(cute.arch.shuffle_sync_bfly(value, offset)))
    return value


def _choose_scale(largest: Uint32, divisors: Divisors, config: Any) -> BlockScale:
    is_zero = largest == Uint32(0)
    block_format = config.activation.block_format
    if block_format.scale == "e8m0":
        return _choose_power_of_two(largest, is_zero)
    limit = Float32(_LARGEST[block_format.element])
    reciprocal = Float32(1.0 / _LARGEST[block_format.element])
    amax = mov_b32_to_f32(largest)
    unrounded = divide(amax, Divisor(limit, None if divisors.are_tame is None else reciprocal))
    if block_format.scale == "float":
        return _choose_float16(unrounded, is_zero)
    scale = divisors.global_scale
    wanted = unrounded if scale is None else divide(unrounded, scale)
    byte = cvt_rn_satfinite_e4m3x2_f32(wanted, Float32(0.0))
    stored, _ = cvt_f32_f16x2(cvt_rn_f16x2_e4m3x2(byte))
    product = stored if scale is None else mul_rn_f32(stored, scale.value)
    divisor = unrounded if config.activation.payload_divisor == "unrounded" else product
    return BlockScale(Uint32(byte), divisor, False, is_zero | (product == Float32(0.0)))


def _choose_power_of_two(largest: Uint32, is_zero: Boolean) -> BlockScale:
    """Return 2^(floor(log2 amax) - 2), at least 2^-127: a subnormal amax has exponent field 0."""
    exponent = Int32(largest >> Uint32(23)) - Int32(_E2M1_MAX_EXPONENT)
    byte = Uint32(max_s32(exponent, Int32(0)))
    reciprocal = mov_b32_to_f32((Uint32(254) - byte) << Uint32(23))
    return BlockScale(byte, reciprocal, True, is_zero)


def _choose_float16(unrounded: Float32, is_zero: Boolean) -> BlockScale:
    largest = mov_b32_to_u32(Float32(_FLOAT16_MAX))
    clamped = min_s32(Int32(mov_b32_to_u32(unrounded)), Int32(largest))  # both are positive
    bits = cvt_rn_f16_f32(mov_b32_to_f32(Uint32(clamped)))
    bits = cutlass.select_(bits == Uint16(0), Uint16(_ONE_FLOAT16), bits)
    return BlockScale(Uint32(bits), cvt_f32_f16(bits), False, is_zero)


def _encode_integers(values: list[Any], element: str) -> Uint32:
    low, high = _CODE_RANGES[element]
    codes = []
    for value in values:
        rounded = max_s32(min_s32(cvt_rni_s32_f32(value), Int32(high)), Int32(low))
        codes.append(Uint32(rounded) & Uint32(0xF))
    return pack_nibbles(codes)
