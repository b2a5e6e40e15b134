"""cvt between integers and floating-point numbers in every rounding mode, exactly."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from . import exact_rounding as exact
from .exact_rounding import BF16, F16, F32, F64, TF32, Format
from .lane_cases import Case, check_cases, map_values, pad_to_warps
from .test_integer import UNSIGNED, clamp, signed

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
DIRECTED = ("rn", "rz", "rm", "rp")
# The storage of each type's register; 8-bit values live in 16-bit registers.
STORAGE = {
    **{f"{s}{b}": UNSIGNED[max(b, 16)] for s in "us" for b in (8, 16, 32, 64)},
    **{"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64},
}


def float_edges(kind: str, randoms: int, seed: int = 0) -> np.ndarray:
    """Return codes of a float type: specials, integers and halves around the ends of integers."""
    form = FLOATS[kind]
    rng = np.random.default_rng(seed)
    codes = {0, 1, form.infinity - 1, form.infinity, form.infinity + 1, 1 << form.mantissa_bits}
    values = [Fraction(n, 4) for n in range(1, 15)]
    for power in (7, 8, 15, 16, 31, 32, 63, 64):
        values += [
            Fraction(2**power) + offset for offset in (-1, Fraction(-1, 2), 0, Fraction(1, 2))
        ]
    codes |= {exact.round_nonzero(value, form, "rz") for value in values}
    codes |= {code | form.sign_bit for code in codes}
    random = rng.integers(0, 2 * form.sign_bit - 1, randoms, np.uint64)
    one = form.bias << form.mantissa_bits
    near = rng.integers(one - (one >> 3), one + (one >> 2), randoms).astype(np.uint64)
    all_codes = np.concatenate([np.array(sorted(codes), np.uint64), random, near])
    (padded,) = pad_to_warps(all_codes.astype(STORAGE[kind]))
    return padded


def integer_edges(kind: str, randoms: int) -> np.ndarray:
    """Return bit patterns of an integer type, among them numbers around powers of two."""
    bits = int(kind[1:])
    rng = np.random.default_rng(bits)
    values = {0, 1, 2, 3}
    for power in (7, 8, 11, 15, 16, 24, 25, 31, 32, 53, 54, 62, 63, 64):
        values |= {2**power + offset for offset in (-2, -1, 0, 1, 2)}
        values |= {2**power + 2 ** max(0, power - 8) + offset for offset in (-1, 0, 1)}
        values |= {2**power + 2 ** max(0, power - 24) + offset for offset in (-1, 0, 1)}
    values |= {-value for value in values}
    mask = (1 << bits) - 1
    known = np.array(sorted({value & mask for value in values}), np.uint64)
    random = rng.integers(0, mask, randoms, np.uint64, endpoint=True)
    shifts = rng.integers(0, bits, randoms).astype(np.uint64)
    (padded,) = pad_to_warps(np.concatenate([known, random >> shifts]).astype(STORAGE[kind]))
    return padded


def read_integer(code: int, kind: str) -> int:
    """Return the value of an integer's bit pattern."""
    bits = int(kind[1:])
    return signed(code, bits) if kind[0] == "s" else code & ((1 << bits) - 1)


def write_integer(value: int, kind: str) -> int:
    """Return the bits of an integer in its register: extended as its type says."""
    bits = int(kind[1:])
    value &= (1 << bits) - 1
    return signed(value, bits) if kind[0] == "s" else value


def integer_range(kind: str) -> tuple[int, int]:
    """Return the smallest and largest integer of a type."""
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_wrap_or_saturate(source: str) -> None:
    a = integer_edges(source, 100)
    cases = []
    for target in INTEGERS:
        dtype = STORAGE[target]
        cases.append(
            Case(
                f"cvt.{target}.{source} {{o}}, %i0",
                map_values(lambda x, t=target: write_integer(read_integer(x, source), t), dtype, a),
            )
        )
        low, high = integer_range(target)
        if low <= integer_range(source)[0] and integer_range(source)[1] <= high:
            continue  # nothing to saturate: PTX has no such form
        cases.append(
            Case(
                f"cvt.sat.{target}.{source} {{o}}, %i0",
                map_values(
                    lambda x, t=target: write_integer(
                        clamp(read_integer(x, source), *integer_range(t)), t
                    ),
                    dtype,
                    a,
                ),
            )
        )
    check_cases([a], cases)


