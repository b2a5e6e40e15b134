"""Loads, stores, address spaces, special registers, the older asynchronous copies."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the memory programs."""
    return (
        _vector_accesses(),
        _narrow_accesses(),
        _spaces(),
        _address_space_tests(),
        _special_registers(),
        _packing(),
        _asynchronous_copies(),
        _asynchronous_copy_groups(),
    )


def _bytes(count: int, salt: int) -> np.ndarray:
    return np.frombuffer(make_random(10, salt).bytes(count), np.uint8)


def _vector_accesses() -> ConformanceProgram:
    """Return copies through every vector shape, from global through shared to global."""
    shapes = [
        (count, bits, cache)
        for count, bits in ((1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (4, 16), (1, 32))
        for cache in ("",)
    ]
    shapes += [(2, 32, ".nc"), (4, 32, ".cg"), (1, 64, ".cs"), (2, 64, ".nc"), (2, 32, ".volatile")]
    shapes += [(1, 128, ""), (4, 32, ".ca"), (4, 32, ".nc.L1::no_allocate.L2::128B")]
    body, offset = ["mov.u32 %r30, buffer;"], 0
    for count, bits, cache in shapes:
        step = count * bits // 8
        prefix = {8: "%h", 16: "%h", 32: "%r", 64: "%d", 128: "%q"}[bits]
        registers = ", ".join(f"{prefix}{4 + k}" for k in range(count))
        vector = f".v{count}" if count > 1 else ""
        operand = f"{{{registers}}}" if count > 1 else registers
        load = f"ld{cache}.global" if cache == ".volatile" else f"ld.global{cache}"
        body += [
            f"mad.wide.u32 %d1, %thread, {step}, %source;\nmad.lo.u32 %r29, %thread, {step}, %r30;",
            f"{load}{vector}.b{bits} {operand}, [%d1+{offset}];",
            f"st.shared{vector}.b{bits} [%r29], {operand};\nbar.sync 0;",
            f"xor.b32 %r28, %thread, 1;\nmad.lo.u32 %r28, %r28, {step}, %r30;",
            f"ld.shared{vector}.b{bits} {operand}, [%r28];",
            f"mad.wide.u32 %d1, %thread, {step}, %out;",
            f"st.global{vector}.b{bits} [%d1+{offset}], {operand};\nbar.sync 0;",
        ]
        offset += step * 64
    return make_program(
        "memory_vectors",
        "\n".join(body),
        module=".shared .align 16 .b8 buffer[1024];",
        inputs=[Buffer("source", _bytes(offset, 1))],
        outputs=[Buffer("out", poison(offset, np.uint8))],
        threads=64,
    )


def _narrow_accesses() -> ConformanceProgram:
    """Return loads narrower than their register: sign and zero extension, partial stores."""
    body = ["mad.wide.u32 %d1, %thread, 8, %source;\nmad.wide.u32 %d9, %thread, 8, %out;"]
    row = 0
    for kind in ("s8", "u8", "b8", "s16", "u16", "s32", "u32"):
        widths = [64, 32] + ([16] if int(kind[1:]) < 32 else [])
        for width in widths:
            register = {16: "%h9", 32: "%r9", 64: "%d10"}[width]
            body.append(f"mov.u64 %d11, 0;\nst.global.u64 [%d9+{row * 256}], %d11;")
            body.append(f"ld.global.{kind} {register}, [%d1+{4 if row % 2 else 0}];")
            body.append(f"st.global.b{width} [%d9+{row * 256}], {register};")
            row += 1
    # A store narrower than its register keeps the rest of memory.
    body.append("ld.global.u64 %d10, [%d1];\ncvt.u32.u64 %r9, %d10;")
    body.append(
        f"st.global.u8 [%d9+{row * 256 + 3}], %r9;\nst.global.u16 [%d9+{row * 256 + 4}], %d10;"
    )
    return make_program(
        "memory_extension",
        "\n".join(body),
        inputs=[Buffer("source", _bytes(256, 2))],
        outputs=[Buffer("out", poison((row + 1, 32), np.uint64))],
    )


SPACES_MODULE = """
.const .align 4 .b32 table[4] = {11, 22, 0x80000000, 44};
.const .align 8 .f64 ratio = 0d3FF8000000000000;
.global .align 4 .u32 counter = 7;
.global .align 8 .u64 words[3] = {1, 2, 0xffffffffffffffff};
.global .align 8 .u64 pointer[2] = {generic(words), words+8};
.global .align 1 .b8 letters[6] = {104, 101, 108, 108, 111, 0};
.shared .align 4 .u32 one;
.shared .align 16 .b8 many[64];
.extern .shared .align 16 .b8 dynamic[];
"""


def _spaces() -> ConformanceProgram:
    """Return values fetched from const, module-scope global, shared and dynamic shared memory."""
    body = """
    mov.u32 %r9, %thread; mad.wide.u32 %d1, %thread, 4, %out;
    and.b32 %r1, %thread, 3; mov.u64 %d2, table; mad.wide.u32 %d2, %r1, 4, %d2;
    ld.const.u32 %r2, [%d2]; st.global.u32 [%d1], %r2;
    ld.const.f64 %d3, [ratio]; cvt.rzi.u32.f64 %r2, %d3; st.global.u32 [%d1+128], %r2;
    ld.global.u32 %r2, [counter]; st.global.u32 [%d1+256], %r2;
    ld.global.u64 %d4, [words+16]; cvt.u32.u64 %r2, %d4; st.global.u32 [%d1+384], %r2;
    ld.global.u64 %d4, [pointer]; ld.u64 %d5, [%d4+8]; cvt.u32.u64 %r2, %d5;
    st.global.u32 [%d1+512], %r2;
    ld.global.u8 %r2, [letters+4]; st.global.u32 [%d1+640], %r2;
    setp.eq.u32 %p1, %thread, 0; @%p1 st.shared.u32 [one], 99; bar.sync 0;
    ld.shared.u32 %r2, [one]; st.global.u32 [%d1+768], %r2;
    mov.u32 %r3, dynamic; mad.lo.u32 %r3, %thread, 4, %r3; st.shared.u32 [%r3+64], %r9;
    bar.sync 0; ld.shared.u32 %r2, [dynamic+84]; st.global.u32 [%d1+896], %r2;
    mov.u64 %d6, many; cvta.shared.u64 %d6, %d6; mad.wide.u32 %d6, %r1, 8, %d6;
    st.u32 [%d6+4], 0x5678; mov.u32 %r4, many; mad.lo.u32 %r4, %r1, 8, %r4; bar.sync 0;
    ld.shared.u16 %r2, [%r4+4]; st.global.u32 [%d1+1024], %r2;
    bar.sync 0; @%p1 st.global.u32 [counter], 8; membar.gl; bar.sync 0;
    ld.global.u32 %r2, [counter]; st.global.u32 [%d1+1152], %r2;
    mov.u32 %r2, %dynamic_smem_size; st.global.u32 [%d1+1280], %r2;
    """
    return make_program(
        "memory_spaces",
        body,
        module=SPACES_MODULE,
        outputs=[Buffer("out", poison((11, 32), np.uint32))],
        dynamic_shared=256,
    )


def _address_space_tests() -> ConformanceProgram:
    body = """
    .local .align 8 .b8 frame[16]; .shared .align 8 .b8 words[16];
    mad.wide.u32 %d1, %thread, 4, %out;
    mov.u64 %d2, frame; cvta.local.u64 %d3, %d2; st.local.u32 [frame], %thread;
    mov.u64 %d4, words; cvta.shared.u64 %d5, %d4; st.shared.u32 [words], 5;
    cvta.global.u64 %d6, %out; mov.u32 %r9, 0;
    """
    row = 0
    tests = []
    for address in ("%d3", "%d5", "%d6"):
        for space in ("global", "shared", "local", "const", "shared::cluster"):
            tests.append(f"isspacep.{space} of {address}")
            body += f"isspacep.{space} %p1, {address}; selp.u32 %r1, 1, 0, %p1;\n"
            body += f"st.global.u32 [%d1+{row * 128}], %r1;\n"
            row += 1
    for space, generic, plain in (("local", "%d3", "%d2"), ("shared", "%d5", "%d4")):
        tests.append(f"cvta.to.{space}")
        body += f"cvta.to.{space}.u64 %d7, {generic}; sub.s64 %d7, %d7, {plain};\n"
        body += f"cvt.u32.u64 %r1, %d7; st.global.u32 [%d1+{row * 128}], %r1;\n"
        row += 1
    body += f"ld.u32 %r1, [%d3]; st.global.u32 [%d1+{row * 128}], %r1;\n"
    tests.append("generic load of local")
    return make_program(
        "memory_address_spaces",
        body,
        outputs=[Buffer("out", poison((row + 1, 32), np.uint32))],
        row_names={"out": tuple(tests)},
    )


def _special_registers() -> ConformanceProgram:
    names = [f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    names += ["laneid", "cluster_ctarank", "cluster_nctarank"]
    names += [f"{n}.{axis}" for n in ("clusterid", "nclusterid", "cluster_ctaid") for axis in "xyz"]
    names += [f"cluster_nctaid.{axis}" for axis in "xyz"]
    # The thread of the grid from its coordinates, for a launch of three dimensions.
    body = """
    mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z; mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y;
    mad.lo.u32 %r1, %r2, %r4, %r1; mad.lo.u32 %r1, %r1, %r3, %thread;
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %ctaid.z;
    mov.u32 %r8, %nctaid.x; mov.u32 %r9, %nctaid.y;
    mad.lo.u32 %r6, %r7, %r9, %r6; mad.lo.u32 %r6, %r6, %r8, %r5;
    mad.lo.u32 %r1, %r6, 40, %r1; mad.wide.u32 %d1, %r1, 4, %out;
    """
    total = 40 * 4 * 2 * 2
    for row, name in enumerate(names):
        body += f"mov.u32 %r2, %{name}; st.global.u32 [%d1+{row * total * 4}], %r2;\n"
    row = len(names)
    program = make_program(
        "memory_special_registers",
        body,
        outputs=[Buffer("out", poison((row, total), np.uint32))],
        row_names={"out": tuple(names)},
    )
    fields = {**vars(program), "grid": (4, 2, 2), "block": (5, 4, 2), "cluster": (2, 1, 2)}
    return ConformanceProgram(**fields)


def _packing() -> ConformanceProgram:
    body = """
    mad.wide.u32 %d1, %thread, 16, %source; ld.global.v2.u64 {%d2, %d3}, [%d1];
    mad.wide.u32 %d9, %thread, 8, %out;
    mov.b64 {%r1, %r2}, %d2; mov.b64 %d4, {%r2, %r1}; st.global.u64 [%d9], %d4;
    mov.b64 {%h1, %h2, %h3, %h4}, %d3; mov.b64 %d4, {%h4, %h2, %h3, %h1};
    st.global.u64 [%d9+256], %d4;
    mov.b32 {%h1, %h2}, %r1; mov.b32 %r3, {%h2, %h1}; cvt.u64.u32 %d4, %r3;
    st.global.u64 [%d9+512], %d4;
    mov.b128 %q1, {%d2, %d3}; mov.b128 {%d4, %d5}, %q1; st.global.u64 [%d9+768], %d5;
    mov.b64 {%r4, _}, %d3; mov.b64 {_, %r5}, %d3; mov.b64 %d4, {%r5, %r4};
    st.global.u64 [%d9+1024], %d4;
    """
    return make_program(
        "memory_pack_unpack",
        body,
        inputs=[Buffer("source", _bytes(512, 3).view(np.uint64))],
        outputs=[Buffer("out", poison((5, 32), np.uint64))],
    )


def _asynchronous_copies() -> ConformanceProgram:
    """Return cp.async of every size, with source sizes that leave zeros and an ignored source."""
    body = """
    .shared .align 16 .b8 buffer[4096];
    mov.u32 %r1, buffer; mad.lo.u32 %r2, %thread, 16, %r1; mad.wide.u32 %d1, %thread, 16, %source;
    mov.u32 %r9, 0xeeeeeeee;
    """
    for row in range(8):
        body += f"st.shared.v4.u32 [%r2+{row * 512}], {{%r9, %r9, %r9, %r9}};\n"
    body += """
    bar.sync 0;
    and.b32 %r3, %thread, 15; add.u32 %r4, %r3, 1; and.b32 %r5, %thread, 7; and.b32 %r6, %thread, 3;
    cp.async.ca.shared.global [%r2], [%d1], 4;
    cp.async.ca.shared.global [%r2+512], [%d1], 8;
    cp.async.cg.shared.global [%r2+1024], [%d1], 16;
    cp.async.cg.shared.global [%r2+1536], [%d1], 16, %r3;
    cp.async.ca.shared.global [%r2+2048], [%d1], 8, %r5;
    cp.async.ca.shared.global [%r2+2560], [%d1], 4, %r6;
    setp.gt.u32 %p1, %r3, 9;
    cp.async.cg.shared.global [%r2+3072], [%d1], 16, %p1;
    cp.async.cg.shared.global.L2::128B [%r2+3584], [%d1], 16, 0;
    cp.async.wait_all; bar.sync 0;
    xor.b32 %r7, %thread, 1; mad.lo.u32 %r2, %r7, 16, %r1; mad.wide.u32 %d2, %r7, 16, %out;
    """
    for row in range(8):
        body += f"ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r2+{row * 512}];\n"
        body += f"st.global.v4.u32 [%d2+{row * 512}], {{%r10, %r11, %r12, %r13}};\n"
    return make_program(
        "memory_cp_async_zfill",
        body,
        inputs=[Buffer("source", _bytes(512, 4))],
        outputs=[Buffer("out", poison((8, 512), np.uint8))],
    )


def _asynchronous_copy_groups() -> ConformanceProgram:
    """Return three commit groups waited for one by one, and arrivals of copies on a barrier."""
    body = """
    .shared .align 16 .b8 buffer[2048]; .shared .align 8 .b64 bar;
    mov.u32 %r1, buffer; mad.lo.u32 %r2, %thread, 16, %r1; mad.wide.u32 %d1, %thread, 16, %source;
    mad.wide.u32 %d2, %thread, 16, %out;
    setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared.b64 [bar], 32; bar.sync 0;
    """
    for group in range(3):
        body += f"cp.async.cg.shared.global [%r2+{group * 512}], [%d1+{group * 512}], 16;\n"
        body += "cp.async.commit_group;\n"
    for group in range(3):
        body += f"cp.async.wait_group {2 - group};\n"
        body += f"ld.shared.v4.u32 {{%r10, %r11, %r12, %r13}}, [%r2+{group * 512}];\n"
        body += f"st.global.v4.u32 [%d2+{group * 512}], {{%r10, %r11, %r12, %r13}};\n"
    body += """
    cp.async.ca.shared.global [%r2+1536], [%d1+1536], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra WAIT;
    xor.b32 %r3, %thread, 31; mad.lo.u32 %r2, %r3, 16, %r1;
    ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2+1536];
    st.global.v4.u32 [%d2+1536], {%r10, %r11, %r12, %r13};
    bar.sync 0;
    mad.lo.u32 %r2, %thread, 16, %r1;
    cp.async.ca.shared.global [%r2+1536], [%d1], 16;
    cp.async.mbarrier.arrive.shared.b64 [bar];
    mbarrier.arrive.shared.b64 %d5, [bar];
    WAIT_2: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 1; @!%p2 bra WAIT_2;
    xor.b32 %r3, %thread, 31; mad.lo.u32 %r2, %r3, 16, %r1;
    ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r2+1536];
    st.global.v4.u32 [%d2+2048], {%r10, %r11, %r12, %r13};
    """
    return make_program(
        "memory_cp_async_groups",
        body,
        inputs=[Buffer("source", _bytes(2048, 5))],
        outputs=[Buffer("out", poison((5, 512), np.uint8))],
    )
