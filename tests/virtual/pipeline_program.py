"""A persistent, warp-specialised pipeline in PTX, small and complete, to break in tests.

A cluster of two CTAs multiplies streams elementwise: C[r, t, i] = sum over k of A[r, t, k, i] *
B[t, k, i] modulo 2**32, for CTA rank r, tile t, step k and 128 elements i. Warp 0 loads with bulk
copies (B: each CTA loads half and multicasts it), warp 1 multiplies and sends its sums to the
accumulator with an asynchronous copy, warps 2 and 3 store them. Barriers per stage: full (1
arrival, 1024 bytes), empty (an arrival from each CTA); for the accumulator: full (1 arrival, 512
bytes), empty (64 threads).
"""

import numpy as np

from halfbyte.virtual.device import Device, LaunchOptions

STAGES, STEPS, TILES, ELEMENTS = 3, 4, 3, 128

_SETUP = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry pipeline(.param .u64 a, .param .u64 b, .param .u64 c)
.reqntid 128, 1, 1
{
.shared .align 128 .b8 a_stages[1536];
.shared .align 128 .b8 b_stages[1536];
.shared .align 128 .b8 staging[512];
.shared .align 128 .b8 accumulator[512];
.shared .align 8 .b64 full[3];
.shared .align 8 .b64 empty[3];
.shared .align 8 .b64 acc_full;
.shared .align 8 .b64 acc_empty;
.reg .b32 %thread, %warp, %lane, %rank, %stage, %parity, %acc_parity, %tile, %k;
.reg .b32 %full, %empty, %t<12>, %sum<4>, %x<4>, %y<4>;
.reg .b64 %state, %a, %b, %c, %offset;
.reg .b16 %mask;
.reg .pred %is_first, %done, %more, %elected, %role;
mov.u32 %thread, %tid.x;
shr.u32 %warp, %thread, 5;
and.b32 %lane, %thread, 31;
mov.u32 %rank, %cluster_ctarank;
setp.eq.u32 %is_first, %thread, 0;
@!%is_first bra READY;
mov.u32 %t0, 0;
INIT:
mad.lo.u32 %full, %t0, 8, full;
mad.lo.u32 %empty, %t0, 8, empty;
mbarrier.init.shared.b64 [%full], 1;
mbarrier.init.shared.b64 [%empty], 2;
add.u32 %t0, %t0, 1;
setp.lt.u32 %more, %t0, 3;
@%more bra INIT;
mbarrier.init.shared.b64 [acc_full], 1;
mbarrier.init.shared.b64 [acc_empty], 64;
fence.mbarrier_init.release.cluster;
READY:
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %stage, 0;
mov.u32 %tile, 0;
setp.eq.u32 %role, %warp, 0;
@%role bra PRODUCER;
setp.eq.u32 %role, %warp, 1;
@%role bra MATH;
bra EPILOGUE;
"""

_PRODUCER = """
PRODUCER:
elect.sync %t0|%elected, -1;
@!%elected bra END;
ld.param.u64 %a, [a];
ld.param.u64 %b, [b];
mov.b16 %mask, 3;
mov.u32 %parity, 1; // producer starts at parity 1
LOAD_TILE:
mov.u32 %k, 0;
LOAD:
mad.lo.u32 %full, %stage, 8, full;
mad.lo.u32 %empty, %stage, 8, empty;
WAIT_EMPTY:
mbarrier.try_wait.parity.shared.b64 %done, [%empty], %parity, 10000000;
@!%done bra WAIT_EMPTY;
mbarrier.arrive.expect_tx.shared.b64 %state, [%full], 1024;
mad.lo.u32 %t1, %tile, 4, %k;            // step of this tile
mad.lo.u32 %t2, %rank, 12, %t1;          // rank x tiles x steps
mad.wide.u32 %offset, %t2, 512, %a;
mad.lo.u32 %t3, %stage, 512, a_stages;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%t3], [%offset], 512, [%full];
shl.b32 %t4, %rank, 8;                   // this CTA's half of B
mad.lo.u32 %t2, %t1, 512, %t4;
mad.wide.u32 %offset, %t2, 1, %b;
mad.lo.u32 %t3, %stage, 512, b_stages;
add.u32 %t3, %t3, %t4;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%t3], [%offset], 256, [%full], %mask;
add.u32 %stage, %stage, 1;
setp.eq.u32 %more, %stage, 3;
@%more xor.b32 %parity, %parity, 1;
@%more mov.u32 %stage, 0;
add.u32 %k, %k, 1;
setp.lt.u32 %more, %k, 4;
@%more bra LOAD;
add.u32 %tile, %tile, 1;
setp.lt.u32 %more, %tile, 3;
@%more bra LOAD_TILE;
bra END;
"""

_MATH = """
MATH:
bar.sync 2, 96;
mov.u32 %parity, 0; // math starts at parity 0
mov.u32 %acc_parity, 1; // math starts at accumulator parity 1
shl.b32 %t11, %lane, 4;
MATH_TILE:
mov.u32 %k, 0;
mov.u32 %sum0, 0; mov.u32 %sum1, 0; mov.u32 %sum2, 0; mov.u32 %sum3, 0;
MULTIPLY:
mad.lo.u32 %full, %stage, 8, full;
mad.lo.u32 %empty, %stage, 8, empty;
WAIT_FULL:
mbarrier.try_wait.parity.shared.b64 %done, [%full], %parity;
@!%done bra WAIT_FULL;
mad.lo.u32 %t1, %stage, 512, a_stages;
add.u32 %t1, %t1, %t11;
ld.shared.v4.u32 {%x0, %x1, %x2, %x3}, [%t1];
mad.lo.u32 %t2, %stage, 512, b_stages;
add.u32 %t2, %t2, %t11;
ld.shared.v4.u32 {%y0, %y1, %y2, %y3}, [%t2];
mad.lo.u32 %sum0, %x0, %y0, %sum0;
mad.lo.u32 %sum1, %x1, %y1, %sum1;
mad.lo.u32 %sum2, %x2, %y2, %sum2;
mad.lo.u32 %sum3, %x3, %y3, %sum3;
bar.warp.sync -1;
setp.lt.u32 %more, %lane, 2;             // lane r frees the stage for CTA r
mapa.shared::cluster.u32 %t3, %empty, %lane;
@%more mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%t3];
add.u32 %stage, %stage, 1;
setp.eq.u32 %more, %stage, 3;
@%more xor.b32 %parity, %parity, 1;
@%more mov.u32 %stage, 0;
add.u32 %k, %k, 1;
setp.lt.u32 %more, %k, 4;
@%more bra MULTIPLY;
WAIT_ACC_EMPTY:
mbarrier.try_wait.parity.shared.b64 %done, [acc_empty], %acc_parity;
@!%done bra WAIT_ACC_EMPTY;
add.u32 %t4, %t11, staging;
st.shared.v4.u32 [%t4], {%sum0, %sum1, %sum2, %sum3};
fence.proxy.async.shared::cta;
bar.warp.sync -1;
elect.sync %t0|%elected, -1;
mov.u32 %t5, accumulator;
mov.u32 %t6, staging;
mov.u32 %t7, acc_full;
@%elected mbarrier.arrive.expect_tx.shared.b64 %state, [%t7], 512;
@%elected cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
    [%t5], [%t6], 512, [%t7];
