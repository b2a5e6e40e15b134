"""shfl, vote, match, redux, activemask against the definitions of the PTX ISA document."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ..run_ptx import launch, run_lanes

LANES = np.arange(32)


def shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Return the source lane and whether it lies in the segment (PTX ISA, "shfl.sync")."""
    distance, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest = (lane & segment) | (clamp & ~segment)
    source = {
        "up": lane - distance,
        "down": lane + distance,
        "bfly": lane ^ distance,
        "idx": (lane & segment) | (distance & ~segment),
    }[mode]
    inside = source >= highest if mode == "up" else source <= highest
    return (source, True) if inside else (lane, False)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffles_with_divergent_operands(mode: str) -> None:
    rng = np.random.default_rng(1)
    blocks = 24
    a = rng.integers(0, 1 << 32, 32 * blocks, np.uint32)
    b = rng.integers(0, 40, 32 * blocks, np.uint32)
    segments = np.repeat([0, 8, 16, 24, 28, 30], 32 * blocks // 6).astype(np.uint32)
    clamp = np.uint32(0 if mode == "up" else 31)
    c = segments << np.uint32(8) | clamp
    c[::7] ^= np.uint32(5)
    value, inside = run_lanes(
        f"shfl.sync.{mode}.b32 %o0|%q1, %i0, %i1, %i2, -1;", [a, b, c], [np.uint32, bool]
    )
    for block in range(blocks):
        at = slice(32 * block, 32 * block + 32)
        for lane in range(32):
            source, is_inside = shuffle(mode, lane, int(b[at][lane]), int(c[at][lane]))
            assert value[at][lane] == a[at][source]
            assert bool(inside[at][lane]) == is_inside


def test_shuffle_within_the_lanes_of_a_membermask() -> None:
    a = np.arange(100, 132, dtype=np.uint32)
    # Even and odd lanes arrive together but name different masks.
    body = """
    and.b32 %t0, %lane, 1; setp.eq.u32 %p0, %t0, 0;
    selp.b32 %t1, 0x55555555, 0xAAAAAAAA, %p0;
    shfl.sync.bfly.b32 %o0, %i0, 2, 31, %t1;
    """
    (result,) = run_lanes(body, [a], [np.uint32])
    np.testing.assert_array_equal(result, a[LANES ^ 2])


def test_shuffle_in_a_branch_leaves_the_other_lanes_alone() -> None:
    a = np.arange(100, 132, dtype=np.uint32)
    poison = np.full(32, 0xABCDEF01, np.uint32)
    body = """
    setp.lt.u32 %p0, %lane, 16;
    @!%p0 bra skip;
    shfl.sync.down.b32 %o0, %i0, 1, 31, 0xFFFF;
    skip:
    """
    (result,) = run_lanes(body, [a], [np.uint32], before=[poison])
    np.testing.assert_array_equal(result[:15], a[1:16])
    np.testing.assert_array_equal(result[16:], poison[16:])


def test_reading_a_lane_outside_the_membermask_is_reported() -> None:
    body = """
    .reg .b32 %t<4>; .reg .pred %p<2>;
    mov.u32 %t0, %laneid; setp.lt.u32 %p0, %t0, 16;
    @!%p0 bra skip;
    shfl.sync.idx.b32 %t1, %t0, 20, 31, 0xFFFF;
    skip:
    """
    report = launch(body)
    assert "undefined-shuffle" in [finding.kind for finding in report.findings]


def test_votes_count_only_the_members() -> None:
    a = np.arange(64, dtype=np.uint32)
    is_low = a % 32 < 16
    body = """
    setp.lt.u32 %p0, %lane, 16; selp.b32 %t0, 0x0000FFFF, 0xFFFF0000, %p0;
    setp.ne.u32 %p1, %i0, 3;
    vote.sync.ballot.b32 %o0, %p1, %t0;
    vote.sync.all.pred %q1, %p1, %t0;
    vote.sync.any.pred %q2, !%p1, %t0;
    vote.sync.uni.pred %q3, %p1, %t0;
    vote.sync.ballot.b32 %o4, %p0, -1;
    vote.sync.all.pred %q5, %p0, -1;
    vote.sync.any.pred %q6, %p0, -1;
    vote.sync.uni.pred %q7, %p0, -1;
    """
    kinds: list[Any] = [np.uint32, bool, bool, bool, np.uint32, bool, bool, bool]
    ballot, every, some, same, whole, *rest = run_lanes(body, [a], kinds)
    holds_three = is_low & (a < 32)
    expected = np.where(is_low, 0xFFFF, 0xFFFF0000) & np.where(holds_three, ~8, ~0)
    np.testing.assert_array_equal(ballot, expected.astype(np.uint32))
    np.testing.assert_array_equal(every.astype(bool), ~holds_three)
    np.testing.assert_array_equal(some.astype(bool), holds_three)
    np.testing.assert_array_equal(same.astype(bool), ~holds_three)
    np.testing.assert_array_equal(whole, 0xFFFF)
    assert [bool(each.all()) for each in rest] == [False, True, False]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_matches_find_equal_values(dtype: type) -> None:
    rng = np.random.default_rng(2)
    high = np.iinfo(dtype).max // 3
    a = (rng.integers(0, 4, 256) * high).astype(dtype)
    a[32:64] = high
    bits = 8 * np.dtype(dtype).itemsize
    body = f"""
    setp.lt.u32 %p0, %lane, 16; selp.b32 %t0, 0x0000FFFF, 0xFFFF0000, %p0;
    match.any.sync.b{bits} %o0, %i0, -1;
    match.any.sync.b{bits} %o1, %i0, %t0;
    match.all.sync.b{bits} %o2|%q3, %i0, %t0;
    """
    whole, halves, shared, agree = run_lanes(body, [a], [np.uint32, np.uint32, np.uint32, bool])
    for at in range(256):
        warp, lane = at // 32 * 32, at % 32
        same = sum(1 << i for i in range(32) if a[warp + i] == a[at])
        mask = 0xFFFF if lane < 16 else 0xFFFF0000
        members = [warp + i for i in range(32) if mask >> i & 1]
        is_equal = len(set(a[members].tolist())) == 1
        assert whole[at] == same
        assert halves[at] == same & mask
        assert shared[at] == (mask if is_equal else 0)
        assert bool(agree[at]) == is_equal


REDUCTIONS: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "add.u32": (np.uint32, lambda v: v.sum(dtype=np.uint32)),
    "add.s32": (np.int32, lambda v: v.sum(dtype=np.int32)),
    "min.u32": (np.uint32, np.min),
    "max.u32": (np.uint32, np.max),
    "min.s32": (np.int32, np.min),
    "max.s32": (np.int32, np.max),
    "and.b32": (np.uint32, np.bitwise_and.reduce),
    "or.b32": (np.uint32, np.bitwise_or.reduce),
    "xor.b32": (np.uint32, np.bitwise_xor.reduce),
}


