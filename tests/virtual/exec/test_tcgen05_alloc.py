"""Allocation of tensor memory, commit, and what is reported about misuse."""

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from tests.virtual.exec.tensor_machine import TensorProgram
from tests.virtual.exec.tensor_products import Case, make_operands, place_operands, plain_descriptor
from tests.virtual.run_ptx import launch

HEAD = ".shared .align 16 .b32 slots[64]; .shared .align 8 .b64 bars[4];"
PROLOGUE = """.reg .b32 %r<32>, %thread, %warp, %slots, %bars; .reg .b64 %a<4>;
.reg .pred %p<8>, %again;
mov.u32 %thread, %tid.x; shr.u32 %warp, %thread, 5; mov.u32 %slots, slots; mov.u32 %bars, bars;
setp.eq.u32 %p0, %warp, 0; setp.eq.u32 %p1, %thread, 0;
"""
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32"
PERMIT = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


def _run(body, arrays=(), **options):
    return launch(PROLOGUE + body, arrays, head=HEAD, **{"block": (64, 1, 1), **options})


def _kinds(report):
    return [finding.kind for finding in report.findings]


def test_allocations_do_not_overlap_and_begin_at_multiples_of_32():
    out = np.full(4, 0xEEEEEEEE, np.uint32)
    lines = ["@!%p0 bra done;"]
    for i, columns in enumerate((256, 128, 64, 32)):
        lines.append(f"add.u32 %r0, %slots, {4 * i}; {ALLOC} [%r0], {columns};")
        lines.append(f"ld.shared.b32 %r{1 + i}, [%r0];")
    for i, columns in enumerate((256, 128, 64, 32)):
        lines.append(f"{DEALLOC} %r{1 + i}, {columns};")
    lines.append(f"{PERMIT} ld.param.u64 %a0, [p0];")
    lines.append("@%p1 st.global.v4.b32 [%a0], {%r1, %r2, %r3, %r4}; done:")
    report = _run("\n".join(lines), [out])
    assert not report.findings
    taken = [set(range(first, first + n)) for first, n in zip(out, (256, 128, 64, 32), strict=True)]
    assert sum(map(len, taken)) == len(set.union(*taken))
    assert all(first % 32 == 0 for first in out)


def test_an_allocation_waits_for_columns():
    # Warp 1 asks while warp 0 holds everything; it goes on when warp 0 frees them.
    out = np.zeros(2, np.uint32)
    body = f"""
    @!%p0 bra second;
    {ALLOC} [%slots], 512; bar.sync 0; nanosleep.u32 2000; ld.shared.b32 %r1, [%slots];
    ld.param.u64 %a0, [p0]; mov.b32 %r2, 7; @%p1 st.global.b32 [%a0], %r2;
    {DEALLOC} %r1, 512; bra done;
    second: bar.sync 0; add.u32 %r0, %slots, 4; {ALLOC} [%r0], 512;
    ld.param.u64 %a0, [p0]; ld.volatile.global.b32 %r3, [%a0];
    setp.eq.u32 %p2, %thread, 32; @%p2 st.global.b32 [%a0+4], %r3;
    ld.shared.b32 %r1, [%r0]; {DEALLOC} %r1, 512;
    done:"""
    report = _run(body, [out])
    assert not report.findings
    assert out.tolist() == [7, 7]


def test_an_allocation_that_can_never_be_met_hangs_with_a_report():
    body = f"@!%p0 bra done; {ALLOC} [%slots], 512; {ALLOC} [%slots], 32; done:"
    with pytest.raises(HalfbyteError, match="columns"):
        _run(body)


def test_a_pair_allocates_together():
    out = np.full(2, 0xEEEEEEEE, np.uint32)
    pair = ALLOC.replace("group::1", "group::2")
    body = f"""
    @!%p0 bra done; mov.u32 %r5, %cluster_ctarank;
    {pair} [%slots], 128; ld.shared.b32 %r1, [%slots];
    ld.param.u64 %a0, [p0]; mad.wide.u32 %a1, %r5, 4, %a0; @%p1 st.global.b32 [%a1], %r1;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, 128;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; done:"""
    report = _run(body, [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    assert not report.findings
    assert out.tolist() == [0, 0]


def test_half_of_a_pair_waits_for_its_peer():
    pair = ALLOC.replace("group::1", "group::2")
    body = f"""mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p2, %r5, 0; and.pred %p2, %p2, %p0;
    @!%p2 bra done; {pair} [%slots], 128; done:"""
    with pytest.raises(HalfbyteError, match=r"[dD]eadlock"):
        _run(body, grid=(2, 1, 1), cluster=(2, 1, 1))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (f"{ALLOC} [%slots], 48;", "nCols is 48"),
        (f"{ALLOC} [%slots], 16;", "nCols is 16"),
        (f"{PERMIT} {ALLOC} [%slots], 32;", "relinquish_alloc_permit"),
        (f"{DEALLOC} 0, 32;", "no live allocation begins"),
        (f"{ALLOC} [%slots], 64; {DEALLOC} 0, 32;", "the allocation at column 0 has 64"),
        (f"{ALLOC} [%slots], 64; {DEALLOC} 0, 64; {DEALLOC} 0, 64;", "freed twice"),
        (f"{ALLOC} [%slots], 64; {DEALLOC} 32, 32;", "no live allocation begins"),
        (ALLOC.replace("group::1", "group::2") + " [%slots], 32;", "needs a CTA pair"),
    ],
)  # fmt: skip
def test_misuse_is_a_fault(lines, message):
    with pytest.raises(HalfbyteError, match=message):
        _run(f"@!%p0 bra done; {lines} done:")


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (f"{ALLOC} [%slots], 32;", "tensor-memory-not-freed"),
        (f"{ALLOC} [%slots], 32; {ALLOC} [%slots], 64; {DEALLOC} 0, 32; {DEALLOC} 32, 64;",
         "tensor-memory-growing-allocation"),
    ],
)  # fmt: skip
def test_misuse_is_a_finding(lines, kind):
    assert kind in _kinds(_run(f"@!%p0 bra done; {lines} done:"))


