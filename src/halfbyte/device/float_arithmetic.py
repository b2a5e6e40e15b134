"""IEEE float arithmetic and conversions, one function per PTX instruction and named after it.

None flushes subnormals, none contracts into a fused multiply-add, none approximates, except where
its name says so. The E2M1
conversion exists from sm_100a on; `encode_e2m1x8` has integer code with the same results for
sm_90a.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint16, Uint32

from halfbyte.device.inline_ptx import emit_memory_ptx, emit_ptx

# PTX ISA, cvt: .e2m1x2 is supported on sm_100a, sm_101a, sm_103a and sm_120a families.
E2M1_TARGETS = ("sm_100a", "sm_103a", "sm_120a")


def add_rn_f32(a: Float32, b: Float32) -> Float32:
    """Return a + b rounded to nearest even."""
    return emit_ptx("add.rn.f32 $0, $1, $2;", (Float32,), (a, b))


def mul_rn_f32(a: Float32, b: Float32) -> Float32:
    """Return a * b rounded to nearest even."""
    return emit_ptx("mul.rn.f32 $0, $1, $2;", (Float32,), (a, b))


def div_rn_f32(a: Float32, b: Float32) -> Float32:
    """Return a / b rounded to nearest even."""
    return emit_ptx("div.rn.f32 $0, $1, $2;", (Float32,), (a, b))


def fma_rn_f32(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return a * b + c, rounded once to nearest even."""
    return emit_ptx("fma.rn.f32 $0, $1, $2, $3;", (Float32,), (a, b, c))


def rcp_approx_ftz_f32(a: Float32) -> Float32:
    """Return 1 / a within one unit in the last place; a subnormal a counts as zero."""
    return emit_ptx("rcp.approx.ftz.f32 $0, $1;", (Float32,), (a,))


@dataclass(frozen=True)
class Divisor:
    """What several numbers are divided by.

    Attributes:
        value: the divisor.
        reciprocal: of it, from `make_divisor`; None to divide by `div.rn.f32` for any operands.
    """

    value: Float32
    reciprocal: Float32 | None = None


def make_divisor(value: Float32) -> Divisor:
    """Return a divisor with its reciprocal, for operands in the range that `divide` names."""
    rough = rcp_approx_ftz_f32(value)
    error = fma_rn_f32(-value, rough, Float32(1.0))
    return Divisor(value, fma_rn_f32(error, rough, rough))


def divide(a: Float32, divisor: Divisor) -> Float32:
    """Return a / divisor rounded to nearest even.

    With a reciprocal it takes three instructions: the sequence, step by step, that ptxas makes of
    div.rn.f32 (sm_90 to sm_120), where a check of both exponents guards it. Here the caller
    guards. It is exact where the divisor is positive and it and the quotient lie between 2^-60 and
    2^60. A smaller quotient may be off by units in its last place, and -0.0 becomes 0.0.
    """
    if divisor.reciprocal is None:
        return div_rn_f32(a, divisor.value)
    quotient = mul_rn_f32(a, divisor.reciprocal)
    remainder = fma_rn_f32(-divisor.value, quotient, a)
    return fma_rn_f32(remainder, divisor.reciprocal, quotient)


def copy_sign(magnitude: Float32, sign: Float32) -> Float32:
    """Return |magnitude| with the sign of `sign`, that of a zero too."""
    return emit_ptx("copysign.f32 $0, $1, $2;", (Float32,), (sign, magnitude))


def mov_b32_to_u32(a: Float32) -> Uint32:
    """Return the bits of a."""
    return emit_ptx("mov.b32 $0, $1;", (Uint32,), (a,))


def mov_b32_to_f32(bits: Uint32) -> Float32:
    """Return the float32 with these bits."""
    return emit_ptx("mov.b32 $0, $1;", (Float32,), (bits,))


def max_magnitude_f32(a: Float32, b: Float32) -> Float32:
    """Return the larger one of a and |b|; NaN where one of them is."""
    text = "{ .reg .f32 magnitude; abs.f32 magnitude, $2; max.NaN.f32 $0, $1, magnitude; }"
    return emit_ptx(text, (Float32,), (a, b))


def max_f32(a: Float32, b: Float32) -> Float32:
    """Return the larger one; of a NaN and a number the number."""
    return emit_ptx("max.f32 $0, $1, $2;", (Float32,), (a, b))


def min_f32(a: Float32, b: Float32) -> Float32:
    """Return the smaller one; of a NaN and a number the number."""
    return emit_ptx("min.f32 $0, $1, $2;", (Float32,), (a, b))


def min_magnitude_f32(a: Float32, b: Float32) -> Float32:
    """Return the smaller one of |a| and b; b for a NaN."""
    text = "{ .reg .f32 magnitude; abs.f32 magnitude, $1; min.f32 $0, magnitude, $2; }"
    return emit_ptx(text, (Float32,), (a, b))


def max_u32(a: Uint32, b: Uint32) -> Uint32:
    """Return the larger one, unsigned."""
    return emit_ptx("max.u32 $0, $1, $2;", (Uint32,), (a, b))


def redux_max_u32(a: Uint32) -> Uint32:
    """Return the largest a of a warp, unsigned; all lanes call it."""
    return emit_memory_ptx("redux.sync.max.u32 $0, $1, 0xffffffff;", (Uint32,), (a,))


