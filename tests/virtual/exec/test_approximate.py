"""The approximate instructions give the mathematical value rounded once.

References are 80-bit long doubles: 11 bits more than the core's f64, so that both round to the
same f32 unless the true value lies within 2^-26 of a boundary; none of the inputs here does.
"""

from collections.abc import Callable

import numpy as np
import pytest

from .lane_cases import Case, check_cases, pad_to_warps

NAN32 = np.uint32(0x7FFFFFFF)
SPECIALS = np.array(
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x00000001),
        *(0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00400000),
    ],
    np.uint32,
)


def as_f32(values: np.ndarray) -> np.ndarray:
    """Return long doubles rounded to f32 codes, NaN in the canonical pattern."""
    with np.errstate(all="ignore"):
        codes = np.atleast_1d(values.astype(np.float32)).view(np.uint32)
    return np.where(np.isnan(values), NAN32, codes)


def flush(codes: np.ndarray) -> np.ndarray:
    """Return f32 codes with subnormals replaced by zero."""
    is_tiny = (codes & np.uint32(0x7F800000)) == 0
    return np.where(is_tiny, codes & np.uint32(0x80000000), codes)


def long_tanh(x: np.ndarray) -> np.ndarray:
    """Return tanh in long double through expm1, which keeps small values exact."""
    with np.errstate(all="ignore"):
        grown = np.expm1(2 * np.minimum(np.abs(x), 60))
        return np.copysign(grown / (grown + 2), x)


FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], tuple[float, float]]] = {
    "rcp": (lambda x: 1 / x, (-1e3, 1e3)),
    "sqrt": (np.sqrt, (0, 1e6)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0, 1e6)),
    "sin": (np.sin, (-60, 60)),
    "cos": (np.cos, (-60, 60)),
    "lg2": (np.log2, (0, 8)),
    "ex2": (np.exp2, (-151, 129)),
}


def make_inputs(low: float, high: float, seed: int) -> np.ndarray:
    """Return special codes and random ones, spread over values and over exponents."""
    rng = np.random.default_rng(seed)
    uniform = rng.uniform(low, high, 20000).astype(np.float32).view(np.uint32)
    wild = rng.integers(0, 1 << 32, 4000, np.uint32)
    (padded,) = pad_to_warps(np.concatenate([SPECIALS, uniform, wild]))
    return padded


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_f32_functions_are_rounded_once(name: str) -> None:
    function, (low, high) = FUNCTIONS[name]
    codes = make_inputs(low, high, len(name))
    if name in ("sin", "cos"):  # the reduction of huge arguments is the C library's either way
        codes = np.where((codes & np.uint32(0x7FFFFFFF)) > 0x47000000, SPECIALS[3], codes)

    def reference(inputs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return as_f32(function(inputs.view(np.float32).astype(np.longdouble)))

    check_cases(
        [codes],
        [
            Case(f"{name}.approx.f32 {{o}}, %i0", reference(codes)),
            Case(f"{name}.approx.ftz.f32 {{o}}, %i0", flush(reference(flush(codes)))),
        ],
    )


def test_tanh_keeps_relative_accuracy_near_zero() -> None:
    codes = make_inputs(-12, 12, 3)
    small = (np.random.default_rng(1).integers(0x20000000, 0x3F000000, 20000)).astype(np.uint32)
    (codes,) = pad_to_warps(np.concatenate([codes, small]))
    with np.errstate(invalid="ignore"):  # signalling NaNs among the inputs
        wide = codes.view(np.float32).astype(np.longdouble)
    expected = as_f32(long_tanh(wide))
    check_cases([codes], [Case("tanh.approx.f32 {o}, %i0", expected)])


def test_division_by_the_largest_numbers_flushes_only_when_approximate() -> None:
    rng = np.random.default_rng(2)
    a = np.concatenate([np.resize(SPECIALS, 200), rng.integers(0, 1 << 32, 4000, np.uint32)])
    b = np.concatenate([np.repeat(SPECIALS, 15)[:200], rng.integers(0, 1 << 32, 4000, np.uint32)])
    a, b = pad_to_warps(a, b)

    def quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            wide = x.view(np.float32).astype(np.longdouble) / y.view(np.float32)
        return as_f32(wide)

    def approximate(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        magnitude = y & np.uint32(0x7FFFFFFF)
        is_huge = (magnitude > 0x7E800000) & (magnitude < 0x7F800000)
        zero = (x ^ y) & np.uint32(0x80000000)
        is_infinite = (x & np.uint32(0x7FFFFFFF)) >= 0x7F800000
        return np.where(is_huge, np.where(is_infinite, NAN32, zero), quotient(x, y))

    check_cases(
        [a, b],
        [
            Case("div.full.f32 {o}, %i0, %i1", quotient(a, b)),
            Case("div.full.ftz.f32 {o}, %i0, %i1", flush(quotient(flush(a), flush(b)))),
            Case("div.approx.f32 {o}, %i0, %i1", approximate(a, b)),
            Case("div.approx.ftz.f32 {o}, %i0, %i1", flush(approximate(flush(a), flush(b)))),
        ],
    )


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_16_bit_functions_are_rounded_once_for_every_input(kind: str) -> None:
    import ml_dtypes

    dtype = np.dtype(np.float16 if kind == "f16" else ml_dtypes.bfloat16)
    codes = np.arange(1 << 16, dtype=np.uint16)
    smallest = np.uint16(0x0080)

    def flush16(each: np.ndarray) -> np.ndarray:
        is_tiny = (each & np.uint16(0x7FFF)) < smallest
        return np.where(is_tiny, each & np.uint16(0x8000), each)

    def run(f: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            exact = f(inputs.view(dtype).astype(np.longdouble))
            # f64 keeps enough bits; no result lies that close to a boundary of 16 bits.
            rounded = np.atleast_1d(exact.astype(np.float64).astype(dtype)).view(np.uint16)
        return np.where(np.isnan(exact), np.uint16(0x7FFF), rounded)

    cases = [Case(f"tanh.approx.{kind} {{o}}, %i0", run(long_tanh, codes))]
    packed = [Case(f"tanh.approx.{kind}x2 {{o}}, %i0", run(long_tanh, codes).view(np.uint32))]
    if kind == "bf16":
        flushed = flush16(run(np.exp2, flush16(codes)))
        cases.append(Case("ex2.approx.ftz.bf16 {o}, %i0", flushed))
    else:
        cases.append(Case("ex2.approx.f16 {o}, %i0", run(np.exp2, codes)))
        packed.append(Case("ex2.approx.f16x2 {o}, %i0", run(np.exp2, codes).view(np.uint32)))
    check_cases([codes], cases)
    check_cases([codes.view(np.uint32)], packed)
