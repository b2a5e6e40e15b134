"""f64 arithmetic in every rounding mode against exact fractions."""

from collections.abc import Callable

import numpy as np
import pytest

from . import exact_rounding as exact
from .exact_rounding import F64
from .lane_cases import Case, check_cases, map_values, pad_to_warps

EDGES = np.array(
    [
        *(0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800FFFFFFFFFFFFF),
        *(0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000001, 0x3FEFFFFFFFFFFFFF),
        *(0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x3C90000000000000),
    ],
    dtype=np.uint64,
)
QUIET_BIT = 0x0008000000000000


def make_columns(randoms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pairs of edges with a third number, then numbers that meet and cancel."""
    rng = np.random.default_rng(6)
    a, b = (each.ravel() for each in np.meshgrid(EDGES, EDGES))
    c = np.resize(np.roll(EDGES, 5), len(a))
    near = rng.integers(0x3FD0000000000000, 0x4030000000000000, (3, randoms), np.uint64)
    near ^= rng.integers(0, 2, (3, randoms), np.uint64) << np.uint64(63)
    wild = rng.integers(0x1000000000000000, 0x6000000000000000, (3, randoms), np.uint64)
    columns = [np.concatenate(parts) for parts in zip((a, b, c), near, wild, strict=True)]
    first, second, third = pad_to_warps(*columns)
    return first, second, third


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_arithmetic_rounds_once(rounding: str) -> None:
    a, b, c = make_columns(60)
    one = 0x3FF0000000000000

    def run(f: Callable[..., int], *columns: np.ndarray) -> np.ndarray:
        return map_values(f, np.uint64, *columns)

    fused = run(lambda x, y, z: exact.fma_code(x, y, z, F64, rounding), a, b, c)
    cases = [
        Case(
            f"add.{rounding}.f64 {{o}}, %i0, %i1",
            run(lambda x, y: exact.add_code(x, y, F64, rounding), a, b),
        ),
        Case(
            f"sub.{rounding}.f64 {{o}}, %i0, %i1",
            run(lambda x, y: exact.add_code(x, y ^ 1 << 63, F64, rounding), a, b),
        ),
        Case(
            f"mul.{rounding}.f64 {{o}}, %i0, %i1",
            run(lambda x, y: exact.mul_code(x, y, F64, rounding), a, b),
        ),
        Case(f"fma.{rounding}.f64 {{o}}, %i0, %i1, %i2", fused),
        Case(f"mad.{rounding}.f64 {{o}}, %i0, %i1, %i2", fused),
        Case(
            f"div.{rounding}.f64 {{o}}, %i0, %i1",
            run(lambda x, y: exact.div_code(x, y, F64, rounding), a, b),
        ),
        Case(
            f"rcp.{rounding}.f64 {{o}}, %i1",
            run(lambda y: exact.div_code(one, y, F64, rounding), b),
        ),
        Case(
            f"sqrt.{rounding}.f64 {{o}}, %i0",
            run(lambda x: exact.sqrt_code(x, F64, rounding), a),
        ),
    ]
    check_cases([a, b, c], cases)


def test_a_nan_operand_comes_through_quiet() -> None:
    nans = np.array([0x7FF0000000000001, 0xFFF8000000000123], np.uint64)
    a, b = pad_to_warps(np.resize(nans, 64), np.resize(EDGES, 64))
    quiet = a | np.uint64(QUIET_BIT)
    check_cases(
        [a, b],
        [
            Case("add.f64 {o}, %i0, %i1", quiet),
            Case("mul.f64 {o}, %i1, %i0", quiet),
            Case("fma.rn.f64 {o}, %i1, %i1, %i0", quiet),
            Case("min.f64 {o}, %i0, %i1", b),
            Case("max.f64 {o}, %i1, %i0", b),
            Case("neg.f64 {o}, %i0", quiet),
            Case("abs.f64 {o}, %i0", quiet),
        ],
    )
    other = np.roll(a, 1)
    quiet_other = other | np.uint64(QUIET_BIT)
    check_cases(
        [a, other],
        [
            Case("add.f64 {o}, %i0, %i1", quiet_other),
            Case("sub.f64 {o}, %i0, %i1", quiet_other),
            Case("mul.f64 {o}, %i0, %i1", quiet_other),
            Case("div.rn.f64 {o}, %i0, %i1", quiet),
            Case("max.f64 {o}, %i0, %i1", quiet_other),
        ],
    )


def test_extremes_and_signs() -> None:
    a, b, _ = make_columns(60)

    def order(code: int) -> int:
        return -(code & (1 << 63) - 1) - 1 if code >> 63 else code

    magnitude = a & np.uint64((1 << 63) - 1)
    sign = a & np.uint64(1 << 63)
    cases = [
        Case("min.f64 {o}, %i0, %i1", map_values(lambda *v: min(v, key=order), np.uint64, a, b)),
        Case("max.f64 {o}, %i0, %i1", map_values(lambda *v: max(v, key=order), np.uint64, a, b)),
        Case("abs.f64 {o}, %i0", magnitude),
        Case("neg.f64 {o}, %i0", a ^ np.uint64(1 << 63)),
        Case("copysign.f64 {o}, %i0, %i1", sign | (b & np.uint64((1 << 63) - 1))),
        Case(
            "testp.normal.f64 {o}, %i0",
            (magnitude < 0x7FF << 52) & ((magnitude >= 1 << 52) | (magnitude == 0)),
        ),
        Case("testp.subnormal.f64 {o}, %i0", (magnitude > 0) & (magnitude < 1 << 52)),
        Case("testp.infinite.f64 {o}, %i0", magnitude == 0x7FF << 52),
    ]
    check_cases([a, b], cases)


def test_approximate_f64_forms_give_the_upper_word() -> None:
    a = np.abs(make_columns(60)[0].view(np.float64)) + 2.0**-1000
    a = (a.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal, root = 1.0 / a, 1.0 / np.sqrt(a)
    upper = np.uint64(0xFFFFFFFF00000000)
    is_tiny = reciprocal < 2.0**-1022
    expected = np.where(is_tiny, 0.0, (reciprocal.view(np.uint64) & upper).view(np.float64))
    check_cases(
        [a],
        [
            Case("rcp.approx.ftz.f64 {o}, %i0", expected),
            Case("rsqrt.approx.f64 {o}, %i0", root),
            Case("rsqrt.approx.ftz.f64 {o}, %i0", (root.view(np.uint64) & upper)),
        ],
    )