def round_integral(value: Fraction, mode: str) -> int:
    """Return a value rounded to an integer by rni, rzi, rmi or rpi."""
    floor = value.numerator // value.denominator
    if mode == "rmi" or value == floor:
        return floor
    if mode == "rpi":
        return floor + 1
    if mode == "rzi":
        return floor + (value < 0)
    return round(value)


@pytest.mark.parametrize("source", FLOATS)
def test_floats_to_integers_saturate_and_nan_is_zero(source: str) -> None:
    form = FLOATS[source]
    a = float_edges(source, 60)

    def convert(code: int, target: str, mode: str, is_flushed: bool) -> int:
        value = exact.decode(exact.flush_code(code, form) if is_flushed else code, form)
        low, high = integer_range(target)
        if value == exact.NAN:  # PTX says 0; an H200 does so only for these (see convert.cpp)
            top = source == "f64" or target[1:] == "64"
            return write_integer(1 << (int(target[1:]) - 1) if top else 0, target)
        if isinstance(value, str):
            return write_integer(high if value == exact.INFINITY else low, target)
        return write_integer(clamp(round_integral(value, mode), low, high), target)

    cases = [
        Case(
            f"cvt.{mode}{flush}.{target}.{source} {{o}}, %i0",
            map_values(
                lambda x, t=target, m=mode, f=bool(flush) and source == "f32": convert(x, t, m, f),
                STORAGE[target],
                a,
            ),
        )
        for mode in ("rni", "rzi", "rmi", "rpi")
        for target in INTEGERS
        for flush in ("", ".ftz")
        if not flush or (source == "f32" and target == "s32")
    ]
    check_cases([a], cases)


@pytest.mark.parametrize("source", INTEGERS)
def test_integers_to_floats_round_once(source: str) -> None:
    a = integer_edges(source, 60)
    cases = [
        Case(
            f"cvt.{mode}.{target}.{source} {{o}}, %i0",
            map_values(
                lambda x, f=form, m=mode: exact.encode(Fraction(read_integer(x, source)), f, m),
                STORAGE[target],
                a,
            ),
        )
        for mode in DIRECTED
        for target, form in FLOATS.items()
    ]
    cases.append(
        Case(
            f"cvt.rn.sat.f32.{source} {{o}}, %i0",
            np.where(
                map_values(lambda x: read_integer(x, source) > 0, np.uint8, a), 0x3F800000, 0
            ).astype(np.uint32),
        )
    )
    check_cases([a], cases)


def dot(word: str) -> str:
    """Return a modifier with its dot, or nothing."""
    return f".{word}" if word else ""


def keep_nan(code: int, source: Format, target: Format) -> int:
    """Return the NaN that a conversion with f64 on a side gives: sign and payload stay (H200).

    16-bit formats widen to the canonical NaN of f32 on the way.
    """
    if source in (F16, BF16):
        code, source = F32.nan, F32
    shift = target.mantissa_bits - source.mantissa_bits
    payload = code & ((1 << source.mantissa_bits) - 1)
    payload = payload << shift if shift >= 0 else payload >> -shift
    sign = target.sign_bit if exact.is_negative(code, source) else 0
    return sign | target.infinity | 1 << (target.mantissa_bits - 1) | payload


def convert_float(code: int, source: Format, target: Format, mode: str) -> int:
    """Return a float's code in another format, rounded once.

    NaN is canonical, but where f64 is a side it keeps its sign and payload and becomes quiet.
    """
    value = exact.decode(code, source)
    if value == exact.NAN:
        if (source, target) == (BF16, F32):
            return code << 16  # a shift, NaN or not (H200)
        return keep_nan(code, source, target) if F64 in (source, target) else target.nan
    return exact.encode(value, target, mode, exact.is_negative(code, source))