def min_u32(a: Uint32, b: Uint32) -> Uint32:
    """Return the smaller one, unsigned."""
    return emit_ptx("min.u32 $0, $1, $2;", (Uint32,), (a, b))


def max_s32(a: Int32, b: Int32) -> Int32:
    """Return the larger one, signed."""
    return emit_ptx("max.s32 $0, $1, $2;", (Int32,), (a, b))


def min_s32(a: Int32, b: Int32) -> Int32:
    """Return the smaller one, signed."""
    return emit_ptx("min.s32 $0, $1, $2;", (Int32,), (a, b))


def cvt_f32_f16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """Return (low, high) half of two float16 as float32, exactly."""
    text = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
    )
    low, high = emit_ptx(text, (Float32, Float32), (pair,))
    return low, high


def cvt_f32_bf16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """Return (low, high) half of two bfloat16 as float32, exactly: they are its upper 16 bits."""
    text = "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000; }"
    low, high = emit_ptx(text, (Uint32, Uint32), (pair,))
    return mov_b32_to_f32(low), mov_b32_to_f32(high)


def cvt_rn_f16x2_f32(low: Float32, high: Float32) -> Uint32:
    """Return two float16 rounded to nearest even; overflow becomes infinity."""
    return emit_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", (Uint32,), (high, low))


def cvt_rn_bf16x2_f32(low: Float32, high: Float32) -> Uint32:
    """Return two bfloat16 rounded to nearest even; overflow becomes infinity."""
    return emit_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", (Uint32,), (high, low))


def cvt_rn_f16_f32(a: Float32) -> Uint16:
    """Return the bits of a rounded to float16."""
    return emit_ptx("cvt.rn.f16.f32 $0, $1;", (Uint16,), (a,))


def cvt_f32_f16(bits: Uint16) -> Float32:
    """Return the float16 with these bits as float32, exactly."""
    return emit_ptx("cvt.f32.f16 $0, $1;", (Float32,), (bits,))


def cvt_rni_s32_f32(a: Float32) -> Int32:
    """Return a rounded to the nearest integer, ties to even; saturates, NaN is 0."""
    return emit_ptx("cvt.rni.s32.f32 $0, $1;", (Int32,), (a,))


def cvt_rn_satfinite_e4m3x2_f32(low: Float32, high: Float32) -> Uint16:
    """Return two E4M3 bytes, low first: nearest even, at most 448 in magnitude."""
    return emit_ptx("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", (Uint16,), (high, low))


def cvt_rn_f16x2_e4m3x2(pair: Uint16) -> Uint32:
    """Return two float16 (low first) with the values of two E4M3 bytes, exactly."""
    return emit_ptx("cvt.rn.f16x2.e4m3x2 $0, $1;", (Uint32,), (pair,))


def cvt_rn_satfinite_e2m1x8_f32(values: list[Any]) -> Uint32:
    """Return eight E2M1 codes, values[0] in the lowest four bits; nearest even, at most 6."""
    text = (
        "{ .reg .b8 b0, b1, b2, b3; "
        "cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3; "
        "cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5; cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7; "
        "mov.b32 $0, {b0, b1, b2, b3}; }"
    )
    return emit_ptx(text, (Uint32,), tuple(values))


def encode_e2m1(value: Float32) -> Uint32:
    """Return the E2M1 code of a finite value in integer code: nearest even, at most 6.

    Above 1 a code is exponent and one mantissa bit of the float32, rounded half to even at bit 22.
    Below 1 the steps are 0.5: adding 2^22, whose last place is 0.5, rounds and leaves the code in
    the low bits. The sign bit is kept, that of a zero too.
    """
    text = (
        "{ .reg .b32 sign, magnitude, odd, small, large; .reg .pred is_small; "
        "and.b32 sign, $1, 0x80000000; and.b32 magnitude, $1, 0x7FFFFFFF; "
        "min.u32 magnitude, magnitude, 0x40C00000; "  # 6.0
        "add.rn.f32 small, magnitude, 0f4A800000; and.b32 small, small, 7; "  # + 2^22
        "bfe.u32 odd, magnitude, 22, 1; add.u32 large, magnitude, odd; "
        "add.u32 large, large, 0x1FFFFF; shr.u32 large, large, 22; sub.u32 large, large, 252; "
        "setp.lt.u32 is_small, magnitude, 0x3F800000; "  # 1.0
        "selp.b32 large, small, large, is_small; shr.u32 sign, sign, 28; "
        "or.b32 $0, large, sign; }"
    )
    return emit_ptx(text, (Uint32,), (mov_b32_to_u32(value),))


def encode_e2m1x8(values: list[Any], target: str) -> Uint32:
    """Return eight E2M1 codes, values[0] in the lowest four bits; nearest even, at most 6.

    Args:
        values: eight finite float32.
        target: the PTX target; where it has no such conversion, integer code gives the same codes.
    """
    if target in E2M1_TARGETS:
        return cvt_rn_satfinite_e2m1x8_f32(values)
    return pack_nibbles([encode_e2m1(value) for value in values])


def pack_nibbles(codes: list[Any]) -> Uint32:
    """Return eight codes below 16 in one word, codes[0] in the lowest four bits."""
    word = codes[0]
    for index, code in enumerate(codes[1:], start=1):
        word = word | (code << Uint32(4 * index))
    return word
