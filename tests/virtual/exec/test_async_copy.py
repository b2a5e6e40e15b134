"""cp.async: bytes land later, groups wait for them, sizes zero-fill, mbarriers are signalled."""

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import KernelFault
from tests.virtual.run_ptx import launch

RNG = np.random.default_rng(5)
POISON = 0xAB
HEAD = """
.reg .b32 %r<32>; .reg .b64 %d<32>; .reg .pred %p<4>;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
mov.u32 %r1, buffer; mad.lo.u32 %r2, %r0, 16, %r1; mad.wide.u32 %d2, %r0, 16, %d0;
mad.wide.u32 %d3, %r0, 16, %d1;
"""
BUFFER = ".shared .align 128 .b8 buffer[4096]; .shared .align 8 .b64 bar;"
SAVE = "ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2];" \
    "st.global.v4.u32 [%d3], {%r10, %r11, %r12, %r13};"  # fmt: skip


def make_arrays(nbytes=512):
    source, target = make_aligned_bytes(nbytes), make_aligned_bytes(nbytes)
    source[:] = RNG.integers(0, 256, nbytes, dtype=np.uint8)
    target[:] = 0xEE
    return source, target


def run(body, **kwargs):
    source, target = make_arrays()
    report = launch(HEAD + body + SAVE, [source, target], head=BUFFER, **kwargs)
    return source, target, report


@pytest.mark.parametrize(
    "wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"]
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bytes_are_there_after_the_wait(wait, seed):
    options = LaunchOptions(latency_seed=seed)
    source, target, report = run(
        f"cp.async.cg.shared.global [%r2], [%d2], 16; {wait}", options=options
    )
    assert (target == source).all()
    assert report.findings == ()


def test_bytes_are_not_there_before_the_wait_and_reading_them_is_reported():
    _, target, report = run("cp.async.ca.shared.global [%r2], [%d2], 16;")
    assert (target == POISON).all()
    assert [finding.kind for finding in report.findings] == [
        "read-in-flight",
        "exit-with-load-in-flight",
    ]
    assert "ld.shared" in report.findings[0].place.text


def test_writing_over_bytes_in_flight_is_reported():
    _, _, report = run("cp.async.cg.shared.global [%r2], [%d2], 16; st.shared.u32 [%r2], %r0;"
                       "cp.async.wait_all;")  # fmt: skip
    assert [finding.kind for finding in report.findings] == ["write-in-flight"]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_the_source_size_zero_fills_the_rest(size):
    source, target, _ = run(
        f"rem.u32 %r3, %r0, {size + 1};"
        f"cp.async.ca.shared.global [%r2], [%d2], {size}, %r3; cp.async.wait_all;"
    )
    rows, copied = source.reshape(32, 16), target.reshape(32, 16)
    for lane in range(32):
        kept = lane % (size + 1)
        assert (copied[lane, :kept] == rows[lane, :kept]).all()
        assert (copied[lane, kept:size] == 0).all()
        assert (copied[lane, size:] == POISON).all()


def test_an_ignored_source_may_be_anywhere():
    source, target, _ = run(
        "setp.gt.u32 %p0, %r0, 15; mov.u64 %d5, 64; selp.b64 %d2, %d5, %d2, %p0;"
        "cp.async.cg.shared.global [%r2], [%d2], 16, %p0; cp.async.wait_all;"
    )
    assert (target[:256] == source[:256]).all()
    assert (target[256:] == 0).all()


def test_waiting_for_all_but_one_group_leaves_the_newest_in_flight():
    source, target, report = run(
        """
        setp.lt.u32 %p0, %r0, 16; mov.u32 %r5, 0;
        @%p0 cp.async.cg.shared.global [%r2], [%d2], 16; cp.async.commit_group;
        L: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 80; @%p1 bra L;
        @!%p0 cp.async.cg.shared.global [%r2], [%d2], 16; cp.async.commit_group;
        cp.async.wait_group 1;
        """
    )
    assert (target[:256] == source[:256]).all()
    assert (target[256:] == POISON).all()
    assert report.findings[0].kind == "read-in-flight"


def test_an_empty_group_counts_as_a_group():
    _, target, _ = run(
        "cp.async.cg.shared.global [%r2], [%d2], 16; cp.async.commit_group;"
        "cp.async.commit_group; cp.async.wait_group 2;"
    )
    assert (target == POISON).all()


@pytest.mark.parametrize("noinc", ["", ".noinc"])
def test_an_mbarrier_waits_for_the_copies_of_its_arrivals(noinc):
    count = 32 if noinc else 1
    last = "" if noinc else "@%p0 mbarrier.arrive.shared.b64 %d6, [bar];"
    source, target, report = run(
        f"""
        setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;
        cp.async.cg.shared.global [%r2], [%d2], 16;
        cp.async.mbarrier.arrive{noinc}.shared.b64 [bar]; {last}
        W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra W;
        """
    )
    assert (target == source).all()
    assert report.findings == ()


def test_copies_that_are_never_waited_for_still_land():
    source, target = make_arrays()
    launch(
        HEAD + "cp.async.cg.shared.global [%r2], [%d2], 16; mov.u32 %r5, 0;"
        "L: add.u32 %r5, %r5, 1; setp.lt.u32 %p0, %r5, 2000; @%p0 bra L;" + SAVE,
        [source, target],
        head=BUFFER,
    )
    assert (target == source).all()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("cp.async.cg.shared.global [%r2], [%d2+4], 16;", "misaligned", "16 bytes"),
        ("cp.async.cg.shared.global [%r2+8], [%d2], 16;", "misaligned", "16 bytes"),
        ("cp.async.cg.shared.global [%r2], [%d2+67108864], 16;", "out-of-bounds", "outside every"),
        ("cp.async.ca.shared.global [%r2], [%d2], 16, 17;", "bad-size", "17"),
        ("cp.async.ca.shared.global [%r2+65536], [%d2], 16;", "out-of-bounds", "ends at"),
    ],
)
def test_faults_say_what_is_wanted(body, kind, words):
    with pytest.raises(KernelFault) as caught:
        run(body)
    fault = caught.value.report.fault
    assert fault.kind == kind
    assert words in fault.message
