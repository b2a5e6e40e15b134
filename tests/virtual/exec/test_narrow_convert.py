"""Narrow formats, bit for bit against ml_dtypes, over all 16-bit inputs and around all midpoints.

ml_dtypes rounds to nearest even; what PTX adds (saturation, NaN codes, packing, scaling) is written
here from the PTX ISA document.
"""

import ml_dtypes
import numpy as np
import pytest

from .lane_cases import Case, check_cases, pad_to_warps

# Format: (ml_dtypes type, largest finite code, code of NaN, bits of a slot).
FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7E, 0x7F, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7B, 0x7F, 8),
    "e2m3": (ml_dtypes.float6_e2m3fn, 0x1F, 0x1F, 8),
    "e3m2": (ml_dtypes.float6_e3m2fn, 0x1F, 0x1F, 8),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0x7, 0x7, 4),
}
SIGN = {"e4m3": 0x80, "e5m2": 0x80, "e2m3": 0x20, "e3m2": 0x20, "e2m1": 0x8}


def values_of(kind: str) -> np.ndarray:
    """Return the value of every code of a format as f64."""
    dtype = FORMATS[kind][0]
    codes = np.arange(2 * SIGN[kind], dtype=np.uint8)
    return codes.view(dtype).astype(np.float64)


def as_f64(values: np.ndarray) -> np.ndarray:
    """Return values as f64; signalling NaNs become quiet without a warning."""
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def narrow(
    values: np.ndarray, kind: str, relu: bool = False, toward_zero: bool = False
) -> np.ndarray:
    """Return the codes of f64 values with .satfinite."""
    dtype, largest, nan, _ = FORMATS[kind]
    limit = float(np.array([largest], np.uint8).view(dtype).astype(np.float64)[0])
    with np.errstate(all="ignore"):
        bounded = np.clip(np.where(np.isnan(values), 0, values), -limit, limit)
        if toward_zero:
            table = values_of(kind)
            finite = np.unique(table[np.isfinite(table) & (table >= 0)])
            down = finite[np.searchsorted(finite, np.abs(bounded), "right") - 1]
            bounded = np.copysign(down, bounded)
        codes = bounded.astype(dtype).view(np.uint8).astype(np.uint32)
    if relu:
        codes = np.where(np.signbit(values), 0, codes)
    return np.where(np.isnan(values), nan, codes).astype(np.uint32)


def dense_f32(kind: str) -> np.ndarray:
    """Return f32 codes at and beside every value and midpoint of a format, and random ones."""
    table = values_of(kind)
    points = np.unique(table[np.isfinite(table)])
    middles = (points[1:] + points[:-1]) / 2
    limit = points[-1]
    marks = np.concatenate([points, middles, [limit * 1.01, limit * 1.0625, limit * 1.1, 1e30]])
    codes = marks.astype(np.float32).view(np.uint32)
    around = np.concatenate([codes, codes + np.uint32(1), codes - np.uint32(1)])
    rng = np.random.default_rng(3)
    spread = rng.uniform(-1.5 * limit, 1.5 * limit, 4000).astype(np.float32).view(np.uint32)
    tiny = rng.integers(0x30000000, 0x42000000, 2000, np.uint32)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 1, 0x80000001], np.uint32
    )
    every = np.concatenate([special, around, spread, tiny, tiny | np.uint32(1 << 31)])
    (padded,) = pad_to_warps(every)
    return padded


@pytest.mark.parametrize("kind", FORMATS)
def test_from_f32_rounds_to_nearest_even_and_saturates(kind: str) -> None:
    a = dense_f32(kind)
    b = np.roll(a, 1)
    slot = FORMATS[kind][3]
    cases = []
    for relu in ("", ".relu"):
        for mode in ("rn", "rz"):
            high, low = (
                narrow(as_f64(each.view(np.float32)), kind, bool(relu), mode == "rz")
                for each in (a, b)
            )
            expected = (high << slot | low).astype(np.uint16)
            name = f"cvt.{mode}.satfinite{relu}.{kind}x2.f32"
            cases.append(Case(f"{name} {{o}}, %i0, %i1", expected))
    check_cases([a, b], cases)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_from_every_16_bit_input(kind: str, source: str) -> None:
    dtype = np.dtype(np.float16) if source == "f16" else np.dtype(ml_dtypes.bfloat16)
    codes = np.arange(1 << 16, dtype=np.uint16)
    pairs = codes.view(np.uint32)
    slot = FORMATS[kind][3]
    cases = []
    for relu in ("", ".relu"):
        every = narrow(as_f64(codes.view(dtype)), kind, bool(relu))
        expected = (every[1::2] << slot | every[::2]).astype(np.uint16)
        name = f"cvt.rn.satfinite{relu}.{kind}x2.{source}x2"
        cases.append(Case(f"{name} {{o}}, %i0", expected))
    check_cases([pairs], cases)


