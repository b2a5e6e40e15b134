"""mbarriers: phases, counts, transaction bytes, states, and every misuse that can be known."""

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.run_ptx import launch

HEAD = """
.shared .align 8 .b64 bar[4];
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<10>;
mov.u32 %r0, %tid.x;
setp.eq.u32 %p0, %r0, 0;
"""
STORE_R1 = """
ld.param.u64 %rd18, [p0]; mad.wide.u32 %rd19, %r0, 4, %rd18; st.global.u32 [%rd19], %r1;
"""


def run(body, threads=32, **kwargs):
    """Return (report, %r1 of every thread) of `body` between the declarations and the store."""
    out = np.full(threads, 0xEEEEEEEE, np.uint32)
    report = launch(HEAD + body + STORE_R1, [out], block=(threads, 1, 1), **kwargs)
    return report, out


def find_fault(body, **kwargs):
    with pytest.raises(KernelFault) as caught:
        run(body, **kwargs)
    return caught.value.report.fault


def init(count, offset=0):
    return f"@%p0 mbarrier.init.shared.b64 [bar+{offset}], {count};\nbar.sync 0;\n"


def wait(parity, offset=0, label="W"):
    return (
        f"{label}: mbarrier.try_wait.parity.shared.b64 %p1, [bar+{offset}], {parity};\n"
        f"@!%p1 bra {label};\n"
    )


@pytest.mark.parametrize("threads", [32, 96, 50])
def test_every_lane_is_one_arrival(threads):
    body = init(threads) + "mbarrier.arrive.shared.b64 %rd0, [bar];\n" + wait(0) + "mov.u32 %r1, 7;"
    report, out = run(body, threads)
    assert (out == 7).all()
    assert report.findings == ()


def test_a_fresh_barrier_passes_parity_one_and_not_parity_zero():
    body = (
        init(1)
        + """
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 1;
    mbarrier.test_wait.parity.shared.b64 %p2, [bar], 0;
    selp.u32 %r1, 1, 0, %p1;
    @%p2 add.u32 %r1, %r1, 2;
    """
    )
    assert (run(body)[1] == 1).all()


def test_parity_alternates_over_phases():
    body = init(32)
    for phase in range(5):
        body += f"mbarrier.arrive.shared.b64 %rd0, [bar];\n{wait(phase & 1, label=f'W{phase}')}"
    assert run(body + "mov.u32 %r1, 5;")[1][0] == 5


def test_a_state_waits_for_its_own_phase():
    body = (
        init(2)
        + """
    mov.u32 %r1, 0;
    @!%p0 bra END;
    mbarrier.arrive.shared.b64 %rd0, [bar];
    mbarrier.test_wait.shared.b64 %p1, [bar], %rd0;
    @%p1 add.u32 %r1, %r1, 1;
    mbarrier.pending_count.b64 %r2, %rd0;
    mbarrier.arrive.shared.b64 %rd1, [bar];
    mbarrier.pending_count.b64 %r3, %rd1;
    mbarrier.try_wait.shared.b64 %p1, [bar], %rd0;
    @%p1 add.u32 %r1, %r1, 2;
    shl.b32 %r2, %r2, 4; add.u32 %r1, %r1, %r2;
    shl.b32 %r3, %r3, 8; add.u32 %r1, %r1, %r3;
    END:
    """
    )
    # complete only after the second arrival (2); pending before each arrival: 2 and 1.
    assert run(body)[1][0] == 2 + (2 << 4) + (1 << 8)


def test_the_state_of_another_barrier_faults():
    body = (
        init(2)
        + init(2, 8)
        + """
    mbarrier.arrive.shared.b64 %rd0, [bar];
    mbarrier.test_wait.shared.b64 %p1, [bar+8], %rd0;
    """
    )
    fault = find_fault("@!%p0 bra END;\n" + body.replace("bar.sync 0;", "") + "END:\n")
    assert fault.kind == "mbarrier-state-of-another"


def test_an_arrival_counts_as_often_as_its_operand_says():
    body = init(6) + "@%p0 mbarrier.arrive.shared.b64 %rd0, [bar], 6;\n" + wait(0)
    assert (run(body + "mov.u32 %r1, 3;")[1] == 3).all()


def test_arrive_drop_lowers_the_later_phases_only():
    body = (
        init(2)
        + """
    mov.u32 %r1, 0;
    @!%p0 bra END;
    mbarrier.arrive_drop.shared.b64 %rd0, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;
    @%p1 add.u32 %r1, %r1, 1;
    mbarrier.arrive.shared.b64 %rd0, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;
    @%p1 add.u32 %r1, %r1, 2;
    mbarrier.arrive.shared.b64 %rd0, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 1;
    @%p1 add.u32 %r1, %r1, 4;
    END:
    """
    )
    assert run(body)[1][0] == 2 + 4


