"""Named barriers, warp barriers and cluster barriers: who meets whom, and what misuse is told."""

import numpy as np
import pytest

from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.run_ptx import launch

HEAD = """
.shared .align 16 .b32 data[1024];
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<10>;
mov.u32 %r0, %tid.x;
shr.u32 %r9, %r0, 5;
and.b32 %r8, %r0, 31;
mov.u32 %r1, 0;
mov.u32 %r7, data;
mad.lo.u32 %r7, %r0, 4, %r7;
"""
STORE_R1 = """
ld.param.u64 %rd18, [p0]; mad.wide.u32 %rd19, %r0, 4, %rd18; st.global.u32 [%rd19], %r1;
"""


def run(body, threads=64, **kwargs):
    out = np.full(threads, 0xEEEEEEEE, np.uint32)
    launch(HEAD + body + STORE_R1, [out], block=(threads, 1, 1), **kwargs)
    return out


def find_fault(body, threads=64):
    with pytest.raises(KernelFault) as caught:
        run(body, threads)
    return caught.value.report.fault


def find_deadlock(body, threads=64):
    with pytest.raises(Deadlock) as caught:
        run(body, threads)
    return caught.value


@pytest.mark.parametrize(
    "barrier", ["bar.sync 0", "barrier.sync 3", "barrier.cta.sync.aligned 1, 96"]
)
def test_a_barrier_orders_stores_before_loads(barrier):
    body = f"""
    st.shared.u32 [%r7], %r0;
    {barrier};
    xor.b32 %r2, %r0, 32; rem.u32 %r2, %r2, 96;
    mov.u32 %r3, data; mad.lo.u32 %r3, %r2, 4, %r3;
    ld.shared.u32 %r1, [%r3];
    """
    out = run(body, 96)
    assert np.array_equal(out, (np.arange(96) ^ 32) % 96)


def test_a_register_may_name_the_barrier_and_the_count():
    body = "mov.u32 %r2, 5; mov.u32 %r3, 64; bar.sync %r2, %r3; mov.u32 %r1, 1;"
    assert (run(body) == 1).all()


def test_subsets_of_warps_meet_at_their_own_barrier():
    body = """
    setp.lt.u32 %p1, %r9, 2;
    @%p1 bar.sync 1, 64;
    @!%p1 bar.sync 2, 64;
    mov.u32 %r1, 1;
    """
    assert (run(body, 128) == 1).all()


def test_arrive_does_not_wait_and_sync_waits_for_it():
    body = """
    setp.eq.u32 %p1, %r9, 0;
    @%p1 bra PRODUCER;
    bar.sync 1, 64;
    ld.shared.u32 %r1, [data];
    bra END;
    PRODUCER:
    mov.u32 %r2, 42; st.shared.u32 [data], %r2;
    bar.arrive 1, 64;
    END:
    """
    out = run(body)
    assert (out[:32] == 0).all()
    assert (out[32:] == 42).all()


@pytest.mark.parametrize("form", ["bar.red.{}", "barrier.cta.red.{}.aligned", "barrier.red.{}"])
@pytest.mark.parametrize("count", ["", " 64,"])
def test_reductions_see_every_thread(form, count):
    body = f"""
    setp.lt.u32 %p1, %r0, 40;
    {form.format("popc")}.u32 %r2, 0,{count} %p1;
    {form.format("and")}.pred %p2, 1,{count} %p1;
    {form.format("or")}.pred %p3, 2,{count} !%p1;
    setp.ge.u32 %p1, %r0, 0;
    {form.format("and")}.pred %p4, 1,{count} %p1;
    {form.format("or")}.pred %p5, 2,{count} !%p1;
    selp.u32 %r3, 1, 0, %p2; shl.b32 %r3, %r3, 8; add.u32 %r1, %r2, %r3;
    selp.u32 %r3, 1, 0, %p3; shl.b32 %r3, %r3, 9; add.u32 %r1, %r1, %r3;
    selp.u32 %r3, 1, 0, %p4; shl.b32 %r3, %r3, 10; add.u32 %r1, %r1, %r3;
    selp.u32 %r3, 1, 0, %p5; shl.b32 %r3, %r3, 11; add.u32 %r1, %r1, %r3;
    """
    assert (run(body) == 40 + (1 << 9) + (1 << 10)).all()


def test_lanes_of_one_warp_may_reach_an_unaligned_barrier_apart():
    body = """
    setp.lt.u32 %p1, %r8, 10;
    @%p1 bra FIRST;
    barrier.sync 0;
    mov.u32 %r1, 2;
    bra END;
    FIRST: barrier.sync 0;
    mov.u32 %r1, 1;
    END:
    """
    out = run(body)
    assert np.array_equal(out, np.where(np.arange(64) % 32 < 10, 1, 2))


def test_different_counts_fault_and_name_both():
    body = """
    setp.eq.u32 %p1, %r9, 2;
    @%p1 bra OTHER;
    bar.sync 2, 128;
    bra END;
    OTHER: bar.sync 2, 160;
    END:
    """
    fault = find_fault(body, 96)
    assert fault.kind == "barrier-count-mismatch"
    assert "160" in fault.message
    assert "128" in fault.message


def test_sync_and_reduction_on_one_active_barrier_fault():
    body = """
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra OTHER;
    bar.sync 2, 64;
    bra END;
    OTHER: bar.red.popc.u32 %r2, 2, 64, %p1;
    END:
    """
    assert find_fault(body).kind == "barrier-kind-mismatch"


