"""What lanes of a warp tell each other: shuffles, votes, matches, reductions, elections."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random

FULL = "0xffffffff"


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the programs of warp collectives."""
    return (_shuffles(), _votes(), _matches(), _reductions(), _active_masks())


def _rows_program(name: str, rows: list[tuple[str, str]], source: np.ndarray) -> ConformanceProgram:
    """Return a program of one thread per element; row k of the output is what text k made."""
    threads = len(source)
    body = ["mad.wide.u32 %d0, %index, 4, %source;\nld.global.u32 %r10, [%d0];"]
    for row, (_, text) in enumerate(rows):
        body.append(text)
        body.append("mad.wide.u32 %d0, %index, 4, %out;")
        body.append(f"st.global.u32 [%d0+{row * threads * 4}], %r1;")
    return make_program(
        name,
        "\n".join(body),
        inputs=[Buffer("source", source)],
        outputs=[Buffer("out", poison((len(rows), threads), np.uint32))],
        threads=threads,
        row_names={"out": tuple(label for label, _ in rows)},
    )


def _source(salt: int, limit: int = 1 << 32) -> np.ndarray:
    return (make_random(7, salt).randint(0, limit, 64, np.int64)).astype(np.uint32)


def _shuffles() -> ConformanceProgram:
    rows = []
    for mode, clamps in (
        ("up", (0x0, 0x1800, 0x1C00, 0x1000)),
        ("down", (0x1F, 0x181F, 0x1C1F, 0x7)),
        ("bfly", (0x1F, 0x181F, 0x1003)),
        ("idx", (0x1F, 0x181F, 0x1C07, 0x1E1F)),
    ):
        for clamp in clamps:
            for lane in ("1", "5", "9", "31", "%r10"):
                label = f"shfl.sync.{mode} {lane} {clamp:#x}"
                text = f"shfl.sync.{mode}.b32 %r1|%p1, %r10, {lane}, {clamp}, {FULL};\n"
                rows.append((label, text + "@%p1 xor.b32 %r1, %r1, 0x55;"))
    # Only some lanes take part.
    text = "mov.u32 %r1, 77;\nand.b32 %r2, %thread, 1;\nsetp.eq.u32 %p2, %r2, 1;\n"
    text += "@%p2 shfl.sync.idx.b32 %r1, %r10, 3, 0x1f, 0xaaaaaaaa;"
    rows.append(("shfl.sync.idx odd lanes", text))
    return _rows_program("collective_shuffles", rows, _source(1))


def _votes() -> ConformanceProgram:
    rows = []
    predicates = {
        "some": "setp.lt.s32 %p1, %r10, 0;",
        "all": "setp.ge.u32 %p1, %r10, 0;",
        "none": "setp.lt.u32 %p1, %r10, 0;",
    }
    for label, text in predicates.items():
        for mode in ("all", "any", "uni"):
            for negation in ("", "!"):
                vote = f"{text}\nvote.sync.{mode}.pred %p2, {negation}%p1, {FULL};\n"
                rows.append((f"vote.{mode} {negation}{label}", vote + "selp.u32 %r1, 1, 0, %p2;"))
        rows.append((f"vote.ballot {label}", f"{text}\nvote.sync.ballot.b32 %r1, %p1, {FULL};"))
    half = "mov.u32 %r1, 9;\nmov.u32 %r2, %laneid;\nsetp.lt.u32 %p3, %r2, 16;\n"
    half += "setp.lt.s32 %p1, %r10, 0;\n@%p3 vote.sync.ballot.b32 %r1, %p1, 0xffff;"
    rows.append(("vote.ballot low half", half))
    return _rows_program("collective_votes", rows, _source(2))


def _matches() -> ConformanceProgram:
    few = "and.b32 %r2, %r10, 3;\n"
    same = "mov.u32 %r2, 12;\n"
    rows = []
    for label, text in (("few", few), ("same", same)):
        rows.append((f"match.any.b32 {label}", f"{text}match.any.sync.b32 %r1, %r2, {FULL};"))
        all_text = f"{text}match.all.sync.b32 %r1|%p1, %r2, {FULL};\n@%p1 xor.b32 %r1, %r1, 1;"
        rows.append((f"match.all.b32 {label}", all_text))
        wide = f"{text}mov.b64 %d2, {{%r2, %r2}};\n"
        rows.append((f"match.any.b64 {label}", f"{wide}match.any.sync.b64 %r1, %d2, {FULL};"))
        all_text = f"{wide}match.all.sync.b64 %r1|%p1, %d2, {FULL};\n@%p1 xor.b32 %r1, %r1, 1;"
        rows.append((f"match.all.b64 {label}", all_text))
    return _rows_program("collective_matches", rows, _source(3))


def _reductions() -> ConformanceProgram:
    rows = []
    operations = [f"{op}.{sign}32" for op in ("add", "min", "max") for sign in "us"]
    for operation in [*operations, "and.b32", "or.b32", "xor.b32"]:
        rows.append((f"redux.{operation}", f"redux.sync.{operation} %r1, %r10, {FULL};"))
        text = "mov.u32 %r2, %laneid;\nand.b32 %r2, %r2, 3;\nsetp.ne.u32 %p1, %r2, 0;\n"
        text += f"mov.u32 %r1, 5;\n@%p1 redux.sync.{operation} %r1, %r10, 0xeeeeeeee;"
        rows.append((f"redux.{operation} three of four", text))
    return _rows_program("collective_reductions", rows, _source(4))


def _active_masks() -> ConformanceProgram:
    branches = []
    for number, condition in enumerate(("lt.u32 %p1, %r2, 5", "gt.u32 %p1, %r2, 20")):
        # A barrier of the participants makes what activemask sees certain.
        branches.append(
            (
                f"activemask {condition[:6]}",
                f"mov.u32 %r2, %laneid;\nmov.u32 %r1, 0;\nsetp.{condition};\n"
                f"vote.sync.ballot.b32 %r3, %p1, {FULL};\n@!%p1 bra SKIP{number};\n"
                f"bar.warp.sync %r3;\nactivemask.b32 %r1;\nSKIP{number}:\nbar.warp.sync {FULL};",
            )
        )
    rows = [
        ("activemask", "activemask.b32 %r1;"),
        *branches,
        # Which lane is elected is not defined; that it is one, and all learn the same, is.
        (
            "elect.sync count",
            f"elect.sync %r4|%p1, {FULL};\nselp.u32 %r2, 1, 0, %p1;\n"
            f"redux.sync.add.u32 %r1, %r2, {FULL};",
        ),
        (
            "elect.sync leader is the one",
            f"elect.sync %r4|%p1, {FULL};\nmov.u32 %r2, %laneid;\nsetp.eq.u32 %p2, %r2, %r4;\n"
            f"xor.pred %p3, %p1, %p2;\nselp.u32 %r1, 1, 0, %p3;",
        ),
        ("elect.sync leader", f"elect.sync %r1|%p1, {FULL};"),
        *(
            (f"lanemask_{name}", f"mov.u32 %r1, %lanemask_{name};")
            for name in ["eq", "lt", "le", "gt", "ge"]
        ),
    ]
    return _rows_program("collective_active_masks", rows, _source(5))