def widen(values: np.ndarray, target: str) -> np.ndarray:
    """Return f64 values as codes of f16 or bf16, NaN canonical."""
    dtype = np.dtype(np.float16) if target == "f16x2" else np.dtype(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        codes = values.astype(np.float32).astype(dtype).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(values), 0x7FFF, codes).astype(np.uint32)


def all_pairs(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return packed pairs in which every code stands in either slot, and both slots' codes."""
    slot = FORMATS[kind][3]
    low = np.resize(np.arange(2 * SIGN[kind], dtype=np.uint16), 512)
    high = np.roll(low, 7)
    return high << np.uint16(slot) | low, high, low


@pytest.mark.parametrize("kind", FORMATS)
def test_every_code_widens_exactly(kind: str) -> None:
    pairs, high, low = all_pairs(kind)
    table = values_of(kind)
    cases = []
    for target in ("f16x2", "bf16x2"):
        for relu in ("", ".relu"):
            upper, lower = (
                np.where(np.signbit(table[c]) & ~np.isnan(table[c]) & bool(relu), 0, table[c])
                for c in (high, low)
            )
            expected = widen(upper, target) << 16 | widen(lower, target)
            cases.append(Case(f"cvt.rn{relu}.{target}.{kind}x2 {{o}}, %i0", expected))
    check_cases([pairs], cases)


def power(code: np.ndarray) -> np.ndarray:
    """Return the value of ue8m0 codes."""
    return np.where(code == 255, np.nan, np.exp2(code.astype(np.float64) - 127))


@pytest.mark.parametrize("kind", [*FORMATS, "s2f6"])
def test_scales_multiply_before_the_one_rounding(kind: str) -> None:
    rng = np.random.default_rng(1)
    if kind == "s2f6":
        high, low = rng.integers(0, 256, (2, 512)).astype(np.uint16)
        pairs = high << np.uint16(8) | low
        table = np.arange(256, dtype=np.uint8).view(np.int8) / 64
    else:
        pairs, high, low = all_pairs(kind)
        table = values_of(kind)
    scale_high, scale_low = rng.integers(100, 150, (2, 512)).astype(np.uint16)
    scale_high[:8], scale_low[:8] = 255, 1
    scales = scale_high << np.uint16(8) | scale_low
    cases = []
    for words, is_bounded in (("", False), (".satfinite", True)):
        upper = table[high] * power(scale_high)
        lower = table[low] * power(scale_low)
        expected = widen(upper, "bf16x2") << 16 | widen(lower, "bf16x2")
        if is_bounded:
            for shift in (16, 0):
                half = expected >> shift & 0xFFFF
                infinite = (half & 0x7FFF) == 0x7F80
                expected = np.where(infinite, expected - (1 << shift), expected)
        text = f"cvt.rn{words}.scaled::n2::ue8m0.bf16x2.{kind}x2 {{o}}, %i0, %i1"
        cases.append(Case(text, expected.astype(np.uint32)))
    check_cases([pairs, scales], cases)


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("words", ["", ".satfinite"])
def test_ue8m0_takes_the_power_of_two_below_or_above(mode: str, words: str) -> None:
    rng = np.random.default_rng(2)
    special = [0, 1, 0x00400000, 0x00400001, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F000000]
    special += [0x7F000001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x3F800000]
    powers = np.arange(0, 255, dtype=np.uint32) << np.uint32(23)
    codes = np.concatenate(
        [
            np.array(special, np.uint32),
            powers,
            powers + np.uint32(1),
            rng.integers(0, 1 << 31, 2000, np.uint32),
        ]
    )
    (a,) = pad_to_warps(np.concatenate([codes, codes | np.uint32(1 << 31)]))
    b = np.roll(a, 1)

    def encode(each: np.ndarray) -> np.ndarray:
        value = np.abs(as_f64(each.view(np.float32)))
        with np.errstate(all="ignore"):
            exponent = np.log2(value)
            exact = np.frexp(value)
            below = exact[1] - 1  # value = m * 2^e with m in [0.5, 1)
            is_power = exact[0] == 0.5
        chosen = np.where((mode == "rp") & ~is_power, below + 1, below) + 127
        # Subnormals below 2^-127 stay at code 0 in either mode.
        code = np.where(value <= 2.0**-127, 0, np.clip(chosen, 0, 255))
        code = np.where(np.isinf(exponent) & (value > 0), 255, code)
        if words:
            code = np.minimum(code, 254)
        return np.where(np.isnan(value), 255, code).astype(np.uint16)

    pair = encode(a) << np.uint16(8) | encode(b)
    cases = [Case(f"cvt.{mode}{words}.ue8m0x2.f32 {{o}}, %i0, %i1", pair)]
    check_cases([a, b], cases)
    # bf16 inputs: the same on the upper halves.
    halves = (a >> 16).astype(np.uint16)
    every = encode((halves.astype(np.uint32) << 16).astype(np.uint32))
    packed = every[1::2] << np.uint16(8) | every[::2]
    text = f"cvt.{mode}{words}.ue8m0x2.bf16x2 {{o}}, %i0"
    check_cases([halves.view(np.uint32)], [Case(text, packed)])


def test_ue8m0_widens_to_powers_of_two() -> None:
    low = np.resize(np.arange(256, dtype=np.uint16), 512)
    high = np.roll(low, 3)
    expected = widen(power(high), "bf16x2") << 16 | widen(power(low), "bf16x2")
    pairs = high << np.uint16(8) | low
    check_cases([pairs], [Case("cvt.rn.bf16x2.ue8m0x2 {o}, %i0", expected)])


@pytest.mark.parametrize("source", ["f32", "bf16x2"])
def test_s2f6_counts_64ths(source: str) -> None:
    rng = np.random.default_rng(5)
    values = np.concatenate([rng.uniform(-3, 3, 2000), np.arange(-300, 300) / 128, [1e9, -1e9]])
    (values,) = pad_to_warps(values.astype(ml_dtypes.bfloat16).astype(np.float32))
    other = np.roll(values, 1)

    def encode(each: np.ndarray) -> np.ndarray:
        return (
            np.clip(np.rint(each.astype(np.float64) * 64), -128, 127).astype(np.int8).view(np.uint8)
        )

    expected = encode(values).astype(np.uint16) << np.uint16(8) | encode(other)
    if source == "f32":
        inputs = [values, other]
        text = "cvt.rn.satfinite.s2f6x2.f32 {o}, %i0, %i1"
    else:
        inputs = [(values.view(np.uint32) & np.uint32(0xFFFF0000)) | (other.view(np.uint32) >> 16)]
        text = "cvt.rn.satfinite.s2f6x2.bf16x2 {o}, %i0"
    check_cases(inputs, [Case(text, expected)])


def stochastic(values: np.ndarray, random: np.ndarray, kind: str) -> np.ndarray:
    """Return codes after stochastic rounding with 8 random bits below each value's last place."""
    dtype, largest, nan, _ = FORMATS[kind]
    mantissa = {"e4m3": 3, "e5m2": 2, "e2m3": 3, "e3m2": 2, "e2m1": 1}[kind]
    bias = {"e4m3": 7, "e5m2": 15, "e2m3": 1, "e3m2": 3, "e2m1": 1}[kind]
    limit = float(np.array([largest], np.uint8).view(dtype).astype(np.float64)[0])
    with np.errstate(all="ignore"):
        magnitude = np.minimum(
            np.abs(np.nan_to_num(values, nan=0.0, posinf=1e30, neginf=-1e30)), 1e30
        )
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias)
        unit = np.exp2((exponent - mantissa).astype(np.float64))
        count = np.floor((np.floor(magnitude / unit * 256) + random) / 256)
        result = np.copysign(np.minimum(count * unit, limit), values)
        codes = result.astype(dtype).view(np.uint8).astype(np.uint32)
    return np.where(np.isnan(values), nan, codes).astype(np.uint32)


