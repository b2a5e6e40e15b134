"""A barrier that expects more bytes than copies bring hangs, and the report says how many."""

import numpy as np
import pytest

from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.run_ptx import launch

# Each CTA of a cluster of four waits for EXPECTED bytes; a multicast brings 4 x 8,192 to each.
BODY = """
    .shared .align 1024 .b8 stage[32768];
    .shared .align 8 .b64 full;
    .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .b16 %mask;
    mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0; @%p0 bra READY;
    mbarrier.init.shared.b64 [full], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [full], EXPECTED;
    READY: barrier.cluster.arrive; barrier.cluster.wait;
    @%p0 bra WAIT;
    mov.u32 %r1, %cluster_ctarank; shl.b32 %r2, %r1, 13;
    ld.param.u64 %rd0, [p0]; cvt.u64.u32 %rd1, %r2; add.u64 %rd2, %rd0, %rd1;
    mov.u32 %r3, stage; add.u32 %r3, %r3, %r2; mov.u32 %r4, full; mov.b16 %mask, 15;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r3], [%rd2], 8192, [%r4], %mask;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [full], 0; @!%p1 bra WAIT;
    barrier.cluster.arrive; barrier.cluster.wait;
"""


def run_cluster(expected: int) -> None:
    data = np.arange(32768, dtype=np.uint8)
    body = BODY.replace("EXPECTED", str(expected))
    launch(body, [data], grid=(4, 1, 1), block=(64, 1, 1), cluster=(4, 1, 1))


def test_as_many_bytes_as_come_is_no_hang() -> None:
    run_cluster(32768)


def test_twice_the_bytes_that_come_is_a_deadlock_that_names_them() -> None:
    with pytest.raises(Deadlock) as caught:
        run_cluster(65536)
    text = str(caught.value)
    assert "missing bytes 32768" in text
    assert "pending arrivals 0/1" in text
    assert "rank 3" in text


def test_a_whole_warp_arriving_at_a_barrier_for_one_is_over_arrival() -> None:
    body = """
        .shared .align 8 .b64 full; .reg .pred %p; .reg .b32 %r;
        mov.u32 %r, %tid.x; setp.eq.u32 %p, %r, 0;
        @%p mbarrier.init.shared.b64 [full], 1;
        bar.sync 0;
        mbarrier.arrive.shared.b64 _, [full];
    """
    with pytest.raises(KernelFault, match="over-arrival"):
        launch(body)