@pytest.mark.parametrize(
    ("target", "source"), [p for p in itertools.product(FLOATS, FLOATS) if p[0] != p[1]]
)
def test_floats_to_floats_round_once(target: str, source: str) -> None:
    a = float_edges(source, 150)
    cases = []
    is_exact = FLOATS[target].mantissa_bits > FLOATS[source].mantissa_bits and target != "f16"
    for mode in ("",) if is_exact else DIRECTED:
        result = map_values(
            lambda x, m=mode or "rn": convert_float(x, FLOATS[source], FLOATS[target], m),
            STORAGE[target],
            a,
        )
        cases.append(Case(f"cvt{dot(mode)}.{target}.{source} {{o}}, %i0", result))
        if "bf16" in (target, source):
            continue
        saturated = map_values(
            lambda x: exact.saturate_code(x, FLOATS[target]), STORAGE[target], result
        )
        cases.append(Case(f"cvt{dot(mode)}.sat.{target}.{source} {{o}}, %i0", saturated))
    check_cases([a], cases)


def test_ftz_acts_on_f32_sources_and_results() -> None:
    a = float_edges("f32", 100)
    wide = float_edges("f64", 100)
    tiny = np.array([0x0000000000000001, 0x36A0000000000000, 0x380FFFFFFFFFFFFF], np.uint64)
    wide[: len(tiny)] = tiny
    a, wide = pad_to_warps(a, np.resize(wide, len(a)))

    def flushed_source(target: str) -> Callable[[int], int]:
        return lambda x: convert_float(exact.flush_code(x, F32), F32, FLOATS[target], "rn")

    cases = [
        Case(f"cvt.rn.ftz.{t}.f32 {{o}}, %i0", map_values(flushed_source(t), STORAGE[t], a))
        for t in ("f16", "bf16")
    ]
    is_number = (a & np.uint32(0x7FFFFFFF)) <= 0x7F800000
    doubles = map_values(flushed_source("f64"), np.uint64, a)
    doubles = np.where(is_number, doubles, np.uint64(0x7FFFFFFFE0000000))  # by way of canonical f32
    cases.append(Case("cvt.ftz.f64.f32 {o}, %i0", doubles))
    cases.append(
        Case(
            "cvt.rn.ftz.f32.f64 {o}, %i1",
            map_values(
                lambda x: (
                    convert_float(x, F64, F32, "rn")
                    & (
                        0x80000000
                        if not convert_float(x, F64, F32, "rz") & 0x7F800000
                        else 0xFFFFFFFF
                    )
                ),
                np.uint32,
                wide,
            ),
        )
    )
    check_cases([a, wide], cases)


@pytest.mark.parametrize("kind", FLOATS)
def test_rounding_to_an_integral_value_keeps_the_type(kind: str) -> None:
    form = FLOATS[kind]
    a = float_edges(kind, 80)

    def convert(code: int, mode: str) -> int:
        value = exact.decode(code, form)
        if value == exact.NAN:
            return keep_nan(code, F64, F64) if kind == "f64" else form.nan
        if isinstance(value, str):
            return code
        rounded = Fraction(round_integral(value, mode))
        return exact.encode(rounded, form, "rn", exact.is_negative(code, form))

    cases = [
        Case(
            f"cvt.{mode}.{kind}.{kind} {{o}}, %i0",
            map_values(lambda x, m=mode: convert(x, m), STORAGE[kind], a),
        )
        for mode in ("rni", "rzi", "rmi", "rpi")
    ]
    check_cases([a], cases)


def finish(code: int, form: Format, words: str) -> int:
    """Return a code after .relu and .satfinite."""
    top = form.sign_bit
    magnitude = code & (top - 1)
    if "relu" in words and code & top:
        return 0
    if "satfinite" in words and magnitude == form.infinity:
        return (code & top) | (form.infinity - 1)
    return code


MODIFIERS = ("", ".relu", ".satfinite", ".relu.satfinite")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_and_singles_with_relu_and_satfinite(kind: str) -> None:
    form = FLOATS[kind]
    a = float_edges("f32", 400)
    b = np.roll(a, 13)
    cases = []
    for mode in ("rn", "rz"):
        for words in MODIFIERS:
            high, low = (
                map_values(
                    lambda x, m=mode, w=words: finish(convert_float(x, F32, form, m), form, w),
                    np.uint32,
                    each,
                )
                for each in (a, b)
            )
            cases.append(Case(f"cvt.{mode}{words}.{kind}x2.f32 {{o}}, %i0, %i1", high << 16 | low))
            cases.append(Case(f"cvt.{mode}{words}.{kind}.f32 {{o}}, %i0", high.astype(np.uint16)))
    check_cases([a, b], cases)


