"""What differs between the lanes of a warp, and what never does."""

import pytest
from hypothesis import given, settings

from halfbyte.ptx.control_flow import make_control_flow
from halfbyte.ptx.register_effects import EffectsOf, RegisterEffects, find_effects, list_registers
from halfbyte.ptx.special_registers import is_special_register
from halfbyte.ptx.syntax import Address, Instruction
from halfbyte.ptx.uniformity import Uniformity, find_uniformity
from tests.ptx.random_flow import draw_body, make_body
from tests.ptx.warp_simulation import WarpSimulation


def analyse(text: str, effects_of: EffectsOf = find_effects) -> Uniformity:
    body = make_body(text)
    return find_uniformity(body, make_control_flow(body), effects_of=effects_of)


def write_first_operand(instruction: Instruction) -> RegisterEffects:
    """Return effects for forms whose first operand is the destination, listed or not."""
    if not instruction.operands or isinstance(instruction.operands[0], Address):
        return find_effects(instruction)
    reads = [name for operand in instruction.operands[1:] for name in list_registers(operand)]
    if instruction.guard is not None:
        reads.append(instruction.guard.register.name)
    writes = tuple(list_registers(instruction.operands[0]))
    reads = [name for name in reads if not is_special_register(name)]
    return RegisterEffects(tuple(reads), writes, instruction.guard is None)


TID = "mov.u32 %r9, %tid.x; setp.lt.s32 %p9, %r9, 7;"
ONE = "mov.b32 %r1, 1;"


@pytest.mark.parametrize(
    ("text", "is_uniform"),
    [
        ("mov.u32 %r1, 5;", True),
        ("mov.u32 %r1, %tid.x;", False),
        ("mov.u32 %r1, %laneid;", False),
        ("mov.u32 %r1, %lanemask_lt;", False),
        ("mov.u32 %r1, %ctaid.y;", True),
        ("mov.u32 %r1, %warpid;", True),
        ("mov.u32 %r1, %r2;", False),
        ("mov.u32 %r2, 3; add.s32 %r1, %r2, %r2;", True),
        (TID + "add.s32 %r1, %r9, 1;", False),
        (TID + ONE + "@%p9 mov.b32 %r1, 2;", False),
        ("ld.param.b32 %r1, [k_param_0];", True),
        ("mov.b32 %r2, 64; ld.shared.b32 %r1, [%r2];", True),
        (TID + "ld.shared.b32 %r1, [%r9];", False),
        ("mov.b32 %r2, 64; ld.local.b32 %r1, [%r2];", False),
        (".local .b8 stack[8]; ld.local.b32 %r1, [stack];", False),
        (".local .b8 stack[8]; mov.b32 %r1, stack;", False),
        ("mov.b32 %r2, 64; atom.shared.add.u32 %r1, [%r2], 1;", False),
        (TID + "shfl.sync.idx.b32 %r1, %r9, 0, 31, -1;", True),
        (TID + "shfl.sync.idx.b32 %r1|%p1, %r9, 0, 31, -1;", True),
        (TID + "shfl.sync.idx.b32 %r1, %r9, %r9, 31, -1;", False),
        (TID + "shfl.sync.idx.b32 %r1, %r9, 0, 7199, -1;", False),
        (TID + "shfl.sync.bfly.b32 %r1, %r9, 1, 31, -1;", False),
        (TID + "vote.sync.ballot.b32 %r1, %p9, -1;", True),
        (TID + "vote.sync.ballot.b32 %r1, %p9, %r9;", False),
        (TID + "redux.sync.add.s32 %r1, %r9, -1;", True),
        (TID + "match.any.sync.b32 %r1, %r9, -1;", False),
        ("activemask.b32 %r1;", True),
        ("elect.sync %r1|%p1, -1;", False),
        ("mov.b32 %r2, 1; unheard.of %r1, %r2;", False),
    ],
)
def test_a_result_is_uniform_if_all_lanes_get_one_value(text: str, is_uniform: bool) -> None:
    result = analyse(text + " st.shared.b32 [%r1], %r1;", write_first_operand)
    assert result.is_uniform("%r1") == is_uniform


