"""Cluster launch control, elect.sync, fences and hints."""

import numpy as np
import pytest

from halfbyte.ptx.forms import mbarrier, scheduling_hints
from halfbyte.virtual.report import KernelFault
from tests.virtual.run_ptx import launch, run_lanes

HEAD = """
.shared .align 16 .b8 response[16]; .shared .align 8 .b64 bar;
.reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .b128 %q0; .reg .pred %p<10>;
mov.u32 %r0, %tid.x; mov.u32 %r5, %cluster_ctarank; mov.u32 %r1, %ctaid.x; mov.u32 %r6, %ctaid.y;
setp.eq.u32 %p0, %r0, 0;
mov.u32 %r9, 0;
ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
@%p0 mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
"""
# Counts the visits of each tile of a grid of 50 x 8 CTAs and how many CTAs were started.
LOOP = """
@%p0 atom.global.add.u32 %r2, [%rd2], 1;
TILE:
mad.lo.u32 %r2, %r6, 50, %r1;
mad.wide.u32 %rd3, %r2, 4, %rd1;
@%p0 red.global.add.u32 [%rd3], 1;
@%p0 mbarrier.arrive.expect_tx.shared.b64 %rd4, [bar], 16;
{request}
W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], %r9;
@!%p2 bra W;
xor.b32 %r9, %r9, 1;
ld.shared.v2.u64 {{%rd5, %rd6}}, [response];
mov.b128 %q0, {{%rd5, %rd6}};
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
{first}
barrier.cluster.arrive; barrier.cluster.wait;
@%p3 bra TILE;
"""
SINGLE = """
@%p0 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
    [response], [bar];
"""
MULTICAST = """
setp.eq.u32 %p4, %r5, 0;
and.pred %p4, %p4, %p0;
""" + SINGLE.replace("bytes.b128", "bytes.multicast::cluster::all.b128").replace("@%p0", "@%p4")
ONE_BY_ONE = """
clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %q0;
clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r6, %q0;
add.u32 %r1, %r1, %r5;
"""
VECTOR = """
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r6, %r10, _}, %q0;
add.u32 %r1, %r1, %r5;
"""


@pytest.mark.parametrize(
    ("request_text", "first", "cluster"),
    [(SINGLE, ONE_BY_ONE, 1), (SINGLE, VECTOR, 1), (MULTICAST, VECTOR, 2)],
    ids=["single-xyz", "single-v4", "multicast-v4"],
)
def test_running_clusters_take_over_every_cluster_that_has_not_started(
    request_text, first, cluster
):
    visits = np.zeros((8, 50), np.uint32)
    started = np.zeros(1, np.uint32)
    body = HEAD + LOOP.format(request=request_text, first=first)
    report = launch(
        body,
        [visits, started],
        grid=(50, 8, 1),
        cluster=(cluster, 1, 1),
        dynamic_shared=200_000,  # one CTA per SM: 148 of the 400 start at once
    )
    assert (visits == 1).all()
    assert started[0] < 400
    assert report.findings == ()


def test_a_response_must_be_aligned_to_its_16_bytes():
    text = SINGLE.replace("[response]", "[response+8]")
    with pytest.raises(KernelFault) as caught:
        launch(HEAD + text, [np.zeros(1, np.uint32)] * 2)
    assert caught.value.report.fault.kind == "misaligned"


def test_elect_sync_chooses_one_lane_of_the_members():
    body = """
    setp.lt.u32 %p0, %lane, 12;
    @%p0 bra LOW;
    elect.sync %o0|%q1, 0xfffff000;
    bra END;
    LOW: elect.sync %o0|%q1, 0xfff;
    END:
    """
    leader, chosen = run_lanes(body, outputs=[np.uint32, bool])
    assert np.array_equal(leader, np.where(np.arange(32) < 12, 0, 12))
    assert np.flatnonzero(chosen).tolist() == [0, 12]


def test_elect_sync_outside_the_members_faults():
    with pytest.raises(KernelFault) as caught:
        run_lanes("elect.sync %o0|%q1, 0xf;", outputs=[np.uint32, bool])
    assert caught.value.report.fault.kind == "not-a-member"


def test_nanosleep_advances_the_clock():
    def cycles(sleep):
        return launch(f"nanosleep.u32 {sleep};").cycles

    assert cycles(5000) - cycles(0) > 4000


def test_setmaxnreg_outside_the_isa_faults():
    launch("setmaxnreg.inc.sync.aligned.u32 232;\nsetmaxnreg.dec.sync.aligned.u32 24;")
    with pytest.raises(KernelFault) as caught:
        launch("setmaxnreg.inc.sync.aligned.u32 60;")
    assert caught.value.report.fault.kind == "register-count"


def test_discarded_lines_do_not_keep_their_values():
    backing = np.arange(128, dtype=np.uint32)
    start = -backing.ctypes.data % 128 // 4
    data = backing[start : start + 64]
    launch(".reg .b64 %rd0;\nld.param.u64 %rd0, [p0];\ndiscard.global.L2 [%rd0], 128;", [data])
    assert not np.array_equal(data[:32], np.arange(start, start + 32))
    assert np.array_equal(data[32:], np.arange(start + 32, start + 64))


def _write_operands(form):
    texts = {"[b64]": "[%rd0]", "imm": "128", "b32": "%r0", "b64": "%rd1", "=b64": "%rd2"}
    texts |= {"=b32|pred": "%r1|%p1"}
    if form.handler == "setmaxnreg":
        return "64"
    if form.handler == "elect.sync":
        return "%r1|%p1, -1"
    return ", ".join(texts[item.removeprefix("?")] for item in form.operands.split())


def test_every_fence_hint_and_policy_runs():
    lines = [f"{form.name} {_write_operands(form)};" for form in scheduling_hints.FORMS]
    declarations = ".reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>; mov.u32 %r0, 64;\n"
    backing = np.zeros(96, np.uint32)
    data = backing[-backing.ctypes.data % 128 // 4 :]
    body = declarations + "ld.param.u64 %rd0, [p0];\n" + "\n".join(lines)
    assert launch(body, [data]).findings == ()


def test_every_mbarrier_form_is_understood():
    # Forms that the machine cannot run in this order are skipped by their guard.
    texts = {"[b32]": "[bar]", "[b64]": "[%rd0]", "b32": "1", "b64": "%rd1", "=b64": "%rd2"}
    texts |= {"=b32": "%r1", "=pred": "%p1"}
    lines = [
        f"@!%p0 {form.name} {', '.join(texts[i.removeprefix('?')] for i in form.operands.split())};"
        for form in mbarrier.FORMS
    ]
    head = ".shared .align 8 .b64 bar;\n.reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .pred %p<4>;\n"
    launch(head + "setp.eq.u32 %p0, 0, 0;\n" + "\n".join(lines))