xor.b32 %acc_parity, %acc_parity, 1;
add.u32 %tile, %tile, 1;
setp.lt.u32 %more, %tile, 3;
@%more bra MATH_TILE;
bra END;
"""

_EPILOGUE = """
EPILOGUE:
bar.sync 2, 96;
mov.u32 %acc_parity, 0; // epilogue starts at parity 0
ld.param.u64 %c, [c];
and.b32 %t1, %thread, 63;
shl.b32 %t1, %t1, 3;
STORE_TILE:
mbarrier.try_wait.parity.shared.b64 %done, [acc_full], %acc_parity;
@!%done bra STORE_TILE;
add.u32 %t2, %t1, accumulator;
ld.shared.v2.u32 {%x0, %x1}, [%t2];
mbarrier.arrive.shared.b64 %state, [acc_empty];
mad.lo.u32 %t3, %rank, 3, %tile;
mad.lo.u32 %t3, %t3, 512, %t1;
mad.wide.u32 %offset, %t3, 1, %c;
st.global.v2.u32 [%offset], {%x0, %x1};
xor.b32 %acc_parity, %acc_parity, 1;
add.u32 %tile, %tile, 1;
setp.lt.u32 %more, %tile, 3;
@%more bra STORE_TILE;
END:
barrier.cluster.arrive;
barrier.cluster.wait;
ret;
}
"""

TEXT = _SETUP + _PRODUCER + _MATH + _EPILOGUE


def run_pipeline(text=TEXT, **options):
    """Return (report, wrong elements) of one launch with random data."""
    random = np.random.default_rng(5)
    a = random.integers(0, 2**32, (2, TILES, STEPS, ELEMENTS), np.uint32)
    b = random.integers(0, 2**32, (TILES, STEPS, ELEMENTS), np.uint32)
    c = np.full((2, TILES, ELEMENTS), 0xEEEEEEEE, np.uint32)
    device = Device("b200", LaunchOptions(**options))
    module = device.load(text)
    report = module.launch("pipeline", (2, 1, 1), (128, 1, 1), (2, 1, 1), 0, [a, b, c])
    expected = (a * b).sum(axis=2, dtype=np.uint32)
    return report, int((c != expected).sum())