@pytest.mark.parametrize("order", ["expect-first", "bytes-first"])
def test_a_phase_needs_its_arrivals_and_its_bytes(order):
    expect = "mbarrier.arrive.expect_tx.shared.b64 %rd0, [bar], 48;\n"
    parts = ["mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;\n"] * 3
    check = "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;\n@%p1 add.u32 %r1, %r1, 1;\n"
    steps = [expect, *parts] if order == "expect-first" else [*parts, expect]
    body = init(1) + "mov.u32 %r1, 0;\n@!%p0 bra END;\n"
    body += check.join(steps) + check + "END:\n"
    report, out = run(body)
    assert out[0] == 1  # true after the last step alone
    assert report.findings == ()


def test_expect_tx_alone_delays_the_phase_without_arriving():
    body = (
        init(1)
        + """
    mov.u32 %r1, 0;
    @!%p0 bra END;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 32;
    mbarrier.arrive.shared.b64 %rd0, [bar];
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;
    @%p1 add.u32 %r1, %r1, 1;
    mbarrier.complete_tx.shared::cta.b64 [bar], 32;
    mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;
    @%p1 add.u32 %r1, %r1, 2;
    END:
    """
    )
    assert run(body)[1][0] == 2


def test_over_arrival_names_barrier_counts_and_excess():
    # One arrival expected, 32 lanes arrive with a barrier that also waits for bytes.
    fault = find_fault(init(1) + "mbarrier.arrive.expect_tx.shared.b64 %rd0, [bar], 64;\n")
    assert fault.kind == "over-arrival"
    assert "pending arrivals 0/1" in fault.message
    assert "1 more arrival than the phase expects" in fault.message
    assert fault.place.text.startswith("mbarrier.arrive.expect_tx")


def test_no_complete_must_not_complete():
    fault = find_fault(init(1) + "@%p0 mbarrier.arrive.noComplete.shared.b64 %rd0, [bar], 1;\n")
    assert fault.kind == "no-complete-completes"


@pytest.mark.parametrize(
    "use",
    [
        "mbarrier.arrive.shared.b64 %rd0, [bar];",
        "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0;",
        "mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0;",
        "mbarrier.expect_tx.shared::cta.b64 [bar], 16;",
        "mbarrier.inval.shared.b64 [bar];",
    ],
)
def test_use_before_init_and_after_inval_faults(use):
    assert find_fault(use).kind == "mbarrier-not-initialised"
    body = init(32) + "@%p0 mbarrier.inval.shared.b64 [bar];\nbar.sync 0;\n" + use
    assert find_fault(body).kind == "mbarrier-invalidated"


def test_init_after_inval_is_fine_and_on_a_live_barrier_is_a_finding():
    again = init(32) + "mbarrier.arrive.shared.b64 %rd0, [bar];\n"
    report, _ = run(init(4) + "@%p0 mbarrier.inval.shared.b64 [bar];\n" + again)
    assert report.findings == ()
    report, _ = run(init(4) + again)
    assert [finding.kind for finding in report.findings] == ["mbarrier-reinitialised"]


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_counts_outside_the_isa_fault(count):
    assert find_fault(init(count)).kind == "mbarrier-count-range"


def test_more_bytes_than_the_isa_allows_fault():
    body = init(1) + "@%p0 mbarrier.expect_tx.shared::cta.b64 [bar], 1048575;\n"
    run(body + "@%p0 mbarrier.complete_tx.shared::cta.b64 [bar], 1048575;\n")
    fault = find_fault(body + "@%p0 mbarrier.expect_tx.shared::cta.b64 [bar], 1;\n")
    assert fault.kind == "mbarrier-bytes-range"


def test_a_misaligned_barrier_faults():
    assert find_fault("@%p0 mbarrier.init.shared.b64 [bar+4], 1;").kind == "misaligned"


def test_a_generic_address_names_the_same_barrier():
    body = (
        init(32)
        + """
    cvta.shared.u64 %rd1, %rd2;
    mbarrier.arrive.b64 %rd0, [%rd1+8];
    """
    )
    body = init(32, 8) + "mov.u64 %rd2, bar;" + body.split("bar.sync 0;\n")[1] + wait(0, 8)
    assert (run(body + "mov.u32 %r1, 9;")[1] == 9).all()


def test_a_generic_address_outside_shared_memory_faults():
    fault = find_fault("ld.param.u64 %rd1, [p0]; mbarrier.arrive.b64 %rd0, [%rd1];")
    assert fault.kind == "not-shared-memory"


def test_lanes_may_wait_on_different_barriers():
    # Lanes 0-15 wait on bar[0], 16-31 on bar[1]; warp 1 completes bar[1], then bar[0].
    body = (
        init(1)
        + init(1, 8)
        + """
    mov.u32 %r4, bar;
    setp.ge.u32 %p2, %r0, 32;
    @%p2 bra OTHER;
    shr.u32 %r2, %r0, 4;
    mad.lo.u32 %r4, %r2, 8, %r4;
    L: mbarrier.try_wait.parity.shared.b64 %p1, [%r4], 0;
    @!%p1 bra L;
    bra END;
    OTHER:
    setp.eq.u32 %p3, %r0, 32;
    @%p3 mbarrier.arrive.shared.b64 %rd0, [bar+8];
    @%p3 nanosleep.u32 1000;
    @%p3 mbarrier.arrive.shared.b64 %rd0, [bar];
    END: mov.u32 %r1, 4;
    """
    )
    assert (run(body, 64)[1] == 4).all()


