"""Divergence, barriers of CTA and warp, calls, branch tables, local memory."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random

LOOPS = """
mov.u32 %r1, %laneid; mov.u32 %r2, 0; mov.u32 %r3, 0;
OUTER:
setp.ge.u32 %p1, %r2, %r1; @%p1 bra OUTER_END;
mov.u32 %r4, 0;
INNER:
setp.gt.u32 %p2, %r4, %r2; @%p2 bra INNER_END;
mad.lo.u32 %r3, %r3, 33, %r4;
and.b32 %r5, %r3, 7; setp.eq.u32 %p3, %r5, 3; @%p3 bra INNER_END;
xor.b32 %r5, %r4, %r1; and.b32 %r5, %r5, 1; setp.eq.u32 %p4, %r5, 0;
@%p4 bra EVEN;
add.u32 %r3, %r3, 17;
bra JOIN;
EVEN:
xor.b32 %r3, %r3, 0x1234;
JOIN:
add.u32 %r4, %r4, 1; bra INNER;
INNER_END:
add.u32 %r2, %r2, 1; bra OUTER;
OUTER_END:
mad.wide.u32 %d1, %thread, 4, %out; st.global.u32 [%d1], %r3;
"""

SPIN_LOCK = """
mov.u32 %r1, lock; setp.eq.u32 %p1, %thread, 0; @%p1 st.shared.v2.u32 [%r1], {0, 0}; bar.sync 0;
mov.u32 %r9, 0;
AGAIN:
atom.shared.cas.b32 %r2, [%r1], 0, 1;
setp.ne.u32 %p2, %r2, 0; @%p2 bra AGAIN;
membar.cta;
ld.volatile.shared.u32 %r3, [%r1+4]; add.u32 %r3, %r3, %thread; add.u32 %r3, %r3, 1;
st.volatile.shared.u32 [%r1+4], %r3;
membar.cta;
atom.shared.exch.b32 %r4, [%r1], 0;
add.u32 %r9, %r9, 1; setp.lt.u32 %p3, %r9, 3; @%p3 bra AGAIN;
bar.sync 0;
ld.shared.u32 %r3, [%r1+4]; mad.wide.u32 %d1, %thread, 4, %out; st.global.u32 [%d1], %r3;
"""

# Lane 0 waits for what lane 31 of the same warp writes.
HANDSHAKE = """
mov.u32 %r1, flag; setp.eq.u32 %p1, %thread, 0; @%p1 st.shared.v2.u32 [%r1], {0, 0}; bar.sync 0;
setp.eq.u32 %p1, %thread, 31; @%p1 bra WRITER;
WAIT:
ld.volatile.shared.u32 %r2, [%r1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra WAIT;
bra DONE;
WRITER:
st.volatile.shared.u32 [%r1], 4711; mov.u32 %r2, 1;
DONE:
mad.wide.u32 %d1, %thread, 4, %out; st.global.u32 [%d1], %r2;
"""

EARLY_EXIT = """
mad.wide.u32 %d1, %thread, 4, %out;
and.b32 %r1, %thread, 7; setp.eq.u32 %p1, %r1, 5; @%p1 exit;
setp.ge.u32 %p2, %thread, 96; @%p2 ret;
mov.u32 %r2, words; mad.lo.u32 %r3, %thread, 4, %r2; st.shared.u32 [%r3], %thread;
bar.sync 0;
xor.b32 %r4, %thread, 32; setp.ge.u32 %p3, %r4, 96; @%p3 mov.u32 %r4, %thread;
mad.lo.u32 %r3, %r4, 4, %r2; ld.shared.u32 %r5, [%r3]; st.global.u32 [%d1], %r5;
"""

BAR_RED = """
mad.wide.u32 %d1, %thread, 4, %out;
and.b32 %r1, %thread, 3; setp.eq.u32 %p1, %r1, 0;
bar.red.popc.u32 %r2, 1, %p1; st.global.u32 [%d1], %r2;
bar.red.and.pred %p2, 2, %p1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%d1+512], %r2;
barrier.red.or.pred %p2, 3, !%p1; selp.u32 %r2, 1, 0, %p2; st.global.u32 [%d1+1024], %r2;
setp.ge.u32 %p3, %thread, 64; @%p3 bra REST;
bar.red.popc.u32 %r2, 4, 64, %p1; st.global.u32 [%d1+1536], %r2; bra END;
REST:
barrier.red.popc.u32 %r2, 5, 64, !%p1; st.global.u32 [%d1+1536], %r2;
END:
"""

# Warps 0-1 produce with bar.arrive, warps 2-3 consume with bar.sync, three rounds, two barriers.
NAMED_BARRIERS = """
mov.u32 %r1, words; setp.ge.u32 %p1, %thread, 64; mov.u32 %r9, 0; @%p1 bra CONSUMER;
PRODUCER:
mad.lo.u32 %r2, %thread, 4, %r1; mad.lo.u32 %r3, %r9, 1000, %thread; st.shared.u32 [%r2], %r3;
membar.cta;
bar.arrive 1, 128;
bar.sync 2, 128;
add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 3; @%p2 bra PRODUCER;
bra FINISH;
CONSUMER:
bar.sync 1, 128;
sub.u32 %r4, 127, %thread; mad.lo.u32 %r2, %r4, 4, %r1; ld.shared.u32 %r3, [%r2];
mad.lo.u32 %r5, %r9, 64, %thread; sub.u32 %r5, %r5, 64;
mad.wide.u32 %d1, %r5, 4, %out; st.global.u32 [%d1], %r3;
membar.cta;
bar.arrive 2, 128;
add.u32 %r9, %r9, 1; setp.lt.u32 %p2, %r9, 3; @%p2 bra CONSUMER;
FINISH:
barrier.cta.sync 0;
"""

BRANCH_TABLE = """
mad.wide.u32 %d1, %thread, 4, %out; mov.u32 %r3, 0;
and.b32 %r1, %thread, 3; mov.u32 %r9, 0;
TABLE: .branchtargets L0, L1, L2, L3;
LOOP:
brx.idx %r1, TABLE;
L0: add.u32 %r3, %r3, 1; bra NEXT;
L1: mad.lo.u32 %r3, %r3, 3, 7; bra NEXT;
L2: xor.b32 %r3, %r3, %thread;
L3: shl.b32 %r3, %r3, 1; add.u32 %r3, %r3, %thread;
NEXT:
mad.lo.u32 %r1, %r1, 5, 1; and.b32 %r1, %r1, 3;
add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 9; @%p1 bra LOOP;
st.global.u32 [%d1], %r3;
"""

CALL_MODULE = """
.func (.reg .u32 result) scale_add(.reg .u32 x, .reg .u32 y) {
 mad.lo.u32 result, x, 3, y; ret; }
