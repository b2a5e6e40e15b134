"""Random structured PTX programs whose results do not depend on the order of threads.

A program computes on registers of every width, branches and loops by lane, exchanges values
through shuffles, votes and shared memory, and adds to shared words with commutative atomics. Every
collective in a divergent place names the lanes that are there: a register holds their mask, made by
a ballot where the lanes part.
"""

import random
from dataclasses import dataclass, field

import numpy as np

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
WORDS = 4  # input words of a thread
CELLS = 8  # shared words that atomics change
INTEGERS = ("u32", "s32")
ROUNDINGS = ("rn", "rz", "rm", "rp")


@dataclass
class RandomProgram:
    """A program, its launch and its buffers; `out` is what it leaves."""

    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    source: np.ndarray
    out: np.ndarray
    cells: np.ndarray


@dataclass
class _Writer:
    """Text in the making; registers %r (32), %d (64), %h (16), %p, masks %m by depth."""

    draw: random.Random
    lines: list[str] = field(default_factory=list)
    threads: int = 32
    labels: int = 0
    depth: int = 0

    def say(self, *lines: str) -> None:
        self.lines.extend(lines)

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def r(self) -> str:
        return f"%r{self.draw.randrange(8)}"

    def d(self) -> str:
        return f"%d{self.draw.randrange(4)}"

    def h(self) -> str:
        return f"%h{self.draw.randrange(4)}"

    def p(self) -> str:
        return f"%p{self.draw.randrange(4)}"

    def word(self) -> str:
        """A 32-bit source: a register or now and then a constant."""
        if self.draw.random() < 0.2:
            return str(self.draw.choice((0, 1, 5, 31, 33, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)))
        return self.r()

    def pick(self, *choices: str) -> str:
        return self.draw.choice(choices)

    @property
    def mask(self) -> str:
        return f"%m{self.depth}"


def _arithmetic(w: _Writer) -> None:
    kind = w.pick(*INTEGERS)
    operation = w.pick("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem")
    w.say(f"{operation}.{kind} {w.r()}, {w.word()}, {w.word()};")


def _three_sources(w: _Writer) -> None:
    kind = w.pick(*INTEGERS)
    operation = w.pick(f"mad.lo.{kind}", f"mad.hi.{kind}", f"sad.{kind}", f"bfe.{kind}", "prmt.b32")
    operation = w.pick(operation, operation, f"dp4a.{kind}.{kind}", "shf.l.wrap.b32")
    w.say(f"{operation} {w.r()}, {w.word()}, {w.word()}, {w.word()};")


def _bits(w: _Writer) -> None:
    form = w.draw.randrange(4)
    if form == 0:
        w.say(f"{w.pick('and', 'or', 'xor')}.b32 {w.r()}, {w.word()}, {w.word()};")
    elif form == 1:
        w.say(f"{w.pick('shl.b32', 'shr.u32', 'shr.s32')} {w.r()}, {w.r()}, {w.word()};")
    elif form == 2:
        table = w.draw.randrange(256)
        w.say(f"lop3.b32 {w.r()}, {w.word()}, {w.word()}, {w.word()}, {table};")
    else:
        operation = w.pick("popc.b32", "clz.b32", "brev.b32", "bfind.s32", "not.b32", "cnot.b32")
        w.say(f"{operation} {w.r()}, {w.r()};")


def _wide(w: _Writer) -> None:
    form = w.draw.randrange(5)
    kind = w.pick("u64", "s64")
    if form == 0:
        w.say(f"{w.pick('add', 'sub', 'mul.lo', 'min', 'max')}.{kind} {w.d()}, {w.d()}, {w.d()};")
    elif form == 1:
        w.say(f"{w.pick('mul.wide.u32', 'mul.wide.s32')} {w.d()}, {w.word()}, {w.word()};")
    elif form == 2:
        w.say(f"mov.b64 {w.d()}, {{{w.r()}, {w.r()}}};")
    elif form == 3:
        w.say(f"mov.b64 {{%r6, %r7}}, {w.d()};")
    else:
        w.say(f"{w.pick('shl.b64', 'shr.u64', 'shr.s64')} {w.d()}, {w.d()}, {w.word()};")


def _narrow(w: _Writer) -> None:
    form = w.draw.randrange(4)
    kind = w.pick("u16", "s16")
    if form == 0:
        operation = w.pick("add", "sub", "mul.lo", "min", "max", "div", "rem")
        w.say(f"{operation}.{kind} {w.h()}, {w.h()}, {w.h()};")
    elif form == 1:
        w.say(f"mov.b32 {{%h2, %h3}}, {w.r()};")
    elif form == 2:
        w.say(f"cvt.{w.pick('u32', 's32')}.{kind} {w.r()}, {w.h()};")
    else:
        w.say(f"cvt{w.pick('', '.sat')}.{w.pick('u8', 's8', 's16')}.s32 {w.h()}, {w.r()};")


