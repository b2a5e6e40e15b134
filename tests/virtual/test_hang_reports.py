"""Launches that never end: what the watchdog and the reports say."""

import json

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.report import Deadlock, KernelFault, Livelock
from tests.virtual.run_ptx import launch

HEAD = """
.shared .align 8 .b64 full; .shared .align 8 .b64 empty;
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .pred %p<10>;
mov.u32 %r0, %tid.x; shr.u32 %r9, %r0, 5;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [full], 1;
@%p0 mbarrier.init.shared.b64 [empty], 32;
bar.sync 0;
"""


def find_hang(kind, body, **kwargs):
    with pytest.raises(kind) as caught:
        launch(HEAD + body, **kwargs)
    return caught.value


CROSSED = """
setp.ge.u32 %p1, %r9, 1;
@%p1 bra CONSUMER;
E: mbarrier.try_wait.parity.shared.b64 %p2, [empty], 0, 10000000;
@!%p2 bra E;
@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd0, [full], 4096;
bra END;
CONSUMER:
F: mbarrier.try_wait.parity.shared.b64 %p2, [full], 0;
@!%p2 bra F;
mbarrier.arrive.shared.b64 %rd0, [empty];
END:
"""


def test_a_deadlock_lists_every_wait_with_its_barrier():
    # The producer should start at parity 1: both sides wait for the other's first phase.
    error = find_hang(Deadlock, CROSSED, block=(64, 1, 1))
    hang = error.report.hang
    assert hang.kind == "deadlock"
    found = {stop.warp: (stop.place.text, stop.facts) for stop in hang.waits}
    assert set(found) == {0, 1}
    assert found[0][0].endswith("[empty], 0, 10000000")
    assert found[1][0].endswith("[full], 0")
    for facts, expected in ((found[0][1], 32), (found[1][1], 1)):
        assert (facts["phases"], facts["parity"], facts["pending_bytes"]) == (0, 0, 0)
        assert (facts["pending"], facts["expected"]) == (expected, expected)
    assert found[0][1]["offset"] == found[1][1]["offset"] + 8


def test_a_deadlock_reads_as_a_sentence_per_wait():
    text = str(find_hang(Deadlock, CROSSED, block=(64, 1, 1)))
    line = next(line for line in text.splitlines() if "[full], 0" in line)
    assert line.strip().startswith("warp 1 (cta 0,0,0 rank 0) at PTX line ")
    assert (
        "`mbarrier.try_wait.parity.shared.b64 %p2, [full], 0` waits on mbarrier at shared+0x"
        in line
    )
    assert line.endswith("parity 0, 0 phases completed, pending arrivals 1/1, missing bytes 0")


def test_equal_waits_share_a_line():
    body = "W: mbarrier.try_wait.parity.shared.b64 %p2, [full], 0;\n@!%p2 bra W;\n"
    error = find_hang(Deadlock, body, block=(160, 1, 1), grid=(9, 1, 1))
    assert len(error.report.hang.waits) == 45
    lines = [line for line in str(error).splitlines() if "waits on" in line]
    assert len(lines) == 1
    assert lines[0].strip().startswith("warps 0-4 (cta 0,0,0 rank 0; cta 1,0,0 rank 0; ")
    assert "and 5 more)" in lines[0]


def test_source_lines_are_named_where_the_compiler_kept_them():
    body = ".loc 1 120 7\nW: mbarrier.try_wait.parity.shared.b64 %p2, [full], 0;\n@!%p2 bra W;\n"
    error = find_hang(Deadlock, body, head='.file 1 "/home/user/gemm.py"')
    assert "` (gemm.py:120) waits on" in str(error)
    assert error.report.hang.waits[0].place.source == "gemm.py:120"


def test_reports_survive_json():
    error = find_hang(Deadlock, CROSSED, block=(64, 1, 1))
    record = json.loads(json.dumps(error.report.to_json()))
    assert record["hang"]["kind"] == "deadlock"
    assert {wait["wait"] for wait in record["hang"]["waits"]} == {"mbarrier"}
    assert all(wait["line"] > 0 for wait in record["hang"]["waits"])


def test_a_time_limited_wait_that_gives_up_is_no_deadlock():
    # try_wait may return false: a program that tries five times and then goes on must go on.
    body = """
    mov.u32 %r1, 0;
    W: mbarrier.try_wait.parity.shared.b64 %p2, [full], 0, 1000;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p3, %r1, 5;
    @%p3 bra W;
    ld.param.u64 %rd1, [p0]; mad.wide.u32 %rd1, %r0, 4, %rd1; st.global.u32 [%rd1], %r1;
    """
    out = np.zeros(32, np.uint32)
    launch(HEAD + body, [out])
    assert (out == 5).all()