def test_tf32_keeps_ten_bits() -> None:
    a = float_edges("f32", 500)

    def convert(code: int, mode: str, words: str) -> int:
        if mode == "rna" and code & 0x7FFFFFFF > 0x7F800000:
            return code & 0xFFFFE000  # NaN is cut, not made canonical (H200)
        return finish(convert_float(code, F32, TF32, mode), TF32, words) << 13

    cases = [
        Case(
            f"cvt.{mode}{words}.tf32.f32 {{o}}, %i0",
            map_values(lambda x, m=mode, w=words: convert(x, m, w), np.uint32, a),
        )
        for mode in ("rna", "rn", "rz")
        for words in (MODIFIERS if mode != "rna" else ("", ".satfinite"))
    ]
    check_cases([a], cases)


@pytest.mark.parametrize(("kind", "random_bits"), [("f16", 13), ("bf16", 16)])
def test_stochastic_rounding_carries_out_of_the_discarded_bits(kind: str, random_bits: int) -> None:
    form = FLOATS[kind]
    a = float_edges("f32", 1500)
    b = np.roll(a, 5)
    rng = np.random.default_rng(4)
    rbits = rng.integers(0, 1 << 32, len(a), np.uint32)

    def convert(code: int, random: int) -> int:
        value = exact.decode(code, F32)
        if not isinstance(value, Fraction) or value == 0:
            return finish(convert_float(code, F32, form, "rz"), form, ".satfinite")
        # floor(|value| / unit + random / 2^n) units: a carry of the added bits rounds up.
        magnitude = abs(value)
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent += 0 if magnitude >= Fraction(2) ** exponent else -1
        unit = Fraction(2) ** (max(exponent, 1 - form.bias) - form.mantissa_bits)
        fine = Fraction(magnitude / unit * (1 << random_bits)) // 1
        count = (int(fine) + (random & ((1 << random_bits) - 1))) >> random_bits
        sign = form.sign_bit if value < 0 else 0
        if count == 0:
            return sign
        largest = exact.decode(form.infinity - 1, form)
        assert isinstance(largest, Fraction)
        return exact.round_nonzero(min(count * unit, largest), form, "rz") | sign

    high = map_values(lambda x, r: convert(x, r >> 16), np.uint32, a, rbits)
    low = map_values(lambda x, r: convert(x, r & 0xFFFF), np.uint32, b, rbits)
    text = f"cvt.rs.satfinite.{kind}x2.f32 {{o}}, %i0, %i1, %i2"
    check_cases([a, b, rbits], [Case(text, high << 16 | low)])


def test_pack_clamps_and_appends() -> None:
    rng = np.random.default_rng(9)
    a, b, c = rng.integers(0, 1 << 32, (3, 512), np.uint32)
    a[::3], b[::2] = a[::3] & 15, b[::2] | np.uint32(0xFFFFFFF0)
    cases = []
    for kind in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        bits = int(kind[1:])
        low, high = integer_range(kind)
        mask = (1 << bits) - 1

        def pack(x: int, y: int, z: int, bits: int, mask: int, ends: tuple[int, int]) -> int:
            first, second = (clamp(signed(v, 32), *ends) & mask for v in (x, y))
            return first << bits | second | z << (2 * bits)

        rest = "" if bits == 16 else ".b32"
        expected = map_values(
            lambda x, y, z, n=bits, m=mask, e=(low, high), r=rest: pack(
                x, y, z if r else 0, n, m, e
            ),
            np.uint32,
            a,
            b,
            c,
        )
        sources = "%i0, %i1, %i2" if rest else "%i0, %i1"
        cases.append(Case(f"cvt.pack.sat.{kind}.s32{rest} {{o}}, {sources}", expected))
    check_cases([a, b, c], cases)