@pytest.mark.parametrize("name", list(REDUCTIONS))
def test_integer_reductions(name: str) -> None:
    dtype, function = REDUCTIONS[name]
    a = np.random.default_rng(3).integers(0, 1 << 32, 128, np.uint32)
    if name.startswith("and"):
        a |= np.uint32(0xF0F0F0F0)
    body = f"""
    setp.lt.u32 %p0, %lane, 9; selp.b32 %t0, 0x000001FF, 0xFFFFFE00, %p0;
    redux.sync.{name} %o0, %i0, -1; redux.sync.{name} %o1, %i0, %t0;
    """
    whole, parts = run_lanes(body, [a], [np.uint32, np.uint32])
    values = a.view(dtype)
    for at in range(0, 128, 32):
        for got, first, last in ((whole, 0, 32), (parts, 0, 9), (parts, 9, 32)):
            expected = np.array([function(values[at + first : at + last])], dtype).view(np.uint32)
            assert (got[at + first : at + last] == expected).all()


@pytest.mark.parametrize("stem", ["min", "max"])
@pytest.mark.parametrize("words", ["", ".abs", ".NaN", ".abs.NaN"])
def test_f32_reductions_order_zeros_and_treat_nan_as_named(stem: str, words: str) -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=160).astype(np.float32)
    values[32:64] = np.where(LANES % 2, 0.0, -0.0)
    values[70] = np.nan
    values[96:128] = np.nan
    values[130], values[140] = np.inf, -np.inf
    (result,) = run_lanes(f"redux.sync.{stem}{words}.f32 %o0, %i0, -1;", [values], [np.uint32])

    def order(code: int) -> int:
        return -(code & 0x7FFFFFFF) - 1 if code >> 31 else code

    for at in range(0, 160, 32):
        codes = values[at : at + 32].view(np.uint32).tolist()
        codes = [code & 0x7FFFFFFF for code in codes] if "abs" in words else codes
        numbers = [code for code in codes if code & 0x7FFFFFFF <= 0x7F800000]
        if not numbers or ("NaN" in words and len(numbers) < 32):
            expected = 0x7FFFFFFF
        else:
            expected = (max if stem == "max" else min)(numbers, key=order)
        assert (result[at : at + 32] == expected).all()


def test_activemask_names_the_lanes_that_run() -> None:
    a = np.arange(32, dtype=np.uint32)
    body = """
    activemask.b32 %o0;
    setp.lt.u32 %p0, %lane, 5;
    @!%p0 bra skip;
    activemask.b32 %o0;
    skip:
    """
    (result,) = run_lanes(body, [a], [np.uint32])
    np.testing.assert_array_equal(result, np.where(LANES < 5, 0x1F, 0xFFFFFFFF))