@pytest.mark.parametrize(
    ("barrier", "kind"),
    [
        ("bar.sync 16", "barrier-number"),
        ("bar.sync 1, 48", "barrier-count"),
        ("bar.arrive 1, 0", "barrier-count"),
        ("bar.sync 1, 32", ""),
    ],
)
def test_numbers_and_counts_outside_the_isa_fault(barrier, kind):
    if kind:
        assert find_fault(barrier + ";").kind == kind
    else:  # each warp completes it alone
        assert (run(barrier + "; mov.u32 %r1, 1;") == 1).all()


def test_a_count_of_too_many_threads_hangs_and_the_report_has_both_numbers():
    error = find_deadlock("bar.sync 2, 96;")
    assert "waits on barrier 2: 64 of 96 threads arrived (warps 0-1)" in str(error)
    stop = error.report.hang.waits[0]
    assert (stop.facts["arrived"], stop.facts["expected"]) == (64, 96)
    assert stop.facts["arrived_warps"] == [0, 1]


def test_exited_warps_count_at_a_barrier_without_a_count_alone():
    body = """
    setp.eq.u32 %p1, %r9, 1;
    @%p1 exit;
    bar.sync 0{};
    mov.u32 %r1, 1;
    """
    assert (run(body.format(""), 96)[:32] == 1).all()
    error = find_deadlock(body.format(", 96"), 96)
    assert "64 of 96 threads arrived (warps 0, 2)" in str(error)


def test_lanes_that_exit_free_those_that_wait_for_them():
    body = """
    setp.lt.u32 %p1, %r8, 4;
    @%p1 bra LEAVE;
    barrier.sync 0;
    mov.u32 %r1, 1;
    bra END;
    LEAVE: nanosleep.u32 100;
    exit;
    END:
    """
    assert (run(body).reshape(2, 32)[:, 4:] == 1).all()


def test_a_partial_last_warp_counts_as_a_warp():
    assert (run("bar.sync 1, 64; mov.u32 %r1, 1;", 40) == 1).all()
    assert (run("barrier.sync 1, 64; mov.u32 %r1, 1;", 40) == 1).all()


def test_warp_barriers_meet_from_different_instructions():
    body = """
    setp.lt.u32 %p1, %r8, 16;
    @%p1 bra A;
    ld.volatile.shared.u32 %r2, [data];
    bar.warp.sync -1;
    ld.shared.u32 %r1, [data];
    bra END;
    A: mov.u32 %r2, 11; st.shared.u32 [data], %r2;
    bar.warp.sync 0xffffffff;
    END:
    """
    assert np.array_equal(run(body, 32), np.repeat([0, 11], 16))


def test_warp_barriers_of_different_groups_do_not_wait_for_each_other():
    body = """
    setp.lt.u32 %p1, %r8, 8;
    selp.b32 %r2, 0x000000ff, 0xffffff00, %p1;
    bar.warp.sync %r2;
    @!%p1 bra END;
    bar.warp.sync 0xff;
    END: mov.u32 %r1, 1;
    """
    assert (run(body, 32) == 1).all()


def test_a_lane_outside_its_membermask_faults():
    assert find_fault("bar.warp.sync 1;").kind == "not-a-member"


def test_a_warp_barrier_that_misses_lanes_is_reported():
    body = """
    setp.eq.u32 %p1, %r8, 3;
    @%p1 bra STUCK;
    bar.warp.sync -1;
    bra END;
    STUCK: barrier.sync 1, 1024;
    END:
    """
    text = str(find_deadlock(body, 32))
    assert "waits for lanes 0x00000008 of its warp" in text


CLUSTER = """
mov.u32 %r5, %cluster_ctarank;
mad.lo.u32 %r0, %r5, 64, %r0;
"""


def run_cluster(body, size=2):
    out = np.full(64 * size, 0xEEEEEEEE, np.uint32)
    shape = (size, 1, 1)
    launch(HEAD + CLUSTER + body + STORE_R1, [out], grid=shape, block=(64, 1, 1), cluster=shape)
    return out


def test_a_cluster_barrier_orders_remote_stores():
    body = """
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    xor.b32 %r6, %r5, 1;
    mapa.shared::cluster.u32 %r4, %r7, %r6;
    st.shared::cluster.u32 [%r4], %r0;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    ld.shared.u32 %r1, [%r7];
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    assert np.array_equal(run_cluster(body), np.arange(128) ^ 64)


def test_threads_that_exited_are_not_waited_for():
    body = """
    setp.eq.u32 %p1, %r5, 1;
    @%p1 exit;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r1, 1;
    """
    assert (run_cluster(body)[:64] == 1).all()


def test_lanes_of_a_warp_may_arrive_apart():
    body = """
    setp.lt.u32 %p1, %r8, 7;
    @%p1 bra A;
    barrier.cluster.arrive;
    bra B;
    A: barrier.cluster.arrive;
    B: barrier.cluster.wait;
    mov.u32 %r1, 1;
    """
    assert (run_cluster(body) == 1).all()


@pytest.mark.parametrize(
    "body",
    ["barrier.cluster.wait;", "barrier.cluster.arrive; barrier.cluster.arrive;"],
)
def test_arrive_and_wait_alternate(body):
    with pytest.raises(KernelFault) as caught:
        run_cluster(body)
    assert caught.value.report.fault.kind == "cluster-barrier-order"


def test_the_report_names_who_is_missing_at_a_cluster_barrier():
    body = """
    setp.eq.u32 %p1, %r5, 1;
    @%p1 bar.sync 3, 96;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    with pytest.raises(Deadlock) as caught:
        run_cluster(body)
    assert "waits on the cluster barrier: not arrived are warps 0-1 of rank 1" in str(caught.value)
