"""Atomics: old values where each thread has its own word, final values where all share one."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import (
    BFLOAT16_EDGES,
    FLOAT16_EDGES,
    FLOAT32_EDGES,
    FLOAT64_EDGES,
    integer_edges,
    make_random,
)

THREADS = 128
INTEGER_OPERATIONS = {
    32: [
        *("add.u32", "add.s32", "exch.b32", "min.u32", "min.s32", "max.u32", "max.s32"),
        *("and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32"),
    ],
    64: [
        *("add.u64", "exch.b64", "min.u64", "min.s64", "max.u64", "max.s64"),
        *("and.b64", "or.b64", "xor.b64"),
    ],
}


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the atomic programs."""
    return (
        _own_words("atomic_global_32", "global", 32, INTEGER_OPERATIONS[32], integer_edges(32)),
        _own_words("atomic_global_64", "global", 64, INTEGER_OPERATIONS[64], integer_edges(64)),
        _own_words("atomic_shared_32", "shared", 32, INTEGER_OPERATIONS[32], integer_edges(32)),
        _own_words("atomic_shared_64", "shared", 64, INTEGER_OPERATIONS[64], integer_edges(64)),
        _floats("global"),
        _floats("shared"),
        _own_words("atomic_global_f32_add", "global", 32, ["add.f32"] * 4, FLOAT32_EDGES),
        _halves("global"),
        _halves("shared"),
        _compare_and_swap(),
        _vectors(),
        _contended(),
        _scopes(),
    )


def _operands(edges: np.ndarray, rows: int, salt: int) -> tuple[np.ndarray, np.ndarray]:
    random = make_random(8, salt)
    shape = (rows, THREADS)
    return edges[random.randint(0, len(edges), shape)], edges[random.randint(0, len(edges), shape)]


def _own_words(
    name: str, space: str, bits: int, operations: list[str], edges: np.ndarray
) -> ConformanceProgram:
    """Return a program in which every thread has a word of its own for every operation."""
    size = bits // 8
    register = {16: "%h", 32: "%r", 64: "%d"}[bits]
    start, operand = _operands(edges, len(operations), bits + len(name))
    body = [f"mul.wide.u32 %d1, %thread, {size};"]
    body += [
        f"add.s64 %d{2 + k}, %d1, %{buffer};"
        for k, buffer in enumerate(("words", "operand", "old"))
    ]
    body.append(f"mov.u32 %r30, slots;\nmad.lo.u32 %r30, %thread, {size}, %r30;")
    for row, operation in enumerate(operations):
        offset = row * THREADS * size
        body.append(f"ld.global.b{bits} {register}12, [%d3+{offset}];")
        if space == "shared":
            body.append(f"ld.global.b{bits} {register}13, [%d2+{offset}];")
            body.append(f"st.shared.b{bits} [%r30], {register}13;")
            body.append(f"atom.shared.{operation} {register}14, [%r30], {register}12;")
            body.append(f"ld.shared.b{bits} {register}13, [%r30];")
            body.append(f"st.global.b{bits} [%d2+{offset}], {register}13;")
        else:
            body.append(f"atom.global.{operation} {register}14, [%d2+{offset}], {register}12;")
        body.append(f"st.global.b{bits} [%d4+{offset}], {register}14;")
    return make_program(
        name,
        "\n".join(body),
        module=f".shared .align 16 .b8 slots[{THREADS * 8}];",
        inputs=[Buffer("operand", operand)],
        outputs=[Buffer("words", start), Buffer("old", poison(start.shape, start.dtype))],
        threads=THREADS,
        row_names={"words": tuple(operations), "old": tuple(operations)},
    )


def _floats(space: str) -> ConformanceProgram:
    wide = _own_words(f"atomic_{space}_f32_add", space, 32, ["add.f32"] * 4, FLOAT32_EDGES)
    if space == "shared":
        return wide
    return _own_words("atomic_global_f64_add", space, 64, ["add.f64"] * 4, FLOAT64_EDGES)


