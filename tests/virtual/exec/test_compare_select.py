"""setp, set, selp, slct and predicate logic against NumPy's comparisons."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from .lane_cases import Case, check_cases, make_pairs, pad_to_warps
from .test_integer import UNSIGNED, make_edges

ORDERED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
BOOLEANS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def float_comparisons(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """Return every PTX comparison of two float arrays."""
    is_nan = np.isnan(a) | np.isnan(b)
    results = {name: f(a, b) & ~is_nan for name, f in ORDERED.items()}
    results |= {f"{name}u": f(a, b) | is_nan for name, f in ORDERED.items()}
    return results | {"num": ~is_nan, "nan": is_nan}


def odd_lanes(count: int) -> np.ndarray:
    """Return where %p7 holds: odd lanes."""
    return np.arange(count) % 2 == 1


def make_floats(bits: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of codes of a float type: all edges against all, and random ones."""
    form = {16: (10, 5), 32: (23, 8), 64: (52, 11)}[bits]
    infinity = ((1 << form[1]) - 1) << form[0]
    edges = [0, 1, 1 << form[0], infinity >> 1, infinity - 1, infinity, infinity + 1]
    edges += [code | 1 << (bits - 1) for code in edges]
    return make_pairs(np.array(edges, UNSIGNED[bits]), 200, seed)


def setp_cases(kind: str, comparisons: dict[str, np.ndarray]) -> list[Case]:
    """Return setp of every comparison, plain, complemented and combined with a predicate."""
    count = len(next(iter(comparisons.values())))
    odd = odd_lanes(count)
    cases = []
    for name, truth in comparisons.items():
        cases.append(Case(f"setp.{name}.{kind} {{o}}, %i0, %i1", truth))
        for boolean, combine in BOOLEANS.items():
            text = f"setp.{name}.{boolean}.{kind} {{o}}, %i0, %i1, %p7"
            cases.append(Case(text, combine(truth, odd)))
    return cases


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_comparisons(kind: str) -> None:
    bits = int(kind[1:])
    a, b = make_pairs(make_edges(bits), 100, bits)
    view = f"{'i' if kind[0] == 's' else 'u'}{bits // 8}"
    comparisons = {name: f(a.view(view), b.view(view)) for name, f in ORDERED.items()}
    cases = setp_cases(kind, comparisons)
    if kind[0] == "u":
        cases += [
            Case(f"setp.{name}.{kind} {{o}}, %i0, %i1", comparisons[plain])
            for name, plain in UNSIGNED_NAMES.items()
        ]
        cases.append(Case(f"setp.eq.b{bits} {{o}}, %i0, %i1", comparisons["eq"]))
        cases.append(Case(f"setp.ne.b{bits} {{o}}, %i0, %i1", comparisons["ne"]))
    check_cases([a, b], cases)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_float_comparisons_order_nan_as_named(kind: str) -> None:
    bits = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[kind]
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
    a, b = make_floats(bits, 3)
    with np.errstate(invalid="ignore"):
        values = [each.view(dtype[kind]).astype(np.float64) for each in (a, b)]
    cases = setp_cases(kind, float_comparisons(*values))
    cases += [
        Case(
            f"set.{name}.{result}.{kind} {{o}}, %i0, %i1",
            np.where(truth, np.uint32(one), np.uint32(0)),
        )
        for name, truth in float_comparisons(*values).items()
        for result, one in (("u32", 0xFFFFFFFF), ("f32", 0x3F800000))
    ]
    check_cases([a, b], cases)