def _float(w: _Writer) -> None:
    form = w.draw.randrange(6)
    rounding, flush = w.pick(*ROUNDINGS), w.pick("", ".ftz")
    if form == 0:
        operation = w.pick("add", "sub", "mul")
        w.say(f"{operation}.{rounding}{flush}.f32 {w.r()}, {w.r()}, {w.r()};")
    elif form == 1:
        w.say(f"fma.{rounding}{flush}.f32 {w.r()}, {w.r()}, {w.r()}, {w.r()};")
    elif form == 2:
        operation = w.pick("min", "max", "min.NaN", "max.ftz")
        w.say(f"{operation}.f32 {w.r()}, {w.r()}, {w.r()};")
    elif form == 3:
        w.say(f"{w.pick('div', 'div')}.{rounding}.f32 {w.r()}, {w.r()}, {w.r()};")
    elif form == 4:
        w.say(f"{w.pick('rcp', 'sqrt')}.{rounding}{flush}.f32 {w.r()}, {w.r()};")
    else:
        operation = w.pick("add", "mul", "min", "max")
        w.say(f"{operation}.{w.pick('f16x2', 'bf16x2')} {w.r()}, {w.r()}, {w.r()};")


def _double(w: _Writer) -> None:
    if w.draw.random() < 0.5:
        operation = w.pick("add", "sub", "mul")
        w.say(f"{operation}.{w.pick(*ROUNDINGS)}.f64 {w.d()}, {w.d()}, {w.d()};")
    else:
        w.say(f"fma.{w.pick(*ROUNDINGS)}.f64 {w.d()}, {w.d()}, {w.d()}, {w.d()};")


def _convert(w: _Writer) -> None:
    form = w.draw.randrange(5)
    rounding = w.pick(*ROUNDINGS)
    integral = w.pick("rni", "rzi", "rmi", "rpi")
    if form == 0:
        w.say(f"cvt.{rounding}.f32.{w.pick(*INTEGERS)} {w.r()}, {w.r()};")
    elif form == 1:
        w.say(f"cvt.{integral}{w.pick('', '.ftz')}.{w.pick(*INTEGERS)}.f32 {w.r()}, {w.r()};")
    elif form == 2:
        w.say(
            f"cvt.{w.pick('rn', 'rz')}.{w.pick('f16x2', 'bf16x2')}.f32 {w.r()}, {w.r()}, {w.r()};"
        )
    elif form == 3:
        w.say(f"cvt.f64.f32 {w.d()}, {w.r()};")
    else:
        w.say(f"cvt.{rounding}.f32.f64 {w.r()}, {w.d()};")


def _compare(w: _Writer) -> None:
    if w.draw.random() < 0.6:
        name = w.pick("eq", "ne", "lt", "le", "gt", "ge")
        w.say(f"setp.{name}.{w.pick(*INTEGERS)} {w.p()}, {w.r()}, {w.word()};")
    elif w.draw.random() < 0.5:
        name = w.pick("lt", "ge", "neu", "num", "ltu")
        w.say(f"setp.{name}.f32 {w.p()}, {w.r()}, {w.r()};")
    else:
        combine = w.pick("and", "or", "xor")
        w.say(f"setp.lt.{combine}.s32 %p0|%p1, {w.r()}, {w.word()}, {w.p()};")


def _select(w: _Writer) -> None:
    if w.draw.random() < 0.5:
        w.say(f"selp.b32 {w.r()}, {w.word()}, {w.word()}, {w.p()};")
    else:
        guard = w.pick("@", "@!") + w.p()
        w.say(f"{guard} {w.pick('add.u32', 'xor.b32')} {w.r()}, {w.word()}, {w.word()};")


def _local(w: _Writer) -> None:
    w.say(f"and.b32 %x0, {w.r()}, 7;", "mad.wide.u32 %y0, %x0, 4, %frame;")
    if w.draw.random() < 0.5:
        w.say(f"st.local.u32 [%y0], {w.r()};")
    else:
        w.say(f"ld.local.{w.pick('u32', 's32', 'u16', 's8')} {w.r()}, [%y0];")


def _atomic(w: _Writer) -> None:
    operation = w.pick("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32")
    cell = ["add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32"].index(operation)
    if w.draw.random() < 0.5:
        w.say(f"red.shared.{operation} [%cells+{4 * cell}], {w.r()};")
    else:
        w.say(f"red.global.{operation} [%total+{4 * cell}], {w.r()};")