def test_a_gpu_without_tensor_memory_says_so():
    with pytest.raises(HalfbyteError, match="no tensor memory"):
        _run(f"@!%p0 bra done; {ALLOC} [%slots], 32; done:", gpu="h200")


def _product(**fields):
    case = Case("f16", "f16", "f16", columns=256, **fields)
    program = TensorProgram(columns=256)
    a_codes, _, b_codes, _ = make_operands(case, np.random.default_rng(0))
    a_text, b_text = place_operands(program, case, a_codes, b_codes, 256)
    operands = f"[0], {a_text}, {b_text}, {plain_descriptor(case):#x}, %no;"
    issue = f"tcgen05.mma.cta_group::1.kind::f16 {operands}"
    program.lines.append(issue)
    return program, issue


def test_loading_columns_that_a_product_still_writes_is_reported():
    program, _ = _product()
    again = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r41]; tcgen05.wait::ld.sync.aligned;"
    program.warp_lines = [
        "shl.b32 %r41, %warp, 21; setp.eq.u32 %p6, %thread, 0; @!%p6 bra loads;",
        *(line for line in program.lines),
        "loads: bar.warp.sync 0xFFFFFFFF;",
        again,
        "nanosleep.u32 10000;",
    ]
    program.lines = [line for line in program.lines if not line.startswith("tcgen05")]
    _, report = program.run()
    assert "tensor-memory-race" in _kinds(report)


@pytest.mark.parametrize(
    ("transfer", "is_reported"),
    [
        ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {%r40};", True),
        (
            "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r41], {%r40}; tcgen05.wait::st.sync.aligned;",
            False,
        ),
        # Registers that a load still fills are known to the hardware: no wait is needed.
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r40}, [%r41];", False),
    ],
)
def test_a_product_over_stores_that_were_not_waited_for_is_reported(transfer, is_reported):
    program, _ = _product()
    program.warp_lines = [
        f"shl.b32 %r41, %warp, 21; {transfer} bar.sync 0;",
        "setp.eq.u32 %p6, %thread, 0; @!%p6 bra over;",
        *program.lines,
        "over: nanosleep.u32 10000; bar.sync 0; tcgen05.wait::st.sync.aligned;",
    ]
    program.lines = []
    _, report = program.run()
    messages = [f.message for f in report.findings if f.kind == "tensor-memory-unwaited-store"]
    assert any("without tcgen05.wait::st" in message for message in messages) == is_reported


def test_overwriting_an_operand_in_flight_is_reported():
    program, _ = _product()
    program.lines.append("st.shared.b32 [%buf], %thread;")
    _, report = program.run()
    assert any("0x400" in f.message or "reads" in f.message for f in report.findings)


def test_many_lanes_that_issue_are_reported():
    program, _ = _product()
    program.warp_lines = ["setp.lt.u32 %p6, %thread, 2; @!%p6 bra over;", *program.lines, "over:"]
    program.warp_lines.append("nanosleep.u32 10000;")
    program.lines = []
    _, report = program.run()
    assert "tcgen05-many-issuers" in _kinds(report)


def test_commit_arrives_once_in_every_cta_of_the_mask():
    out = np.zeros(2, np.uint32)
    body = """mov.u32 %r5, %cluster_ctarank; @%p1 mbarrier.init.shared::cta.b64 [%bars], 1;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    setp.eq.u32 %p2, %r5, 0; and.pred %p2, %p2, %p1; mov.b32 %r6, 3; cvt.u16.u32 %h0, %r6;
    @%p2 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64
      [%bars], %h0;
    wait: mbarrier.try_wait.parity.shared::cta.b64 %again, [%bars], 0; @!%again bra wait;
    ld.param.u64 %a0, [p0]; mad.wide.u32 %a1, %r5, 4, %a0; @%p1 st.global.b32 [%a1], %r6;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""
    report = _run(".reg .b16 %h<2>;" + body, [out], grid=(2, 1, 1), cluster=(2, 1, 1))
    assert not report.findings
    assert out.tolist() == [3, 3]


def test_commit_by_generic_address():
    body = """@%p1 mbarrier.init.shared::cta.b64 [%bars], 1; bar.sync 0;
    cvt.u64.u32 %a0, %bars; cvta.shared.u64 %a0, %a0;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%a0];
    wait: mbarrier.try_wait.parity.shared::cta.b64 %again, [%bars], 0; @!%again bra wait;"""
    assert not _run(body).findings
