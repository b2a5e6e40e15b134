"""Loops without an end are livelocks; loops that only take long are not."""

import pytest

from halfbyte.virtual import LaunchOptions
from halfbyte.virtual.report import Deadlock, KernelFault, Livelock
from tests.virtual.run_ptx import launch

OPTIONS = LaunchOptions(livelock_instructions=5_000)
HEAD = """
    .reg .b32 %r<6>; .reg .b64 %d<2>; .reg .pred %p<4>; .shared .align 8 .b64 bar; .shared .b32 s;
    mov.u32 %r0, %tid.x;
"""
COUNTED = "mov.u32 %r1, {}; L: sub.u32 %r1, %r1, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra L;"


@pytest.mark.parametrize(
    "loop",
    [
        "L: bra L;",
        "setp.lt.u32 %p0, %r0, 9; L: @%p0 bra L;",  # some lanes
        "T: .branchtargets L; mov.u32 %r1, 0; L: brx.idx %r1, T;",
        "L: bar.warp.sync 0xffffffff; bra L;",
        "L: shfl.sync.idx.b32 %r1|%p1, %r0, 0, 31, 0xffffffff; bra L;",
        "L: membar.gl; nanosleep.u32 20; bra L;",
        "L: cp.async.commit_group; bra L;",
        "L: ld.volatile.shared.u32 %r1, [s]; setp.ne.u32 %p0, %r1, 1; @%p0 bra L;",
        "L: xor.b32 %r1, %r1, 1; bra L;",
        "mbarrier.init.shared.b64 [bar], 64; "
        "L: mbarrier.test_wait.parity.shared.b64 %p0, [bar], 0; @!%p0 bra L;",
        # lanes that wait at a barrier for those that spin
        "setp.eq.u32 %p0, %r0, 0; @%p0 bra L; bar.sync 0;"
        "L: ld.volatile.shared.u32 %r1, [s]; bra L;",
    ],
)
@pytest.mark.parametrize("block", [1, 64])
def test_a_loop_that_changes_nothing_is_a_livelock(loop, block) -> None:
    with pytest.raises(Livelock, match="come back to states") as caught:
        launch(HEAD + loop, block=(block, 1, 1), options=OPTIONS)
    assert caught.value.report.instructions < 40 * 5_000


def test_a_loop_that_counts_for_ever_is_ended_by_the_second_limit() -> None:
    with pytest.raises(Livelock, match="no progress") as caught:
        launch(HEAD + "L: add.u32 %r1, %r1, 1; bra L;", options=OPTIONS)
    assert caught.value.report.instructions > 40 * 5_000


@pytest.mark.parametrize(
    "body",
    [
        COUNTED.format(50_000),
        # a lane that works long while the others of its warp spin
        "st.shared.u32 [s], 0; setp.ne.u32 %p0, %r0, 0; @%p0 bra W;"
        + COUNTED.format(20_000)
        + "st.shared.u32 [s], 5; exit;"
        "W: ld.volatile.shared.u32 %r2, [s]; setp.ne.u32 %p1, %r2, 5; @%p1 bra W;",
        # a wait for the clock
        "mov.u32 %r1, %clock; L: mov.u32 %r2, %clock; sub.u32 %r2, %r2, %r1;"
        "setp.lt.u32 %p0, %r2, 100000; @%p0 bra L;",
    ],
)
def test_a_long_loop_with_an_end_is_no_livelock(body) -> None:
    report = launch(HEAD + body, options=OPTIONS)
    assert report.instructions > 3 * 5_000


def test_many_warps_that_compute_long_before_they_store_are_no_livelock() -> None:
    report = launch(HEAD + COUNTED.format(100), grid=(64, 1, 1), block=(128, 1, 1), options=OPTIONS)
    assert report.instructions > 64 * 4 * 300


@pytest.mark.parametrize("wait", ["", "@!%p0 bra L;", "bra L;"])
def test_a_suspended_wait_that_nobody_answers_is_a_deadlock(wait) -> None:
    body = (
        "mbarrier.init.shared.b64 [bar], 64;"
        f"L: mbarrier.try_wait.parity.shared.b64 %p0, [bar], 0; {wait or '@!%p0 bra L;'}"
    )
    with pytest.raises(Deadlock, match="pending arrivals 64/64"):
        launch(HEAD + body, options=OPTIONS)


@pytest.mark.parametrize(
    "instruction",
    [
        "shfl.sync.idx.b32 %r1|%p1, %r0, 0, 31, 0xfffffffe;",
        "vote.sync.ballot.b32 %r1, 1, 0xfffffffe;",
        "match.any.sync.b32 %r1, %r0, 0xfffffffe;",
        "redux.sync.add.s32 %r1, %r0, 0xfffffffe;",
        "elect.sync %r1|%p1, 0xfffffffe;",
        "bar.warp.sync 0xfffffffe;",
    ],
)
def test_a_lane_that_its_own_membermask_leaves_out_is_a_fault(instruction) -> None:
    with pytest.raises(KernelFault, match=r"not-a-member.*lane 0"):
        launch(HEAD + instruction)