def test_a_predicate_of_a_wait_or_an_election_counts_as_divergent() -> None:
    text = (
        "mov.b32 %r2, 0; mbarrier.try_wait.parity.shared.b64 %p1, [%r2], %r2; elect.sync _|%p2, -1;"
    )
    assert analyse(text).divergent_registers >= {"%p1", "%p2"}


def test_a_value_chosen_by_a_divergent_branch_is_divergent_behind_it() -> None:
    text = TID + "@%p9 bra A; mov.b32 %r1, 1; bra B; A: mov.b32 %r1, 2; B: add.s32 %r2, %r1, 1;"
    result = analyse(text)
    assert result.divergent_branches == {2}
    assert result.divergent_registers >= {"%r1", "%r2"}


def test_a_value_chosen_by_a_uniform_branch_is_uniform() -> None:
    text = """mov.u32 %r9, %ctaid.x; setp.lt.s32 %p9, %r9, 7;
    @%p9 bra A; mov.b32 %r1, 1; bra B; A: mov.b32 %r1, 2; B: add.s32 %r2, %r1, 1;"""
    assert analyse(text) == Uniformity(frozenset(), frozenset())


def test_a_value_used_only_on_one_side_of_a_divergent_branch_stays_uniform() -> None:
    text = (
        TID + "@%p9 bra B; mov.b32 %r1, 1; add.s32 %r2, %r1, 1; st.shared.b32 [%r2], %r1; B: ret;"
    )
    result = analyse(text)
    assert result.is_uniform("%r1")
    assert result.is_uniform("%r2")
    assert result.divergent_branches == {2}


def test_lanes_that_return_early_do_not_make_the_rest_divergent() -> None:
    text = TID + "@%p9 ret; mov.b32 %r1, 1; add.s32 %r1, %r1, 1; st.shared.b32 [%r1], %r1;"
    assert analyse(text).is_uniform("%r1")


def test_a_counter_that_lanes_leave_a_loop_with_is_divergent() -> None:
    text = (
        TID
        + """mov.b32 %r1, 0;
    L: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, %r9; @%p1 bra L;
    st.shared.b32 [%r1], %r1;"""
    )
    result = analyse(text)
    assert not result.is_uniform("%r1")
    assert len(result.divergent_branches) == 1


def test_a_counter_of_a_uniform_loop_is_uniform() -> None:
    text = """mov.b32 %r1, 0;
    L: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 9; @%p1 bra L;
    st.shared.b32 [%r1], %r1;"""
    assert analyse(text) == Uniformity(frozenset(), frozenset())


def test_a_jump_by_a_divergent_index_is_divergent() -> None:
    text = TID + "t: .branchtargets A, B; brx.idx %r9, t; A: mov.b32 %r1, 1; B: ret;"
    assert analyse(text).divergent_branches == {2}


# What is read unwritten is divergent; here only %r5 and %p2 are, at first.
WRITES = (
    "".join(f"mov.b32 %r{n}, {n};" for n in range(1, 5))
    + "mov.b32 %r5, %tid.x; setp.lt.s32 %p1, %r1, %r2; setp.lt.s32 %p2, %r5, %r2;"
)


@given(draw_body(max_blocks=7))
@settings(max_examples=150, deadline=None)
def test_no_run_finds_a_difference_that_the_analysis_denies(body: str) -> None:
    flat = make_body(WRITES + body)
    flow = make_control_flow(flat)
    result = find_uniformity(flat, flow)
    simulation = WarpSimulation(flow)
    simulation.run()
    assert simulation.differing_registers <= result.divergent_registers
    assert simulation.differing_branches <= result.divergent_branches
