"""f32 arithmetic in every rounding mode against exact fractions."""

from collections.abc import Callable

import numpy as np
import pytest

from . import exact_rounding as exact
from .exact_rounding import BF16, F16, F32
from .lane_cases import Case, check_cases, map_values, pad_to_warps

EDGES32 = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800000, 0xBF800000),
        *(0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001),
        *(0xFFFFFFFF, 0x33800000, 0x7E800001),
    ],
    dtype=np.uint32,
)


def make_columns(seed: int, randoms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three columns: all pairs of edges, then numbers that meet, cancel and underflow."""
    rng = np.random.default_rng(seed)
    a, b = (each.ravel() for each in np.meshgrid(EDGES32, EDGES32))
    near = rng.integers(0x3E000000, 0x41000000, (3, randoms), np.uint32)
    near ^= rng.integers(0, 2, (3, randoms), np.uint32) << np.uint32(31)
    wild = rng.integers(0, 1 << 32, (3, randoms), np.uint32)
    small = rng.integers(0x1F000000, 0x21000000, (3, randoms), np.uint32)  # products underflow
    c = np.resize(np.roll(EDGES32, 3), len(a))
    tiny = small.copy()
    tiny[2] = rng.integers(0, 0x01000000, randoms, np.uint32)
    columns = [np.concatenate(parts) for parts in zip((a, b, c), near, wild, tiny, strict=True)]
    first, second, third = pad_to_warps(*columns)
    return first, second, third


# Each takes codes and a rounding mode.
OPERATIONS: dict[str, Callable[..., int]] = {
    "add": lambda x, y, mode: exact.add_code(x, y, F32, mode),
    "sub": lambda x, y, mode: exact.add_code(x, y ^ 0x80000000, F32, mode),
    "mul": lambda x, y, mode: exact.mul_code(x, y, F32, mode),
    "fma": lambda x, y, z, mode: exact.fma_code(x, y, z, F32, mode),
    "div": lambda x, y, mode: exact.div_code(x, y, F32, mode),
    "rcp": lambda y, mode: exact.div_code(0x3F800000, y, F32, mode),
    "sqrt": lambda x, mode: exact.sqrt_code(x, F32, mode),
}


def finish(code: int, truncated: int, is_flushed: bool, is_saturated: bool) -> int:
    """Return a result after .ftz and .sat.

    A result is subnormal when its value is, before rounding: `truncated`, rounded toward zero,
    tells (an H200 flushes a product that would round up to the smallest normal number).
    """
    if is_flushed and exact.flush_code(truncated, F32) & 0x7FFFFFFF == 0:
        code &= 0x80000000
    return exact.saturate_code(code, F32) if is_saturated else code


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("flush", ["", ".ftz"])
def test_arithmetic_rounds_once(rounding: str, flush: str) -> None:
    a, b, c = make_columns(11, 50)

    def source(code: int) -> int:
        return exact.flush_code(code, F32) if flush else code

    def run(name: str, *columns: np.ndarray, saturates: bool = False) -> np.ndarray:
        def one(*codes: int) -> int:
            operands = [source(code) for code in codes]
            result, truncated = (OPERATIONS[name](*operands, m) for m in (rounding, "rz"))
            return finish(result, truncated, bool(flush), saturates)

        return map_values(one, np.uint32, *columns)

    stem = f"{rounding}{flush}"
    cases = []
    for name in ("add", "sub", "mul"):
        cases.append(Case(f"{name}.{stem}.f32 {{o}}, %i0, %i1", run(name, a, b)))
        cases.append(
            Case(f"{name}.{stem}.sat.f32 {{o}}, %i0, %i1", run(name, a, b, saturates=True))
        )
    fused = run("fma", a, b, c)
    cases += [
        Case(f"fma.{stem}.f32 {{o}}, %i0, %i1, %i2", fused),
        Case(f"mad.{stem}.f32 {{o}}, %i0, %i1, %i2", fused),
        Case(f"fma.{stem}.sat.f32 {{o}}, %i0, %i1, %i2", run("fma", a, b, c, saturates=True)),
        Case(f"div.{stem}.f32 {{o}}, %i0, %i1", run("div", a, b)),
        Case(f"rcp.{stem}.f32 {{o}}, %i1", run("rcp", b)),
        Case(f"sqrt.{stem}.f32 {{o}}, %i0", run("sqrt", a)),
    ]
    if rounding == "rn":
        cases.append(Case(f"add{flush}.f32 {{o}}, %i0, %i1", run("add", a, b)))
    check_cases([a, b, c], cases)


@pytest.mark.parametrize("flush", ["", ".ftz"])
@pytest.mark.parametrize("rounding", ["", ".rz", ".rp"])
def test_pairs_of_f32_are_two_independent_numbers(rounding: str, flush: str) -> None:
    a, b, c = (column[: len(column) // 64 * 64] for column in make_columns(5, 20))
    mode = rounding[1:] or "rn"

    def run(name: str, *columns: np.ndarray) -> np.ndarray:
        def one(*codes: int) -> int:
            if flush:
                codes = tuple(exact.flush_code(code, F32) for code in codes)
            result, truncated = (OPERATIONS[name](*codes, m) for m in (mode, "rz"))
            return finish(result, truncated, bool(flush), False)

        return map_values(one, np.uint32, *columns).view(np.uint64)

    cases = [
        Case(f"{name}{rounding}{flush}.f32x2 {{o}}, %i0, %i1", run(name, a, b))
        for name in ("add", "sub", "mul")
    ]
    text = f"fma{rounding or '.rn'}{flush}.f32x2 {{o}}, %i0, %i1, %i2"
    cases.append(Case(text, run("fma", a, b, c)))
    check_cases([each.view(np.uint64) for each in (a, b, c)], cases)


def order(code: int) -> int:
    """Return a key that sorts codes as their values, -0 before +0."""
    return -(code & 0x7FFFFFFF) - 1 if code >> 31 else code


def choose(codes: list[int], is_max: bool, keeps_nan: bool) -> int:
    """Return the minimum or maximum as PTX defines it."""
    numbers = [code for code in codes if code & 0x7FFFFFFF <= 0x7F800000]
    if not numbers or (keeps_nan and len(numbers) < len(codes)):
        return 0x7FFFFFFF
    return max(numbers, key=order) if is_max else min(numbers, key=order)


@pytest.mark.parametrize("flush", ["", ".ftz"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_minimum_and_maximum(flush: str, nan: str) -> None:
    a, b, c = make_columns(3, 100)

    def run(f: Callable[..., int], *columns: np.ndarray) -> np.ndarray:
        def one(*codes: int) -> int:
            return f(*(exact.flush_code(code, F32) if flush else code for code in codes))

        return map_values(one, np.uint32, *columns)

    def with_sign(x: int, y: int, is_max: bool) -> int:
        result = choose([x & 0x7FFFFFFF, y & 0x7FFFFFFF], is_max, bool(nan))
        return result if result == 0x7FFFFFFF else result | ((x ^ y) & 0x80000000)

    cases = []
    for name, is_max in (("min", False), ("max", True)):
        stem = f"{name}{flush}{nan}"
        cases += [
            Case(
                f"{stem}.f32 {{o}}, %i0, %i1",
                run(lambda x, y, m=is_max: choose([x, y], m, bool(nan)), a, b),
            ),
            Case(
                f"{stem}.f32 {{o}}, %i0, %i1, %i2",
                run(lambda x, y, z, m=is_max: choose([x, y, z], m, bool(nan)), a, b, c),
            ),
            Case(
                f"{stem}.abs.f32 {{o}}, %i0, %i1, %i2",
                run(
                    lambda *v, m=is_max: choose([x & 0x7FFFFFFF for x in v], m, bool(nan)),
                    a,
                    b,
                    c,
                ),
            ),
            Case(
                f"{stem}.xorsign.abs.f32 {{o}}, %i0, %i1",
                run(lambda x, y, m=is_max: with_sign(x, y, m), a, b),
            ),
        ]
    check_cases([a, b, c], cases)


def test_signs_and_properties() -> None:
    a, b, _ = make_columns(4, 50)
    magnitude = a & np.uint32(0x7FFFFFFF)
    is_subnormal = (magnitude > 0) & (magnitude < 0x00800000)
    flushed = np.where(is_subnormal, a & np.uint32(0x80000000), a)
    cases = [
        Case("abs.f32 {o}, %i0", magnitude),
        Case("neg.f32 {o}, %i0", a ^ np.uint32(0x80000000)),
        Case("abs.ftz.f32 {o}, %i0", flushed & np.uint32(0x7FFFFFFF)),
        Case("neg.ftz.f32 {o}, %i0", flushed ^ np.uint32(0x80000000)),
        Case(
            "copysign.f32 {o}, %i0, %i1",
            (a & np.uint32(0x80000000)) | (b & np.uint32(0x7FFFFFFF)),
        ),
        Case("testp.finite.f32 {o}, %i0", magnitude < 0x7F800000),
        Case("testp.infinite.f32 {o}, %i0", magnitude == 0x7F800000),
        Case("testp.number.f32 {o}, %i0", magnitude <= 0x7F800000),
        Case("testp.notanumber.f32 {o}, %i0", magnitude > 0x7F800000),
        Case("testp.normal.f32 {o}, %i0", (magnitude < 0x7F800000) & ~is_subnormal),
        Case("testp.subnormal.f32 {o}, %i0", is_subnormal),
    ]
    check_cases([a, b], cases)


@pytest.mark.parametrize(("kind", "form"), [("f16", F16), ("bf16", BF16)])
@pytest.mark.parametrize("rounding", ["", ".rz", ".rm", ".rp"])
def test_mixed_operands_widen_exactly(kind: str, form: exact.Format, rounding: str) -> None:
    wide_a, wide_b, c = make_columns(8, 20)
    a, b = (wide_a >> 16).astype(np.uint16), (wide_b >> np.uint32(13)).astype(np.uint16)
    mode = rounding[1:] or "rn"
    one = form.bias << form.mantissa_bits

    def fma(x: int, y: int, z: int, saturates: bool) -> int:
        return finish(exact.fma_code(x, y, z, F32, mode, form), 0, False, saturates)

    cases = []
    for saturate in ("", ".sat"):
        is_saturated = bool(saturate)
        cases += [
            Case(
                f"add{rounding}{saturate}.f32.{kind} {{o}}, %i0, %i2",
                map_values(lambda x, z, s=is_saturated: fma(x, one, z, s), np.uint32, a, c),
            ),
            Case(
                f"sub{rounding}{saturate}.f32.{kind} {{o}}, %i0, %i2",
                map_values(
                    lambda x, z, s=is_saturated: fma(x, one, z ^ 0x80000000, s), np.uint32, a, c
                ),
            ),
            Case(
                f"fma{rounding or '.rn'}{saturate}.f32.{kind} {{o}}, %i0, %i1, %i2",
                map_values(lambda x, y, z, s=is_saturated: fma(x, y, z, s), np.uint32, a, b, c),
            ),
        ]
    check_cases([a, b, c], cases)