def _halves(space: str) -> ConformanceProgram:
    """Return add on f16x2 and bf16x2 words."""
    edges = FLOAT16_EDGES if space == "global" else BFLOAT16_EDGES
    kind = "f16x2" if space == "global" else "bf16x2"
    words = (edges.astype(np.uint32)[:, None] | edges.astype(np.uint32)[None, :] << 16).reshape(-1)
    return _own_words(f"atomic_{space}_{kind}_add", space, 32, [f"add.noftz.{kind}"] * 4, words)


def _compare_and_swap() -> ConformanceProgram:
    random = make_random(8, 900)
    start = random.randint(0, 4, (6, THREADS)).astype(np.uint64)
    operand = random.randint(0, 4, (6, THREADS)).astype(np.uint64)
    body = ["mul.wide.u32 %d1, %thread, 8;\nadd.s64 %d2, %d1, %words;"]
    body.append("add.s64 %d3, %d1, %operand;\nadd.s64 %d4, %d1, %old;\nmov.u64 %d9, 0;")
    step = THREADS * 8
    for row, (width, register) in enumerate(((16, "%h"), (32, "%r"), (64, "%d"))):
        offset = row * step
        body.append(f"ld.global.b{width} {register}12, [%d3+{offset}];\nmov.u64 %d10, 9;")
        body.append("mov.b64 {%r20, %r21}, %d10;\nmov.b32 {%h20, %h21}, %r20;")
        third = {16: "%h20", 32: "%r20", 64: "%d10"}[width]
        body.append(
            f"atom.global.cas.b{width} {register}14, [%d2+{offset}], {register}12, {third};"
        )
        body.append(
            f"st.global.b64 [%d4+{offset}], %d9;\nst.global.b{width} [%d4+{offset}], {register}14;"
        )
    # 128 bits: two neighbouring words of rows 3 and 4, even threads only.
    body.append("and.b32 %r1, %thread, 1;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra DONE;")
    body.append(
        f"ld.global.v2.b64 {{%d20, %d21}}, [%d3+{3 * step}];\nmov.b128 %q1, {{%d20, %d21}};\n"
        f"mov.u64 %d22, 0x77;\nmov.b128 %q2, {{%d22, %d20}};\n"
        f"atom.global.cas.b128 %q3, [%d2+{3 * step}], %q1, %q2;\n"
        f"mov.b128 {{%d23, %d24}}, %q3;\nst.global.v2.b64 [%d4+{3 * step}], {{%d23, %d24}};\n"
        f"atom.global.exch.b128 %q3, [%d2+{4 * step}], %q1;\n"
        f"mov.b128 {{%d23, %d24}}, %q3;\nst.global.v2.b64 [%d4+{4 * step}], {{%d23, %d24}};\nDONE:"
    )
    start[3, :64] = operand[3, :64]
    return make_program(
        "atomic_compare_and_swap",
        "\n".join(body),
        inputs=[Buffer("operand", operand)],
        outputs=[Buffer("words", start), Buffer("old", poison(start.shape, np.uint64))],
        threads=THREADS,
    )


def _vectors() -> ConformanceProgram:
    """Return vector additions of f32, f16x2 and bf16x2 to global memory."""
    random = make_random(8, 901)
    start = random.standard_normal((4, THREADS, 4)).astype(np.float32).view(np.uint32)
    operand = random.standard_normal((4, THREADS, 4)).astype(np.float32).view(np.uint32)
    start[1:] &= 0xBFFFBFFF  # no infinities among the halves
    operand[1:] &= 0xBFFFBFFF
    body = ["mul.wide.u32 %d1, %thread, 16;\nadd.s64 %d2, %d1, %words;"]
    body.append("add.s64 %d3, %d1, %operand;\nadd.s64 %d4, %d1, %old;")
    registers = "{%r14, %r15, %r16, %r17}"
    sources = "{%r10, %r11, %r12, %r13}"
    for row, form in enumerate(
        ("v4.f32.add", "v4.f16x2.add.noftz", "v4.bf16x2.add.noftz", "v2.f32.add")
    ):
        offset = row * THREADS * 16
        body.append(f"ld.global.v4.b32 {sources}, [%d3+{offset}];")
        target, source = registers, sources
        parts = form.split(".")
        if parts[0] == "v2":
            target, source = "{%r14, %r15}", "{%r10, %r11}"
            body.append("mov.u32 %r16, 0;\nmov.u32 %r17, 0;")
        opcode = ".".join(["add", *parts[3:], parts[0], parts[1]])
        body.append(f"atom.global.{opcode} {target}, [%d2+{offset}], {source};")
        body.append(f"st.global.v4.b32 [%d4+{offset}], {registers};")
    return make_program(
        "atomic_vectors",
        "\n".join(body),
        inputs=[Buffer("operand", operand)],
        outputs=[Buffer("words", start), Buffer("old", poison(start.shape, np.uint32))],
        threads=THREADS,
    )