.func (.param .b64 result) wide_sum(.param .align 8 .b8 block[16], .param .b32 extra) {
 .reg .b64 %a<4>; .reg .b32 %x; ld.param.b64 %a1, [block]; ld.param.b64 %a2, [block+8];
 ld.param.b32 %x, [extra]; add.s64 %a1, %a1, %a2; cvt.u64.u32 %a3, %x; add.s64 %a1, %a1, %a3;
 st.param.b64 [result], %a1; ret; }
"""

CALLS = """
mad.wide.u32 %d1, %thread, 4, %out; mad.wide.u32 %d2, %thread, 8, %wide;
call (%r1), scale_add, (%thread, 11); st.global.u32 [%d1], %r1;
{ .param .align 8 .b8 block[16]; .param .b32 extra; .param .b64 result;
 cvt.u64.u32 %d3, %thread; st.param.b64 [block], %d3; st.param.b64 [block+8], 0x100000000;
 st.param.b32 [extra], %r1; call (result), wide_sum, (block, extra); ld.param.b64 %d4, [result]; }
st.global.u64 [%d2], %d4;
"""

INDIRECT_MODULE = """
.func (.param .b32 result) twice(.param .b32 n) {
 .reg .b32 %x<2>; ld.param.b32 %x1, [n]; shl.b32 %x1, %x1, 1; st.param.b32 [result], %x1; ret; }
.func (.param .b32 result) plus_nine(.param .b32 n) {
 .reg .b32 %x<2>; ld.param.b32 %x1, [n]; add.u32 %x1, %x1, 9; st.param.b32 [result], %x1; ret; }
.func (.param .b32 result) fibonacci(.param .b32 n);
.func (.param .b32 result) fibonacci(.param .b32 n) {
 .reg .b32 %x<6>; .reg .pred %g; ld.param.b32 %x1, [n]; setp.lt.u32 %g, %x1, 2; @%g bra BASE;
 sub.u32 %x2, %x1, 1; { .param .b32 p; .param .b32 q; st.param.b32 [p], %x2;
 call.uni (q), fibonacci, (p); ld.param.b32 %x3, [q]; }
 sub.u32 %x2, %x1, 2; { .param .b32 p; .param .b32 q; st.param.b32 [p], %x2;
 call.uni (q), fibonacci, (p); ld.param.b32 %x4, [q]; }
 add.u32 %x1, %x3, %x4;
BASE: st.param.b32 [result], %x1; ret; }
"""

INDIRECT = """
mad.wide.u32 %d1, %thread, 4, %out; and.b32 %r2, %thread, 7;
{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r2; call (q), fibonacci, (p);
 ld.param.b32 %r3, [q]; }
st.global.u32 [%d1], %r3;
SHAPE: .callprototype (.param .b32 _) _ (.param .b32 _);
and.b32 %r2, %thread, 1; setp.eq.u32 %p1, %r2, 0;
mov.u64 %d5, twice; mov.u64 %d6, plus_nine; selp.b64 %d7, %d5, %d6, %p1;
{ .param .b32 p; .param .b32 q; st.param.b32 [p], %thread; call (q), %d7, (p), SHAPE;
 ld.param.b32 %r3, [q]; }
