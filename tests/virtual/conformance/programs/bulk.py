"""Bulk copies without a tensor map: to and from shared memory, between CTAs, with reductions."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random

START = """
.shared .align 128 .b8 tile[8192]; .shared .align 8 .b64 bar;
mov.u32 %r1, tile; mov.u32 %r2, bar; setp.eq.u32 %p1, %thread, 0;
@!%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
"""

# Every word of the tile, before a copy, is 0xeeeeeeee.
FILL = """
mov.u32 %r20, %thread;
FILL: mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], 0xeeeeeeee;
add.u32 %r20, %r20, 32; setp.lt.u32 %p5, %r20, 2048; @%p5 bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
"""

DUMP = """
mov.u32 %r20, %thread;
DUMP: mad.lo.u32 %r21, %r20, 4, %r1; ld.shared.u32 %r22, [%r21];
mad.wide.u32 %d20, %r20, 4, %d19; st.global.u32 [%d20], %r22;
add.u32 %r20, %r20, 32; setp.lt.u32 %p5, %r20, 2048; @%p5 bra DUMP;
bar.sync 0;
"""


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the bulk copy programs."""
    return (
        _to_shared(),
        _to_global(),
        _between_ctas(),
        _multicast(),
        _reduce_global(),
        _reduce_half(),
        _reduce_shared(),
        _reduce_shared_64(),
    )


def _words(count: int, salt: int) -> np.ndarray:
    return np.frombuffer(make_random(11, salt).bytes(count * 4), np.uint32)


def _to_shared() -> ConformanceProgram:
    copies = ((0, 0, 16), (128, 64, 48), (256, 2048, 1024), (2048, 4096, 4096), (7168, 16, 1008))
    total = sum(size for _, _, size in copies)
    body = START + FILL
    body += f"@!%p1 bra WAIT;\nmbarrier.arrive.expect_tx.shared.b64 _, [%r2], {total};\n"
    for target, source, size in copies:
        body += f"cp.async.bulk.prefetch.L2.global [%source+{source}], {size};\n"
        body += "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        body += f"[tile+{target}], [%source+{source}], {size}, [%r2];\n"
    body += "WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;\n"
    body += "mov.b64 %d19, %out;\n" + DUMP
    return make_program(
        "bulk_global_to_shared",
        body,
        inputs=[Buffer("source", _words(2048, 1))],
        outputs=[Buffer("out", poison(2048, np.uint32))],
    )


def _fill_from(source: str, words: int = 2048) -> str:
    return f"""
    mov.u32 %r20, %thread;
    COPY_IN: mad.wide.u32 %d20, %r20, 4, {source}; ld.global.u32 %r22, [%d20];
    mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], %r22;
    add.u32 %r20, %r20, 32; setp.lt.u32 %p5, %r20, {words}; @%p5 bra COPY_IN;
    fence.proxy.async.shared::cta; bar.sync 0;
    """


