"""Clusters: memory of the other CTAs, barriers, arrivals and atomics from afar; registers moved."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison

SIZE = 4

SHARED_MEMORY = """
.shared .align 16 .b8 words[512];
mov.u32 %r1, words; mov.u32 %r2, %cluster_ctarank; mad.lo.u32 %r3, %thread, 4, %r1;
mad.lo.u32 %r4, %r2, 1000, %thread; st.shared.u32 [%r3], %r4;
mad.wide.u32 %d9, %index, 4, %out;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
add.u32 %r5, %r2, 1; and.b32 %r5, %r5, 3;
mapa.shared::cluster.u32 %r6, %r3, %r5; ld.shared::cluster.u32 %r7, [%r6];
st.global.u32 [%d9], %r7;
getctarank.shared::cluster.u32 %r7, %r6; st.global.u32 [%d9+512], %r7;
cvt.u64.u32 %d1, %r3; cvta.shared.u64 %d2, %d1; mapa.u64 %d3, %d2, %r5; ld.u32 %r7, [%d3];
st.global.u32 [%d9+1024], %r7;
getctarank.u64 %r7, %d3; st.global.u32 [%d9+1536], %r7;
xor.b32 %r8, %r2, 2; mapa.shared::cluster.u32 %r10, %r3, %r8; mad.lo.u32 %r11, %r2, 7, 100000;
add.u32 %r11, %r11, %thread; st.shared::cluster.u32 [%r10+256], %r11;
st.shared::cluster.v2.u16 [%r10+128], {1, 2};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared.u32 %r7, [%r3+256]; st.global.u32 [%d9+2048], %r7;
ld.shared.u32 %r7, [%r3+128]; st.global.u32 [%d9+2560], %r7;
isspacep.shared::cluster %p1, %d3; selp.u32 %r7, 1, 0, %p1; st.global.u32 [%d9+3072], %r7;
isspacep.shared::cta %p1, %d3; selp.u32 %r7, 1, 0, %p1; st.global.u32 [%d9+3584], %r7;
barrier.cluster.arrive; barrier.cluster.wait;
"""

# Every CTA arrives on the barrier of its right neighbour, with bytes that it then sends.
REMOTE_ARRIVE = """
.shared .align 8 .b64 bar; .shared .align 16 .b8 box[512];
mov.u32 %r1, bar; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, box;
setp.eq.u32 %p1, %thread, 0; @!%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r1], 33; fence.mbarrier_init.release.cluster;
READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
add.u32 %r4, %r2, 1; and.b32 %r4, %r4, 3;
mapa.shared::cluster.u32 %r5, %r1, %r4; mapa.shared::cluster.u32 %r6, %r3, %r4;
@!%p1 bra SEND;
mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%r5], 640;
SEND:
mad.lo.u32 %r7, %thread, 8, %r6; mad.lo.u32 %r8, %r2, 100, %thread;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r7], {%r8, %r2}, [%r5];
mad.lo.u32 %r9, %thread, 4, %r6; add.u32 %r9, %r9, 256;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9], %r8, [%r5];
mad.lo.u32 %r9, %thread, 8, %r6;
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5], 1;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
mad.lo.u32 %r7, %thread, 8, %r3; ld.shared.v2.u32 {%r10, %r11}, [%r7];
mad.lo.u32 %r7, %thread, 4, %r3; ld.shared.u32 %r12, [%r7+256];
mad.wide.u32 %d1, %index, 4, %out; st.global.u32 [%d1], %r10; st.global.u32 [%d1+512], %r11;
st.global.u32 [%d1+1024], %r12;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
REMOTE_ARRIVE = REMOTE_ARRIVE.replace("_, [%r5], 640", "_, [%r5], 384")

REMOTE_ATOMICS = """
.shared .align 8 .b8 words[64];
mov.u32 %r1, words; mov.u32 %r2, %cluster_ctarank; setp.lt.u32 %p1, %thread, 16;
mad.lo.u32 %r3, %thread, 4, %r1; @%p1 st.shared.u32 [%r3], 0;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mov.u32 %r9, 0;
NEXT:
mapa.shared::cluster.u32 %r4, %r1, %r9; mad.lo.u32 %r5, %index, 3, 1;
atom.shared::cluster.add.u32 %r6, [%r4], %r5;
red.shared::cluster.max.u32 [%r4+4], %r5;
red.shared::cluster.xor.b32 [%r4+8], %r5;
atom.relaxed.cluster.shared::cluster.inc.u32 %r6, [%r4+12], 100;
cvt.u64.u32 %d1, %r4; cvta.shared.u64 %d1, %d1;
red.add.u64 [%d1+16], 5;
add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 4; @%p2 bra NEXT;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
mad.wide.u32 %d2, %index, 4, %out; mov.u32 %r7, 0; setp.lt.u32 %p1, %thread, 6;
@%p1 ld.shared.u32 %r7, [%r3]; st.global.u32 [%d2], %r7;
"""

# Only some warps arrive early; every thread of the cluster must arrive before anyone goes on.
BARRIER = """
.shared .align 4 .u32 word;
mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p1, %thread, 0;
mov.u32 %r2, word; mul.lo.u32 %r3, %r1, 11; mov.u32 %r9, 0; mad.wide.u32 %d1, %index, 4, %out;
ROUND:
add.u32 %r4, %r3, %r9; @%p1 st.shared.u32 [%r2], %r4;
barrier.cluster.arrive.release;
mul.lo.u32 %r5, %r1, 1000; nanosleep.u32 %r5;
barrier.cluster.wait.acquire;
xor.b32 %r6, %r1, 3; mapa.shared::cluster.u32 %r7, %r2, %r6; ld.shared::cluster.u32 %r8, [%r7];
st.global.u32 [%d1], %r8; add.s64 %d1, %d1, 1024;
barrier.cluster.arrive.relaxed; barrier.cluster.wait;
add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 3; @%p2 bra ROUND;
"""

SETMAXNREG = """
shr.u32 %r1, %thread, 7; setp.eq.u32 %p1, %r1, 0; mad.wide.u32 %d1, %thread, 4, %out;
@%p1 bra PRODUCER;
setmaxnreg.inc.sync.aligned.u32 232;
mad.lo.u32 %r2, %thread, 3, 1; bra DONE;
PRODUCER:
setmaxnreg.dec.sync.aligned.u32 40;
mad.lo.u32 %r2, %thread, 5, 2;
DONE:
st.global.u32 [%d1], %r2;
"""


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the cluster programs."""
    cluster = {"ctas": SIZE, "cluster": (SIZE, 1, 1)}
    return (
        make_program(
            "cluster_shared_memory",
            SHARED_MEMORY,
            outputs=[Buffer("out", poison((8, 128), np.uint32))],
            **cluster,
        ),
        make_program(
            "cluster_remote_arrive",
            REMOTE_ARRIVE,
            outputs=[Buffer("out", poison((3, 128), np.uint32))],
            **cluster,
        ),
        make_program(
            "cluster_remote_atomics",
            REMOTE_ATOMICS,
            outputs=[Buffer("out", poison(128, np.uint32))],
            **cluster,
        ),
        make_program(
            "cluster_barrier",
            BARRIER,
            threads=64,
            outputs=[Buffer("out", poison((3, 256), np.uint32))],
            **cluster,
        ),
        make_program(
            "cluster_setmaxnreg",
            SETMAXNREG,
            threads=384,
            directives=".reqntid 384, 1, 1 .maxnreg 168",
            outputs=[Buffer("out", poison(384, np.uint32))],
        ),
    )