def test_flushed_comparisons_see_zero_for_subnormals() -> None:
    a, b = make_floats(32, 4)
    h, k = (each[: len(a)].astype(np.uint16) for each in make_floats(16, 4))
    h, k = np.resize(h, len(a)), np.resize(k, len(a))

    def flushed(codes: np.ndarray, dtype: type, smallest: float) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            values = codes.view(dtype).astype(np.float64)
        return np.where(np.abs(values) < smallest, 0.0, values)

    wide = float_comparisons(*(flushed(c, np.float32, 2.0**-126) for c in (a, b)))
    narrow = float_comparisons(*(flushed(c, np.float16, 2.0**-14) for c in (h, k)))
    cases = [Case(f"setp.{n}.ftz.f32 {{o}}, %i0, %i1", truth) for n, truth in wide.items()]
    cases += [Case(f"setp.{n}.ftz.f16 {{o}}, %i2, %i3", truth) for n, truth in narrow.items()]
    check_cases([a, b, h, k], cases)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_comparisons_give_a_predicate_per_half(kind: str) -> None:
    dtype = np.dtype(np.float16) if kind == "f16x2" else np.dtype(ml_dtypes.bfloat16)
    a, b = (each[: len(each) // 64 * 64] for each in make_floats(16, 5))
    with np.errstate(invalid="ignore"):
        every = float_comparisons(*(c.view(dtype).astype(np.float64) for c in (a, b)))
    cases = []
    for name, truth in every.items():
        low, high = truth[::2], truth[1::2]
        odd = odd_lanes(len(low))
        cases += [
            Case(f"setp.{name}.{kind} {{o}}|%p6, %i0, %i1", low),
            Case(f"setp.{name}.{kind} %p6|{{o}}, %i0, %i1", high),
            Case(f"setp.{name}.and.{kind} %p6|{{o}}, %i0, %i1, %p7", high & odd),
        ]
        ones = np.uint32(0x3C00 if kind == "f16x2" else 0x3F80)
        for result, one in ((kind, ones), ("u32", np.uint32(0xFFFF))):
            expected = np.where(low, one, 0) | np.where(high, one << np.uint32(16), 0)
            text = f"set.{name}.{result}.{kind} {{o}}, %i0, %i1"
            cases.append(Case(text, expected.astype(np.uint32)))
    check_cases([a.view(np.uint32), b.view(np.uint32)], cases)


def test_second_predicate_is_the_complement_combined() -> None:
    a, b = make_pairs(make_edges(32), 100, 1)
    odd = odd_lanes(len(a))
    check_cases(
        [a, b],
        [
            Case("setp.lt.u32 %p6|{o}, %i0, %i1", a >= b),
            Case("setp.lt.and.u32 %p6|{o}, %i0, %i1, %p7", (a >= b) & odd),
            Case("setp.lt.or.u32 %p6|{o}, %i0, %i1, !%p7", (a >= b) | ~odd),
            Case("setp.lt.xor.u32 {o}|%p6, %i0, %i1, %p7", (a < b) ^ odd),
        ],
    )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_selections(bits: int) -> None:
    a, b = make_pairs(make_edges(bits), 100, 2)
    codes, _ = make_floats(32, 6)
    c = np.resize(codes, len(a))
    with np.errstate(invalid="ignore"):
        is_at_least_zero = c.view(np.float32) >= 0
        flushed = np.where((c & np.uint32(0x7F800000)) == 0, 0, c.view(np.float32)) >= 0
    is_positive = c.view(np.int32) >= 0
    odd = odd_lanes(len(a))
    cases = [
        Case(f"selp.b{bits} {{o}}, %i0, %i1, %p7", np.where(odd, a, b)),
        Case(f"selp.u{bits} {{o}}, %i0, %i1, !%p7", np.where(odd, b, a)),
        Case(f"slct.b{bits}.s32 {{o}}, %i0, %i1, %i2", np.where(is_positive, a, b)),
        Case(f"slct.u{bits}.f32 {{o}}, %i0, %i1, %i2", np.where(is_at_least_zero, a, b)),
        Case(f"slct.ftz.s{bits}.f32 {{o}}, %i0, %i1, %i2", np.where(flushed, a, b)),
    ]
    check_cases([a, b, c], cases)


def test_predicate_logic() -> None:
    (a,) = pad_to_warps(np.arange(64, dtype=np.uint32))
    odd = odd_lanes(len(a))
    low = a % 32 < 10
    make = "setp.lt.u32 %p5, %lane, 10; "
    first = Case(make + "mov.pred {o}, %p5", low)
    with_low = [
        Case("and.pred {o}, %p5, %p7", low & odd),
        Case("or.pred {o}, %p5, %p7", low | odd),
        Case("xor.pred {o}, %p5, !%p7", low ^ ~odd),
        Case("not.pred {o}, %p5", ~low),
        Case("mov.pred {o}, 1", np.ones(len(a), bool)),
        Case("mov.pred {o}, 0", np.zeros(len(a), bool)),
    ]
    # The guard of a case stands before its first instruction only: %p5 is made by every lane.
    from ..run_ptx import run_lanes

    for case in (first, *with_low):
        text = case.text if case is first else make + case.text
        (result,) = run_lanes(text.format(o="%q0") + ";", [a], [bool], registers="")
        if "%p7" not in text:
            np.testing.assert_array_equal(result.astype(bool), case.expected, err_msg=text)
    prologue = "and.b32 %t15, %lane, 1; setp.ne.u32 %p7, %t15, 0; " + make
    for case in with_low:
        (result,) = run_lanes(prologue + case.text.format(o="%q0") + ";", [a], [bool])
        np.testing.assert_array_equal(result.astype(bool), case.expected, err_msg=case.text)