def _to_global() -> ConformanceProgram:
    body = START + _fill_from("%source") + "@!%p1 bra DONE;\n"
    for group, (target, source, size) in enumerate(
        ((0, 16, 16), (64, 4096, 512), (1024, 0, 4096), (6000 // 16 * 16, 8192 - 160, 160))
    ):
        body += "cp.async.bulk.global.shared::cta.bulk_group "
        body += f"[%out+{target}], [tile+{source}], {size};\n"
        body += "cp.async.bulk.commit_group;\n" if group % 2 else ""
    body += "cp.async.bulk.wait_group.read 1;\ncp.async.bulk.wait_group 0;\nDONE: bar.sync 0;\n"
    return make_program(
        "bulk_shared_to_global",
        body,
        inputs=[Buffer("source", _words(2048, 2))],
        outputs=[Buffer("out", poison(2048, np.uint32))],
    )


def _between_ctas() -> ConformanceProgram:
    """Return a copy from shared memory of one CTA into the next, whose barrier counts the bytes."""
    body = START + "mul.wide.u32 %d18, %index, 0;\nmov.u32 %r5, %cluster_ctarank;\n"
    body += "mad.wide.u32 %d17, %r5, 8192, %source;\nmad.wide.u32 %d19, %r5, 8192, %out;\n"
    body += _fill_from("%d17")
    body += """
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 1040;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6;
    mapa.shared::cluster.u32 %r8, %r2, %r6;
    @!%p1 bra WAIT;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
      [%r7+4096], [%r1], 1024, [%r8];
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
      [%r7+6144], [%r1+32], 16, [%r8];
    WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
    """
    body += DUMP + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return make_program(
        "bulk_shared_to_remote_shared",
        body,
        ctas=2,
        cluster=(2, 1, 1),
        inputs=[Buffer("source", _words(4096, 3))],
        outputs=[Buffer("out", poison(4096, np.uint32))],
    )


def _multicast() -> ConformanceProgram:
    body = (
        START
        + FILL
        + """
    mov.u32 %r5, %cluster_ctarank; mad.wide.u32 %d19, %r5, 8192, %out;
    mov.u32 %r9, 512; setp.eq.u32 %p3, %r5, 1; @%p3 mov.u32 %r9, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r9;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    setp.eq.u32 %p4, %r5, 0; and.pred %p4, %p4, %p1; mov.u16 %h1, 0x000d; @!%p4 bra WAIT;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
      [%r1+1024], [%source+64], 512, [%r2], %h1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
    """
    )
    body += DUMP + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return make_program(
        "bulk_multicast",
        body,
        ctas=4,
        cluster=(4, 1, 1),
        inputs=[Buffer("source", _words(512, 4))],
        outputs=[Buffer("out", poison(4 * 2048, np.uint32))],
    )


def _reduction_text(forms: list[str]) -> str:
    text = START + _fill_from("%source") + "@!%p1 bra DONE;\n"
    for row, form in enumerate(forms):
        text += f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{form} "
        text += f"[%out+{row * 256}], [tile+{row * 256}], 256;\n"
    return text + "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE: bar.sync 0;\n"


def _reduce_global() -> ConformanceProgram:
    forms = [f"{op}.{kind}" for op in ("add", "min", "max") for kind in ("u32", "s32", "u64")]
    forms += ["min.s64", "max.s64", "inc.u32", "dec.u32"]
    forms += [f"{op}.{kind}" for op in ("and", "or", "xor") for kind in ("b32", "b64")]
    random = make_random(11, 5)
    source, start = _words(2048, 6).copy(), _words(64 * len(forms), 7).copy()
    for row, form in enumerate(forms):
        if form.startswith(("inc", "dec")):
            start[row * 64 : row * 64 + 64] = random.randint(0, 9, 64)
            source[row * 64 : row * 64 + 64] = random.randint(0, 9, 64)
    return make_program(
        "bulk_reduce_global_integers",
        _reduction_text(forms),
        inputs=[Buffer("source", source)],
        outputs=[Buffer("out", start.reshape(len(forms), 64))],
        row_names={"out": tuple(forms)},
    )


def _reduce_half() -> ConformanceProgram:
    forms = ["add.f32", "add.f64", "add.noftz.f16", "add.noftz.bf16"]
    forms += ["min.f16", "max.f16", "min.bf16", "max.bf16"]
    random = make_random(11, 8)

    def draw(form: str) -> np.ndarray:
        kind = form.split(".")[-1]
        count = {"f32": 64, "f64": 32}.get(kind, 128)
        values = random.standard_normal(count) * np.exp2(random.randint(-10, 10, count))
        if kind == "bf16":
            return (
                (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
            )
        width = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind]
        array = values.astype(width)
        array[:4] = [0.0, -0.0, np.inf, np.nan]
        return array.view(np.uint32)

    source = np.resize(np.concatenate([draw(form) for form in forms]), 2048)
    start = np.concatenate([draw(form)[::-1] for form in forms]).reshape(len(forms), 64)
    return make_program(
        "bulk_reduce_global_floats",
        _reduction_text(forms),
        inputs=[Buffer("source", source)],
        outputs=[Buffer("out", start)],
        row_names={"out": tuple(forms)},
    )


def _reduce_remote(name: str, forms: list[str], salt: int) -> ConformanceProgram:
    """Return reductions of one CTA's shared memory into the other's."""
    total = 128 * len(forms)
    body = START + "mov.u32 %r5, %cluster_ctarank;\n"
    body += "mad.wide.u32 %d17, %r5, 8192, %source;\nmad.wide.u32 %d19, %r5, 8192, %out;\n"
    body += _fill_from("%d17")
    body += f"@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {total};\n"
    body += """
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6;
    mapa.shared::cluster.u32 %r8, %r2, %r6;
    @!%p1 bra WAIT;
    """
    for row, form in enumerate(forms):
        body += "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes."
        body += f"{form} [%r7+{4096 + row * 128}], [%r1+{row * 128}], 128, [%r8];\n"
    body += "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;\n"
    body += "@!%p2 bra WAIT;\n" + DUMP
    body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return make_program(
        name,
        body,
        ctas=2,
        cluster=(2, 1, 1),
        inputs=[Buffer("source", _words(4096, salt))],
        outputs=[Buffer("out", poison(4096, np.uint32))],
    )


def _reduce_shared() -> ConformanceProgram:
    forms = [f"{op}.{kind}" for op in ("add", "min", "max") for kind in ("u32", "s32")]
    forms += ["inc.u32", "dec.u32", "and.b32", "or.b32", "xor.b32"]
    return _reduce_remote("bulk_reduce_remote_shared", forms, 9)


def _reduce_shared_64() -> ConformanceProgram:
    return _reduce_remote("bulk_reduce_remote_shared_64", ["add.u64", "add.u64"], 10)