def test_a_lane_may_wait_for_another_lane_of_its_warp():
    body = (
        init(1)
        + """
    setp.eq.u32 %p2, %r0, 5;
    @%p2 bra ARRIVE;
    L: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0;
    @!%p1 bra L;
    bra END;
    ARRIVE: mbarrier.arrive.shared.b64 %rd0, [bar];
    END: mov.u32 %r1, 6;
    """
    )
    assert (run(body)[1] == 6).all()
    assert (run(body, options=LaunchOptions(adversarial_try_wait=True))[1] == 6).all()


def test_lanes_whose_guard_is_false_do_not_wait():
    body = (
        init(1)
        + """
    @%p0 mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0;
    setp.eq.u32 %p2, %r0, 1;
    @%p2 mbarrier.arrive.shared.b64 %rd0, [bar];
    mov.u32 %r1, 8;
    """
    )
    assert (run(body)[1] == 8).all()


def remote(body, cluster=2):
    """Return %r1 per thread of a cluster; %r5 is the own rank, %r6 the mapped barrier of rank 0."""
    out = np.full(32 * cluster, 0xEEEEEEEE, np.uint32)
    head = (
        HEAD
        + init(32 * cluster)
        + """
    mov.u32 %r5, %cluster_ctarank;
    mov.u32 %r7, bar;
    mapa.shared::cluster.u32 %r6, %r7, 0;
    barrier.cluster.arrive; barrier.cluster.wait;
    mad.lo.u32 %r0, %r5, 32, %r0;
    """
    )
    size = (cluster, 1, 1)
    return launch(head + body + STORE_R1, [out], grid=size, cluster=size), out


def test_an_arrival_reaches_the_barrier_of_another_cta():
    body = """
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];
    mov.u32 %r1, 1;
    setp.ne.u32 %p2, %r5, 0;
    @%p2 bra END;
    """ + wait(0).replace("try_wait.parity", "try_wait.parity.acquire.cluster")
    assert (remote(body + "END:", 4)[1] == 1).all()


def test_waiting_on_the_barrier_of_another_cta_faults():
    with pytest.raises(KernelFault) as caught:
        remote("mbarrier.try_wait.parity.shared.b64 %p1, [%r6], 0;")
    assert caught.value.report.fault.kind == "remote-mbarrier"
    assert caught.value.report.fault.rank == 1


IGNORED = """
@!%p0 bra OTHER;
mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0;
selp.u32 %r1, 1, 0, %p1;
bra END;
OTHER: nanosleep.u32 100;
mbarrier.arrive.shared.b64 %rd0, [bar];
END:
"""


def test_a_suspending_try_wait_hides_that_nobody_loops_and_an_adversarial_one_shows_it():
    body = init(31) + IGNORED
    assert run(body)[1][0] == 1
    assert run(body, options=LaunchOptions(adversarial_try_wait=True))[1][0] == 0


def test_an_adversarial_try_wait_refuses_each_wait_once():
    # Ten phases, a loop that counts its tries; every wait fails once and then suspends.
    body = (
        init(32)
        + """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    PHASE:
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra JOIN;
    nanosleep.u32 500;
    JOIN: mbarrier.arrive.shared.b64 %rd0, [bar];
    and.b32 %r3, %r2, 1;
    W: add.u32 %r1, %r1, 1;
    mbarrier.try_wait.parity.shared.b64 %p1, [bar], %r3;
    @!%p1 bra W;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, 10;
    @%p2 bra PHASE;
    """
    )
    suspended = run(body)[1]
    refused = run(body, options=LaunchOptions(adversarial_try_wait=True))[1]
    assert (refused >= suspended).all()
    assert refused.max() <= 20


def test_missing_bytes_and_arrivals_are_reported():
    # expect_tx of 65536 bytes where 32768 come: the case of a cluster tile loaded by half.
    body = (
        init(1)
        + """
    @%p0 mbarrier.arrive.expect_tx.shared.b64 %rd0, [bar], 65536;
    @%p0 mbarrier.complete_tx.shared::cta.b64 [bar], 32768;
    """
        + wait(0)
    )
    with pytest.raises(Deadlock) as caught:
        run(body)
    stop = caught.value.report.hang.waits[0]
    assert stop.facts["pending_bytes"] == 32768
    assert (stop.facts["phases"], stop.facts["parity"]) == (0, 0)
    assert (stop.facts["pending"], stop.facts["expected"]) == (0, 1)
    assert "pending arrivals 0/1, missing bytes 32768" in str(caught.value)


def test_an_ordinary_store_over_a_live_barrier_is_a_finding():
    body = init(32) + "@%p0 st.shared.u32 [bar+4], %r0;\nbar.sync 0;\n"
    report, _ = run(body)
    assert "mbarrier-overwritten" in [finding.kind for finding in report.findings]
    report, _ = run(body.replace("[bar+4]", "[bar+8]"))
    assert report.findings == ()
