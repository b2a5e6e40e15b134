"""Lanes of one warp that go different ways, meet again, wait for each other, or spin."""

import numpy as np
import pytest

from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.run_ptx import launch, run_lanes

LANES = np.arange(64, dtype=np.uint32)


def test_lanes_loop_as_often_as_each_wants() -> None:
    body = """
        mov.u32 %o0, 0;
        LOOP: setp.ge.u32 %p0, %o0, %i0; @%p0 bra DONE; add.u32 %o0, %o0, 1; bra LOOP;
        DONE:
    """
    (counted,) = run_lanes(body, [LANES * 7 % 13], ["u4"])
    np.testing.assert_array_equal(counted, LANES * 7 % 13)


def test_nested_branches_meet_again_for_a_shuffle() -> None:
    body = """
        and.b32 %t0, %lane, 3; setp.eq.u32 %p0, %t0, 0; @%p0 bra ZERO;
        setp.eq.u32 %p1, %t0, 1; @%p1 bra ONE;
        mov.u32 %t1, 200; bra MEET;
        ZERO: mov.u32 %t1, 0; bra MEET;
        ONE: mov.u32 %t1, 100;
        MEET: shfl.sync.bfly.b32 %o0, %t1, 1, 31, -1;
    """
    (met,) = run_lanes(body, [LANES], ["u4"])
    own = np.choose(LANES % 4, [0, 100, 200, 200])
    np.testing.assert_array_equal(met, own[LANES ^ 1])


def test_guarded_exit_leaves_the_other_lanes_running() -> None:
    result = np.full(32, 9, np.uint32)
    body = """
        .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<3>;
        mov.u32 %r0, %laneid; setp.lt.u32 %p0, %r0, 20; @%p0 exit;
        ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd1, %r0, 4, %rd0; st.global.u32 [%rd1], %r0;
    """
    launch(body, [result])
    np.testing.assert_array_equal(result, np.where(np.arange(32) < 20, 9, np.arange(32)))


def test_a_lock_between_lanes_of_one_warp_is_passed_on() -> None:
    """Each lane spins until it holds the lock: needs independent progress of the lanes."""
    counter = np.zeros(2, np.uint32)
    body = """
        .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
        ld.param.u64 %rd0, [p0];
        SPIN: atom.global.cas.b32 %r0, [%rd0], 0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra SPIN;
        ld.global.u32 %r1, [%rd0+4]; add.u32 %r1, %r1, 1; st.global.u32 [%rd0+4], %r1;
        st.global.u32 [%rd0], 0;
    """
    launch(body, [counter], block=(64, 1, 1))
    assert counter.tolist() == [0, 64]


def test_lanes_that_wait_for_a_flag_of_another_lane_see_it() -> None:
    flag = np.zeros(1, np.uint32)
    body = """
        .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r0, %laneid; setp.eq.u32 %p0, %r0, 31; @%p0 bra SET;
        WAIT: ld.relaxed.gpu.global.u32 %r1, [%rd0]; setp.eq.u32 %p1, %r1, 0; @%p1 bra WAIT;
        bra DONE;
        SET: st.relaxed.gpu.global.u32 [%rd0], 5;
        DONE:
    """
    launch(body, [flag])
    assert flag[0] == 5


def test_branch_table_sends_each_lane_to_its_own_target() -> None:
    body = """
        and.b32 %t0, %lane, 3;
        table: .branchtargets L0, L1, L2, L1;
        brx.idx %t0, table;
        L0: mov.u32 %o0, 10; bra END;
        L1: mov.u32 %o0, 11; bra END;
        L2: mov.u32 %o0, 12;
        END:
    """
    (taken,) = run_lanes(body, [LANES], ["u4"])
    np.testing.assert_array_equal(taken, np.array([10, 11, 12, 11])[LANES % 4])


def test_branch_index_outside_its_table_is_a_fault() -> None:
    body = "table: .branchtargets L0, L1; brx.idx %lane, table; L0: mov.u32 %o0, 1; L1:"
    with pytest.raises(KernelFault, match="index 2 into a table of 2"):
        run_lanes(body, [LANES], ["u4"])


def test_shuffle_that_waits_for_lanes_that_never_come_is_a_deadlock() -> None:
    body = """
        setp.lt.u32 %p0, %lane, 16; @%p0 bra LOW;
        shfl.sync.idx.b32 %o0, %lane, 0, 31, -1; bra END;
        LOW: shfl.sync.idx.b32 %o0, %lane, 1, 31, -1;
        END:
    """
    with pytest.raises(Deadlock, match=r"shfl\.sync"):
        run_lanes(body, [LANES], ["u4"])


def test_block_that_is_no_multiple_of_32_threads_runs_the_lanes_there_are() -> None:
    result = np.zeros(64, np.uint32)
    body = """
        .reg .pred %p<2>; .reg .b32 %r<3>; .reg .b64 %rd<3>;
        vote.sync.ballot.b32 %r1, 1, -1; mov.u32 %r0, %tid.x;
        ld.param.u64 %rd0, [p0]; mad.wide.u32 %rd1, %r0, 4, %rd0; st.global.u32 [%rd1], %r1;
        bar.sync 0;
    """
    body = body.replace("ballot.b32 %r1, 1,", "ballot.b32 %r1, %p1,")
    body = body.replace("vote.sync", "setp.eq.u32 %p1, 0, 0; vote.sync")
    launch(body, [result], block=(40, 1, 1))
    np.testing.assert_array_equal(result[:32], 0xFFFFFFFF)
    np.testing.assert_array_equal(result[32:40], 0xFF)
    assert not result[40:].any()


def test_trap_is_a_fault_that_names_its_line() -> None:
    with pytest.raises(KernelFault, match="trap") as caught:
        launch("trap;")
    assert "line" in str(caught.value)


def test_unknown_form_is_a_fault_only_where_it_is_reached() -> None:
    launch(".reg .pred %p; setp.ne.u32 %p, 0, 0; @%p bra X; bra Y; X: frobnicate.b32; Y:")
    with pytest.raises(KernelFault, match=r"frobnicate\.b32"):
        launch("frobnicate.b32;")