@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
@pytest.mark.parametrize("adversarial", [False, True])
def test_polling_forever_is_found(wait, adversarial):
    body = f"""
    W: mbarrier.{wait}.parity.shared.b64 %p2, [full], 0;
    add.u32 %r1, %r1, 1;
    @!%p2 bra W;
    """
    options = LaunchOptions(livelock_instructions=20_000, adversarial_try_wait=adversarial)
    kind = Livelock if wait == "test_wait" else Deadlock
    error = find_hang(kind, body, options=options)
    if kind is Livelock:
        assert [stop.warp for stop in error.report.hang.running] == [0]
        assert error.report.hang.waits == ()
        assert "runs" in str(error)


def test_a_spin_on_memory_is_a_livelock_that_names_runners_and_waiters():
    body = """
    setp.eq.u32 %p1, %r9, 1;
    @%p1 bar.sync 1, 96;
    ld.param.u64 %rd1, [p0];
    SPIN: ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra SPIN;
    """
    options = LaunchOptions(livelock_instructions=20_000)
    flag = np.zeros(1, np.uint32)
    error = find_hang(Livelock, body, arguments=[flag], block=(64, 1, 1), options=options)
    assert [stop.warp for stop in error.report.hang.running] == [0]
    assert [(stop.warp, stop.wait) for stop in error.report.hang.waits] == [(1, "named-barrier")]


def test_work_on_long_loops_is_no_livelock():
    body = """
    mov.u32 %r1, 0;
    ld.param.u64 %rd1, [p0];
    LOOP: add.u32 %r1, %r1, 1;
    and.b32 %r2, %r1, 1023;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 st.global.u32 [%rd1], %r1;
    setp.lt.u32 %p2, %r1, 20000;
    @%p2 bra LOOP;
    """
    out = np.zeros(1, np.uint32)
    launch(HEAD + body, [out], options=LaunchOptions(livelock_instructions=20_000))


def test_the_instruction_limit_ends_a_launch():
    body = "L: add.u32 %r1, %r1, 1;\nbra L;\n"
    error = find_hang(Livelock, body, options=LaunchOptions(max_instructions=5_000))
    assert error.report.hang.kind == "instruction-limit"


def test_a_fault_names_instruction_and_thread():
    body = "setp.eq.u32 %p1, %r0, 37;\n@%p1 mbarrier.arrive.shared.b64 %rd0, [full+64];\n"
    with pytest.raises(KernelFault) as caught:
        launch(HEAD + body, block=(64, 1, 1), grid=(3, 1, 1))
    fault = caught.value.report.fault
    assert (fault.warp, fault.lane) == (1, 5)
    assert fault.place.text == "@%p1 mbarrier.arrive.shared.b64 %rd0, [full+64]"
    assert "warp 1 lane 5" in str(caught.value)


def test_bytes_outstanding_at_exit_are_a_finding():
    report = launch(HEAD + "@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd0, [full], 256;\n")
    assert [finding.kind for finding in report.findings] == ["exit-with-pending-bytes"]
    assert "missing bytes 256" in report.findings[0].message


def test_a_wait_for_tensor_memory_says_what_is_allocated():
    body = """
    .shared .align 4 .b32 slot;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;
    """
    error = find_hang(Deadlock, body, block=(64, 1, 1))
    assert "waits for 512 columns of tensor memory; allocated are [0, 512)" in str(error)
    assert [stop.facts for stop in error.report.hang.waits] == [
        {"columns": 512, "owned": [[0, 512]]}
    ]


def test_work_in_flight_is_part_of_a_hang_report():
    # The copy is in flight while the other warp waits for ever; the launch is cut short.
    body = """
    .shared .align 128 .b8 buffer[1024];
    ld.param.u64 %rd1, [p0];
    @%p0 mbarrier.arrive.expect_tx.shared.b64 %rd0, [full], 1024;
    @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [buffer], [%rd1], 1024, [full];
    L: add.u32 %r1, %r1, 1;
    bra L;
    """
    data = np.zeros(256, np.uint32)
    options = LaunchOptions(max_instructions=60)
    error = find_hang(Livelock, body, arguments=[data], options=options)
    flight = error.report.hang.in_flight[0]
    assert (flight.resource, flight.last - flight.first) == ("shared-write", 1024)
    assert "in flight since cycle" in str(error)


EXITS = """
.shared .align 128 .b8 buffer[1024];
ld.param.u64 %rd1, [p0];
"""
STORE = """
@%p0 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [buffer], 1024;
cp.async.bulk.commit_group;
"""
LOAD = """
@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd0, [full], 1024;
@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [buffer], [%rd1], 1024, [full];
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [full], 0;\n@!%p2 bra W;\n"


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (STORE, ["exit-with-store-in-flight"]),
        (STORE + "cp.async.bulk.wait_group.read 0;\n", []),
        (LOAD, ["exit-with-load-in-flight", "exit-with-pending-bytes"]),
        (LOAD + WAIT, []),
    ],
    ids=["store", "store-waited", "load", "load-waited"],
)
def test_work_that_nobody_waited_for_is_found_when_the_cta_exits(body, kinds):
    report = launch(HEAD + EXITS + body, [np.zeros(256, np.uint32)])
    assert [finding.kind for finding in report.findings] == kinds