def _agree(w: _Writer) -> None:
    """A collective among the lanes that are here."""
    form = w.draw.randrange(4)
    if form == 0:
        w.say(f"vote.sync.ballot.b32 {w.r()}, {w.p()}, {w.mask};")
    elif form == 1:
        w.say(f"vote.sync.{w.pick('all', 'any', 'uni')}.pred {w.p()}, {w.p()}, {w.mask};")
    elif form == 2:
        operation = w.pick("add.u32", "min.s32", "max.u32", "and.b32", "xor.b32")
        w.say(f"redux.sync.{operation} {w.r()}, {w.r()}, {w.mask};")
    else:
        w.say(f"and.b32 %x0, {w.r()}, 3;", f"match.any.sync.b32 {w.r()}, %x0, {w.mask};")


def _shuffle(w: _Writer) -> None:
    """Only where the whole warp is: the source lane is then there, or out of the segment."""
    is_whole = w.threads % 32 == 0
    mode = w.pick("up", "bfly", "idx", *(["down"] if is_whole else []))
    clamp = 0 if mode == "up" else 31
    segment = w.draw.choice((0, 0x1000, 0x1800))
    lane = w.draw.randrange(32 if is_whole else 16)
    control = f"{segment | clamp:#x}"
    w.say(f"shfl.sync.{mode}.b32 {w.r()}|{w.p()}, {w.r()}, {lane}, {control}, {w.mask};")


def _exchange(w: _Writer) -> None:
    """Values through shared memory, with barriers of the whole CTA."""
    w.say(f"st.shared.b32 [%slot], {w.r()};", "bar.sync 0;")
    w.say(f"xor.b32 %x0, %thread, {w.draw.randrange(1, 16)};", "mad.lo.u32 %x0, %x0, 4, %words;")
    w.say(f"ld.shared.{w.pick('u32', 's32', 's16', 'u8')} {w.r()}, [%x0];", "bar.sync 0;")


SIMPLE = (
    *(_arithmetic, _three_sources, _bits, _wide, _narrow, _float, _double, _convert),
    *(_compare, _compare, _select, _select, _local, _atomic, _agree),
)