REVERSED = np.array([int(f"{b:08b}"[::-1], 2) for b in range(256)])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_stochastic_rounding_of_four(kind: str, gpu: str) -> None:
    slot = FORMATS[kind][3]
    columns = [np.roll(dense_f32(kind), shift) for shift in (0, 1, 2, 3)]
    rng = np.random.default_rng(8)
    random = rng.integers(0, 1 << 32, len(columns[0]), np.uint32)
    # Which byte each slot takes, lowest slot first (see exec/narrow_convert.cpp).
    order = (0, 1, 2, 3) if gpu == "b200" else (2, 0, 3, 1) if slot == 4 else (1, 0, 3, 2)
    total = np.zeros(len(random), np.uint32)
    for position, byte in enumerate(order):
        bits = (random >> np.uint32(8 * byte) & np.uint32(0xFF)).astype(np.int64)
        if gpu == "b300" and position % 2:
            bits = REVERSED[bits]
        values = as_f64(columns[3 - position].view(np.float32))
        total |= stochastic(values, bits, kind) << np.uint32(slot * position)
    expected = total.astype(np.uint16) if kind == "e2m1" else total
    text = f"cvt.rs.satfinite.{kind}x4.f32 {{o}}, {{{{%i0, %i1, %i2, %i3}}}}, %i4"
    check_cases([*columns, random], [Case(text, expected)], gpu=gpu)