def _contended() -> ConformanceProgram:
    """Return many threads on few words: only commutative operations, only final values."""
    operations = ["add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32"]
    body = ["mov.u32 %r30, slots;\nand.b32 %r1, %thread, 3;\nmad.lo.u32 %r30, %r1, 4, %r30;"]
    body.append("mad.wide.u32 %d2, %index, 4, %operand;\nld.global.u32 %r10, [%d2];")
    body.append("and.b32 %r1, %index, 7;\nmad.wide.u32 %d3, %r1, 4, %words;")
    for row, operation in enumerate(operations):
        operand = "1000" if operation.startswith("inc") else "%r10"
        body.append(f"red.global.{operation} [%d3+{row * 32}], {operand};")
    body.append("setp.lt.u32 %p1, %thread, 4;\n@%p1 st.shared.u32 [%r30], 1;\nbar.sync 0;")
    body.append(
        "red.shared.add.u32 [%r30], %r10;\natom.shared.xor.b32 %r3, [%r30+16], 0;\nbar.sync 0;"
    )
    body.append("ld.shared.u32 %r4, [%r30];\nmad.wide.u32 %d3, %index, 4, %shared;")
    body.append("st.global.u32 [%d3], %r4;")
    random = make_random(8, 902)
    start = random.randint(0, 1 << 31, (len(operations), 8)).astype(np.uint32)
    start[-1] = 0
    source = random.randint(0, 1 << 32, 2 * THREADS, np.int64).astype(np.uint32)
    return make_program(
        "atomic_contended",
        "\n".join(body),
        module=".shared .align 16 .b8 slots[32];",
        inputs=[Buffer("operand", source)],
        outputs=[Buffer("words", start), Buffer("shared", poison(2 * THREADS, np.uint32))],
        threads=THREADS,
        ctas=2,
    )


def _scopes() -> ConformanceProgram:
    """Return every order and scope once: they change no value here."""
    forms = [
        f"atom.{order}.{scope}.global.add.u32"
        for order in ("relaxed", "acquire", "release", "acq_rel")
        for scope in ("cta", "cluster", "gpu", "sys")
    ]
    body = ["mad.wide.u32 %d2, %thread, 4, %words;\nmov.u32 %r2, 0;"]
    for number, form in enumerate(forms):
        body.append(f"{form} %r1, [%d2], {number + 1};\nadd.u32 %r2, %r2, %r1;")
    for order in ("relaxed", "release"):
        body.append(f"red.{order}.gpu.global.add.u32 [%d2], 1000;")
    body.append(
        "fence.acq_rel.gpu;\nfence.sc.cta;\nmembar.gl;\nmembar.cta;\nfence.acq_rel.cluster;"
    )
    body.append("ld.acquire.gpu.global.u32 %r3, [%d2];\nst.release.sys.global.u32 [%d2], %r3;")
    body.append("cvta.global.u64 %d4, %d2;\natom.add.u32 %r1, [%d4], 5;\nadd.u32 %r2, %r2, %r1;")
    body.append("mad.wide.u32 %d2, %thread, 4, %sum;\nst.global.u32 [%d2], %r2;")
    return make_program(
        "atomic_orders_and_scopes",
        "\n".join(body),
        outputs=[
            Buffer("words", np.arange(32, dtype=np.uint32)),
            Buffer("sum", poison(32, np.uint32)),
        ],
    )