def _branch(w: _Writer, budget: int) -> None:
    other, end = w.label(), w.label()
    predicate, outer = w.p(), w.mask
    w.depth += 1
    w.say(
        f"vote.sync.ballot.b32 {w.mask}, {predicate}, {outer};",
        f"mov.pred %q{w.depth}, {predicate};",
    )
    w.say(f"@!%q{w.depth} bra {other};")
    _block(w, budget // 2)
    w.say(f"bra {end};", f"{other}:")
    w.say(f"not.b32 {w.mask}, {w.mask};", f"and.b32 {w.mask}, {w.mask}, {outer};")
    _block(w, budget // 2)
    w.say(f"{end}:")
    w.depth -= 1
    w.say(f"bar.warp.sync {outer};")


def _loop(w: _Writer, budget: int) -> None:
    head, end = w.label(), w.label()
    outer = w.mask
    w.depth += 1
    count, limit = f"%c{w.depth}", f"%n{w.depth}"
    w.say(f"and.b32 {limit}, {w.r()}, 3;", f"mov.u32 {count}, 0;", f"mov.b32 {w.mask}, {outer};")
    w.say(f"{head}:", f"setp.lt.u32 %q{w.depth}, {count}, {limit};")
    w.say(f"vote.sync.ballot.b32 {w.mask}, %q{w.depth}, {w.mask};", f"@!%q{w.depth} bra {end};")
    _block(w, budget)
    w.say(f"add.u32 {count}, {count}, 1;", f"bra {head};", f"{end}:")
    w.depth -= 1
    w.say(f"bar.warp.sync {outer};")


def _block(w: _Writer, budget: int) -> None:
    while budget > 0:
        choice = w.draw.random()
        if budget >= 6 and w.depth < 3 and choice < 0.12:
            _branch(w, budget // 2)
            budget -= budget // 2
        elif budget >= 6 and w.depth < 3 and choice < 0.2:
            _loop(w, budget // 3)
            budget -= budget // 2
        elif w.depth == 0 and choice < 0.28:
            _shuffle(w)
            budget -= 1
        elif w.depth == 0 and choice < 0.34:
            _exchange(w)
            budget -= 2
        else:
            w.draw.choice(SIMPLE)(w)
            budget -= 1


START = """
.reg .b32 %r<8>; .reg .b64 %d<4>; .reg .b16 %h<4>; .reg .pred %p<4>; .reg .pred %q<5>;
.reg .b32 %m<5>; .reg .b32 %c<5>; .reg .b32 %n<5>; .reg .b32 %x<3>; .reg .b64 %y<4>;
.reg .b32 %thread, %index, %cells, %words, %slot; .reg .b64 %source, %out, %total, %frame;
.shared .align 16 .b8 shared_cells[32]; .shared .align 16 .b8 shared_words[1024];
.local .align 8 .b8 local_frame[32];
ld.param.u64 %source, [source]; ld.param.u64 %out, [out]; ld.param.u64 %total, [total];
mov.u32 %thread, %tid.x; mov.u32 %x0, %ctaid.x; mov.u32 %x1, %ntid.x;
mad.lo.u32 %index, %x0, %x1, %thread;
mov.u32 %cells, shared_cells; mov.u32 %words, shared_words; mov.u64 %frame, local_frame;
mad.lo.u32 %slot, %thread, 4, %words;
and.b32 %x0, %thread, 0xffffffe0; sub.u32 %x0, %x1, %x0; bmsk.clamp.b32 %m0, 0, %x0;
setp.lt.u32 %p0, %thread, 8; mad.lo.u32 %x2, %thread, 4, %cells; @%p0 st.shared.u32 [%x2], 0;
st.shared.u32 [%slot], 0; mov.u64 %y1, 0;
st.local.u64 [%frame], %y1; st.local.u64 [%frame+8], %y1; st.local.u64 [%frame+16], %y1;
st.local.u64 [%frame+24], %y1;
mad.wide.u32 %y2, %index, 16, %source; ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%y2];
not.b32 %r4, %r0; mov.b32 %r5, %thread; add.u32 %r6, %r1, %r2; xor.b32 %r7, %r3, 0x3f800000;
mov.b64 %d0, {%r0, %r1}; mov.b64 %d1, {%r2, %r3}; cvt.rn.f64.s32 %d2, %r4; mov.u64 %d3, 7;
mov.b32 {%h0, %h1}, %r0; mov.b32 {%h2, %h3}, %r3;
setp.lt.s32 %p0, %r0, 0; setp.lt.s32 %p1, %r1, %r2; setp.gt.u32 %p2, %r3, %r0;
setp.eq.u32 %p3, %thread, 3;
bar.sync 0;
"""

ROW = 8 * 4 + 4 * 8 + 4 * 2 + 4 * 4 + 8 + 32  # bytes a thread leaves


def _end() -> list[str]:
    lines = ["bar.sync 0;", f"mad.wide.u32 %y2, %index, {ROW}, %out;"]
    lines += [f"st.global.b64 [%y2+{8 * k}], %d{k};" for k in range(4)]
    lines += [f"st.global.b32 [%y2+{32 + 4 * k}], %r{k};" for k in range(8)]
    lines += [
        f"selp.u32 %x0, 1, 0, %p{k};\nst.global.u32 [%y2+{64 + 4 * k}], %x0;" for k in range(4)
    ]
    lines += [f"st.global.b16 [%y2+{80 + 2 * k}], %h{k};" for k in range(4)]
    lines.append("and.b32 %x0, %thread, 7; mad.lo.u32 %x0, %x0, 4, %cells;")
    lines.append("ld.shared.u32 %x1, [%x0]; st.global.u32 [%y2+88], %x1;")
    lines.append("st.global.u32 [%y2+92], %m0;")
    for k in range(4):
        lines.append(f"ld.local.u64 %y3, [%frame+{8 * k}]; st.global.b64 [%y2+{96 + 8 * k}], %y3;")
    return lines


def make_random_program(seed: int, statements: int = 40) -> RandomProgram:
    """Return the program of a seed; the same for ever, on every machine."""
    draw = random.Random(seed)
    threads = draw.choice((32, 32, 32, 32, 48, 64))
    writer = _Writer(draw, threads=threads)
    _block(writer, statements)
    parameters = ", ".join(f".param .u64 {name}" for name in ("source", "out", "total"))
    body = "\n".join([START, *writer.lines, *_end(), "ret;"])
    ctas = draw.choice((1, 1, 1, 2))
    count = threads * ctas
    interesting = (0, 1, 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x3F800000, 0x7F800000, 0x7FC00000)
    words = [
        draw.choice(interesting) if draw.random() < 0.2 else draw.getrandbits(32)
        for _ in range(count * WORDS)
    ]
    return RandomProgram(
        f"{HEADER}.visible .entry program({parameters})\n{{\n{body}\n}}\n",
        (ctas, 1, 1),
        (threads, 1, 1),
        np.array(words, np.uint32),
        np.full(count * ROW, 0xCD, np.uint8),
        np.arange(CELLS, dtype=np.uint32),
    )