st.global.u32 [%d1+128], %r3;
"""

LOCAL_ARRAYS = """
.local .align 16 .b8 frame[128];
.local .align 4 .b32 single;
mov.u64 %d1, frame; mov.u32 %r9, 0;
FILL:
and.b32 %r1, %r9, 31; mad.wide.u32 %d2, %r1, 4, %d1; mad.lo.u32 %r2, %r9, 7, %thread;
st.local.u32 [%d2], %r2; add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 32; @%p1 bra FILL;
st.local.u32 [single], %thread;
mad.lo.u32 %r3, %thread, 5, 3; and.b32 %r3, %r3, 31; mad.wide.u32 %d2, %r3, 4, %d1;
ld.local.u32 %r4, [%d2]; cvta.local.u64 %d3, %d1; add.s64 %d3, %d3, 16;
ld.v4.u32 {%r5, %r6, %r7, %r8}, [%d3]; st.u16 [%d3+2], 0xabcd; ld.local.u32 %r10, [%d1+16];
ld.local.u32 %r11, [single]; ld.local.s8 %r12, [%d1+19];
mad.wide.u32 %d4, %thread, 4, %out;
"""


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the control-flow programs."""
    return (
        _plain("control_nested_loops", LOOPS, 32),
        _plain("control_spin_lock", SPIN_LOCK, 64, module=".shared .align 8 .b8 lock[8];"),
        _plain("control_lane_handshake", HANDSHAKE, 64, module=".shared .align 8 .b8 flag[8];"),
        _plain("control_early_exit", EARLY_EXIT, 128, module=".shared .align 4 .b8 words[512];"),
        _plain("control_barrier_reduction", BAR_RED, 128, rows=4),
        _plain(
            "control_named_barriers",
            NAMED_BARRIERS,
            128,
            size=192,
            module=".shared .align 4 .b8 words[256];",
        ),
        _plain("control_branch_table", BRANCH_TABLE, 64),
        _calls(),
        _indirect_calls(),
        _local_arrays(),
        _predicated_loop(),
        _divergent_collectives(),
    )


def _plain(
    name: str, body: str, threads: int, rows: int = 1, size: int = 0, module: str = ""
) -> ConformanceProgram:
    return make_program(
        name,
        body,
        threads=threads,
        module=module,
        outputs=[Buffer("out", poison((rows, size or threads), np.uint32))],
    )


def _calls() -> ConformanceProgram:
    return make_program(
        "control_calls",
        CALLS,
        module=CALL_MODULE,
        outputs=[Buffer("out", poison((1, 32), np.uint32)), Buffer("wide", poison(32, np.uint64))],
    )


def _indirect_calls() -> ConformanceProgram:
    return make_program(
        "control_indirect_and_recursive_calls",
        INDIRECT,
        module=INDIRECT_MODULE,
        outputs=[Buffer("out", poison((2, 32), np.uint32))],
        compares="not run: the virtual GPU puts calls in place and refuses these with PtxError",
    )


def _local_arrays() -> ConformanceProgram:
    registers = (3, 4, 5, 6, 7, 8, 10, 11, 12)
    stores = "\n".join(
        f"st.global.u32 [%d4+{row * 256}], %r{number};" for row, number in enumerate(registers)
    )
    return _plain("control_local_arrays", LOCAL_ARRAYS + stores, 64, rows=len(registers))


def _predicated_loop() -> ConformanceProgram:
    """Return Collatz steps: every lane leaves the loop after its own number of turns."""
    body = """
    mad.wide.u32 %d1, %thread, 4, %start; ld.global.u32 %r1, [%d1]; mov.u32 %r2, 0;
    LOOP:
    setp.eq.u32 %p1, %r1, 1; @%p1 bra END;
    and.b32 %r3, %r1, 1; setp.ne.u32 %p2, %r3, 0;
    @%p2 mad.lo.u32 %r1, %r1, 3, 1; @!%p2 shr.u32 %r1, %r1, 1;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 500; @%p3 bra LOOP;
    END:
    mad.wide.u32 %d1, %thread, 4, %out; st.global.u32 [%d1], %r2;
    """
    start = make_random(9, 1).randint(1, 5000, 64).astype(np.uint32)
    return make_program(
        "control_collatz",
        body,
        inputs=[Buffer("start", start)],
        outputs=[Buffer("out", poison(64, np.uint32))],
        threads=64,
    )


def _divergent_collectives() -> ConformanceProgram:
    """Return two branches of one warp whose shuffles run with masks of their own."""
    body = """
    mov.u32 %r1, %laneid; mul.lo.u32 %r2, %r1, 101; setp.lt.u32 %p1, %r1, 12; @%p1 bra LOW;
    shfl.sync.down.b32 %r3, %r2, 2, 0x1f, 0xfffff000;
    redux.sync.add.u32 %r4, %r2, 0xfffff000; bra JOIN;
    LOW:
    shfl.sync.idx.b32 %r3, %r2, 11, 0x1f, 0x00000fff;
    redux.sync.max.u32 %r4, %r2, 0x00000fff;
    JOIN:
    bar.warp.sync 0xffffffff;
    shfl.sync.bfly.b32 %r5, %r3, 31, 0x1f, 0xffffffff;
    xor.b32 %r5, %r5, %r4; mad.wide.u32 %d1, %thread, 4, %out; st.global.u32 [%d1], %r5;
    """
    return _plain("control_divergent_collectives", body, 64)
