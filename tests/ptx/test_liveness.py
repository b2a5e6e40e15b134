"""Which registers instructions touch, and where a value is still wanted."""

import pytest
from hypothesis import given, settings

from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.liveness import Liveness, find_liveness, iterate_bits, live_ranges
from halfbyte.ptx.register_effects import find_effects
from tests.ptx.random_flow import draw_body, make_flow


@pytest.mark.parametrize(
    ("text", "reads", "writes", "is_killing"),
    [
        ("add.s32 %r1, %r2, 5;", {"%r2"}, {"%r1"}, True),
        ("add.s32 %r1, %r1, %tid.x;", {"%r1"}, {"%r1"}, True),
        ("@%p1 add.s32 %r1, %r2, %r3;", {"%r2", "%r3", "%p1"}, {"%r1"}, False),
        ("@!%p1 bra L; L:", {"%p1"}, set(), False),
        ("st.global.b32 [%rd1+4], %r1;", {"%rd1", "%r1"}, set(), True),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd1];", {"%rd1"}, {"%r1", "%r2"}, True),
        ("setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;", {"%r1", "%r2", "%p3"}, {"%p1", "%p2"}, True),
        ("mov.b64 {%r1, _}, %rd1;", {"%rd1"}, {"%r1"}, True),
        ("call.uni (%r1), f, (%r2, 5);", {"%r2"}, {"%r1"}, True),
        ("call.uni f, (%r2);", {"%r2"}, set(), True),
        ("unheard.of %r1, %r2, [%r3];", {"%r1", "%r2", "%r3"}, {"%r1", "%r2"}, False),
    ],
)
def test_effects_follow_the_form(
    text: str, reads: set[str], writes: set[str], is_killing: bool
) -> None:
    effects = find_effects(make_flow(text).instructions[0])
    assert (set(effects.reads), set(effects.writes)) == (reads, writes)
    assert effects.is_killing == is_killing


def list_names(liveness: Liveness, registers: int) -> set[str]:
    return set(liveness.list_names(registers))


def test_a_value_lives_from_its_write_to_its_last_read() -> None:
    flow = make_flow("mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, %r2; mov.b32 %r1, %r3;")
    liveness = find_liveness(flow)
    behind = [list_names(liveness, live) for live in liveness.list_live_after(0)]
    assert behind == [{"%r1"}, {"%r1", "%r2"}, {"%r3"}, set()]
    assert live_ranges(liveness) == {"%r1": range(4), "%r2": range(1, 3), "%r3": range(2, 4)}


def test_a_guarded_write_keeps_the_old_value_alive() -> None:
    flow = make_flow("@%p1 mov.b32 %r1, 1; add.s32 %r2, %r1, 1;")
    liveness = find_liveness(flow)
    assert list_names(liveness, liveness.live_in[0]) == {"%p1", "%r1"}


def test_a_value_that_a_loop_reads_again_lives_through_it() -> None:
    text = """
    mov.b32 %r1, 1; mov.b32 %r2, 2;
    L: add.s32 %r3, %r1, 1; add.s32 %r2, %r2, %r3; setp.lt.s32 %p1, %r2, 9; @%p1 bra L;
    mov.b32 %r4, %r2;"""
    liveness = find_liveness(make_flow(text))
    assert list_names(liveness, liveness.live_in[1]) == {"%r1", "%r2"}
    assert list_names(liveness, liveness.live_out[1]) == {"%r1", "%r2"}
    ranges = live_ranges(liveness)
    assert ranges["%r1"] == range(6)
    assert ranges["%r3"] == range(2, 4)


def list_following(flow: ControlFlow, index: int) -> list[int]:
    """Return the instructions that may come behind one."""
    blocks = flow.list_blocks()
    block = blocks[index]
    if index != flow.last_instruction(block):
        return [index + 1]
    return [flow.starts[b] for b in flow.successors[block] if b != flow.exit]


def is_wanted(flow: ControlFlow, liveness: Liveness, index: int, bit: int) -> bool:
    """Whether some path from before `index` reads the register before it is overwritten."""
    seen = set()
    stack = [index]
    while stack:
        here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        if liveness.reads[here] >> bit & 1:
            return True
        if not liveness.kills[here] >> bit & 1:
            stack.extend(list_following(flow, here))
    return False


@given(draw_body(max_blocks=6))
@settings(max_examples=80, deadline=None)
def test_liveness_is_what_following_all_paths_finds(body: str) -> None:
    flow = make_flow(body)
    liveness = find_liveness(flow)
    ranges = live_ranges(liveness)
    for block in range(flow.num_blocks):
        behind = liveness.list_live_after(block)
        for bit, name in enumerate(liveness.names):
            start = flow.starts[block]
            assert bool(liveness.live_in[block] >> bit & 1) == is_wanted(flow, liveness, start, bit)
            for index, live in zip(flow.block_range(block), behind, strict=True):
                wanted = any(
                    is_wanted(flow, liveness, following, bit)
                    for following in list_following(flow, index)
                )
                assert bool(live >> bit & 1) == wanted
                if wanted or liveness.reads[index] >> bit & 1:
                    assert index in ranges[name]


def test_bits_are_listed_in_order() -> None:
    assert list(iterate_bits(0b1_0010_0001 << 1000)) == [1000, 1005, 1008]
    assert list(iterate_bits(0)) == []
