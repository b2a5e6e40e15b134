"""Warpgroup matrix products: types, layouts, operands in registers, sizes, scales."""

from dataclasses import dataclass

import numpy as np

from ..numbers import encode
from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random, small_integers
from ..warpgroup_layouts import Layout, fragment

K_BYTES = 32
ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "b1": 1}
ROUNDS = (
    "documented difference: the tensor core truncates aligned products before it adds them; "
    "here products are exact and the sum is rounded once more"
)


@dataclass(frozen=True)
class Case:
    """One product: D types, operand types, size and layouts."""

    d: str
    a: str
    b: str
    columns: int = 32
    steps: int = 2
    span_a: int = 128
    span_b: int = 128
    mn_a: bool = False
    mn_b: bool = False
    in_registers: bool = False
    scale_a: int = 1
    scale_b: int = 1
    accumulate: bool = False  # the accumulators start with values instead of nothing
    saturate: bool = False
    is_random: bool = False

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread."""
        return self.columns // (4 if self.d == "f16" else 2)

    @property
    def depth(self) -> int:
        """Elements of K."""
        return self.steps * K_BYTES * 8 // ELEMENT_BITS[self.a]

    def opcode(self) -> str:
        """Return the full form."""
        depth = self.depth // self.steps
        shape = f"m64n{self.columns}k{depth}"
        name = f"wgmma.mma_async.sync.aligned.{shape}.{self.d}.{self.a}.{self.b}"
        if self.a == "b1":
            return name + ".and.popc"
        return name + (".satfinite" if self.saturate else "")

    def label(self) -> str:
        """Return the form and what distinguishes its operands."""
        sides = f"A {'MN' if self.mn_a else 'K'} {self.span_a}, B {'MN' if self.mn_b else 'K'} "
        if self.in_registers:
            sides = sides.replace(f"A {'MN' if self.mn_a else 'K'} {self.span_a}", "A registers")
        return f"{self.opcode()} {sides}{self.span_b} scale {self.scale_a} {self.scale_b}"


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the warpgroup matrix programs."""
    majors = [(a, b) for a in (False, True) for b in (False, True)]
    return (
        *(
            _program(
                f"wgmma_layouts_{f'swizzle_{span}b' if span else 'no_swizzle'}",
                [Case("f32", "f16", "f16", 64, 4, span, span, mn_a=a, mn_b=b) for a, b in majors],
            )
            for span in (0, 32, 64, 128)
        ),
        _program("wgmma_mixed_swizzles", _mixed()),
        _program(
            "wgmma_f16",
            [
                Case("f32", "f16", "f16"),
                Case("f16", "f16", "f16"),
                Case("f16", "f16", "f16", accumulate=True, mn_b=True),
            ],
        ),
        _program("wgmma_bf16_tf32", _bf16_tf32()),
        _program("wgmma_e4m3_e5m2", _eight_bits()),
        _program("wgmma_integers", _integers()),
        _program(
            "wgmma_bits", [Case("s32", "b1", "b1", accumulate=flag) for flag in (False, True)]
        ),
        _program("wgmma_a_in_registers", _in_registers()),
        *(
            _sizes(name, columns)
            for name, columns in (("small", (8, 16, 24, 40, 72)), ("large", (96, 128, 200, 256)))
        ),
        _program("wgmma_scales", _scales()),
        _program("wgmma_random", _random(), ROUNDS),
    )


def _mixed() -> list[Case]:
    return [
        Case("f32", "f16", "f16", 64, 4, span_a, span_b)
        for span_a, span_b in ((0, 128), (128, 64), (32, 0))
    ]


def _bf16_tf32() -> list[Case]:
    return [
        Case("f32", "bf16", "bf16"),
        Case("f32", "bf16", "bf16", mn_a=True, span_a=64, accumulate=True),
        Case("f32", "tf32", "tf32"),
        Case("f32", "tf32", "tf32", span_a=32, span_b=64, accumulate=True),
    ]


def _eight_bits() -> list[Case]:
    return [Case("f32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")] + [
        Case("f16", "e4m3", "e5m2", span_a=32),
        Case("f16", "e5m2", "e4m3", accumulate=True),
    ]


def _integers() -> list[Case]:
    cases = [Case("s32", a, b, accumulate=True) for a in ("s8", "u8") for b in ("s8", "u8")]
    cases += [Case("s32", a, a, accumulate=True, saturate=True) for a in ("s8", "u8")]
    return cases


def _in_registers() -> list[Case]:
    cases = [
        Case("f32", kind, kind, in_registers=True, accumulate=True)
        for kind in ("f16", "bf16", "tf32", "e4m3")
    ]
    cases.append(Case("f32", "f16", "f16", in_registers=True, mn_b=True, span_b=32))
    cases.append(Case("s32", "s8", "u8", in_registers=True))
    cases.append(Case("f16", "f16", "f16", in_registers=True))
    return cases


def _sizes(name: str, columns: tuple[int, ...]) -> ConformanceProgram:
    return _program(
        f"wgmma_{name}_sizes", [Case("f32", "f16", "f16", count, 1) for count in columns]
    )


def _scales() -> list[Case]:
    return [
        Case("f32", kind, kind, scale_a=a, scale_b=b, accumulate=True)
        for kind, a, b in (
            ("f16", -1, 1),
            ("f16", 1, -1),
            ("bf16", -1, -1),
            ("tf32", -1, 1),
            ("e4m3", 1, -1),
        )
    ]


def _random() -> list[Case]:
    return [
        Case("f32", kind, kind, 64, 4, is_random=True) for kind in ("f16", "bf16", "tf32", "e4m3")
    ] + [Case("f16", "f16", "f16", 64, 4, is_random=True)]


def draw_operand(case: Case, side: str, salt: int) -> np.ndarray:
    """Return the (rows, K) patterns of one operand: 64 rows of A or the columns of B."""
    kind = case.a if side == "a" else case.b
    rows = 64 if side == "a" else case.columns
    random = make_random(14, salt, 0 if side == "a" else 1)
    if kind in ("s8", "u8", "b1"):
        raw = np.frombuffer(random.bytes(rows * case.steps * K_BYTES), np.uint8)
        return raw.reshape(rows, -1)
    if case.is_random:
        values = random.standard_normal((rows, case.depth)).astype(np.float32)
    else:
        values = small_integers((rows, case.depth), random)
    return encode(values, kind)


def draw_accumulators(case: Case, salt: int) -> np.ndarray:
    """Return the (thread, register) words that the accumulators start with."""
    random = make_random(14, salt, 2)
    values = random.randint(-64, 65, (128, case.registers * (2 if case.d == "f16" else 1)))
    if case.d == "s32":
        values = values.astype(np.int32) * 1000
        values[:, ::5] = np.iinfo(np.int32).max - 500
        values[:, 2::5] = np.iinfo(np.int32).min + 500
        return values.view(np.uint32)
    return encode(values.astype(np.float32), case.d).view(np.uint32).reshape(128, -1)


def layouts(case: Case) -> tuple[Layout, Layout]:
    """Return the layouts of A and B in shared memory."""
    return (
        Layout(64, case.steps, case.span_a, case.mn_a),
        Layout(case.columns, case.steps, case.span_b, case.mn_b),
    )


def _copy_in(label: str, words: int, target: int, source_offset: int) -> str:
    return f"""
    mov.u32 %r300, %thread;
    {label}: mad.wide.u32 %d90, %r300, 4, %source; ld.global.u32 %r301, [%d90+{source_offset}];
    mad.lo.u32 %r302, %r300, 4, %r310; st.shared.u32 [%r302+{target}], %r301;
    add.u32 %r300, %r300, 128; setp.lt.u32 %p5, %r300, {words}; @%p5 bra {label};
    """


def _product(case: Case, number: int, offsets: tuple[int, int, int, int], out: int) -> str:
    """Return the text of one case; offsets: A, B, accumulators in the source; B in the tile."""
    first, second = layouts(case)
    offset_a, offset_b, offset_c, shared_b = offsets
    text = "" if case.in_registers else _copy_in(f"A{number}", first.size // 4, 0, offset_a)
    text += _copy_in(f"B{number}", second.size // 4, shared_b, offset_b)
    text += "fence.proxy.async.shared::cta; bar.sync 0;\n"
    words = case.registers
    text += f"mad.wide.u32 %d91, %thread, {4 * words}, %source;\n"
    for register in range(words):
        text += f"ld.global.u32 %r{register}, [%d91+{offset_c + 4 * register}];\n"
    if case.in_registers:
        for step in range(case.steps):
            text += "mad.wide.u32 %d92, %thread, 16, %source;\n"
            registers = ", ".join(f"%r{200 + 4 * step + k}" for k in range(4))
            text += f"ld.global.v4.u32 {{{registers}}}, [%d92+{offset_a + step * 2048}];\n"
    text += "shr.u32 %r303, %r310, 4; cvt.u64.u32 %d93, %r303;\nwgmma.fence.sync.aligned;\n"
    accumulators = ", ".join(f"%r{register}" for register in range(words))
    for step in range(case.steps):
        operand_a = f"%d{20 + 2 * step}"
        text += f"add.s64 %d{21 + 2 * step}, %d93, "
        text += f"{second.descriptor() + ((shared_b + second.step_offset(step)) >> 4):#x};\n"
        if case.in_registers:
            operand_a = "{" + ", ".join(f"%r{200 + 4 * step + k}" for k in range(4)) + "}"
        else:
            text += f"add.s64 {operand_a}, %d93, "
            text += f"{first.descriptor() + (first.step_offset(step) >> 4):#x};\n"
        is_fresh = step == 0 and not case.accumulate
        text += f"setp.ne.u32 %p6, {0 if is_fresh else 1}, 0;\n"
        tail = "%p6"
        if case.a not in ("s8", "u8", "b1"):
            tail += f", {case.scale_a}, {case.scale_b}"
        if case.a in ("f16", "bf16"):
            tail += (
                f", {int(case.mn_b)}"
                if case.in_registers
                else f", {int(case.mn_a)}, {int(case.mn_b)}"
            )
        text += f"{case.opcode()} {{{accumulators}}}, {operand_a}, %d{21 + 2 * step}, {tail};\n"
    text += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    text += f"mad.wide.u32 %d91, %thread, {4 * words}, %out;\n"
    for register in range(words):
        text += f"st.global.u32 [%d91+{out + 4 * register}], %r{register};\n"
    return text + "bar.sync 0;\n"


def _program(name: str, cases: list[Case], compares: str = "bits") -> ConformanceProgram:
    pieces: list[np.ndarray] = []
    body = "mov.u32 %r310, tile;\n"
    length, out, labels, shared = 0, 0, [], 0
    for number, case in enumerate(cases):
        first, second = layouts(case)
        operand_a = draw_operand(case, "a", number)
        image = fragment(operand_a) if case.in_registers else first.image(operand_a)
        parts = [
            image,
            second.image(draw_operand(case, "b", number)),
            draw_accumulators(case, number),
        ]
        offsets = []
        for part in parts:
            offsets.append(length)
            pieces.append(part.reshape(-1).view(np.uint8))
            length += part.nbytes
        shared_b = 0 if case.in_registers else first.size
        shared = max(shared, shared_b + second.size)
        body += f"// {case.label()}\n" + _product(case, number, (*offsets, shared_b), out)
        out += 128 * 4 * case.registers
        labels += [case.label()] * case.registers
    return make_program(
        name,
        body,
        threads=128,
        module=f".shared .align 1024 .b8 tile[{shared}];",
        inputs=[Buffer("source", np.concatenate(pieces).view(np.uint32))],
        outputs=[Buffer("out", poison((len(labels), 128), np.uint32))],
        row_names={"out": tuple(labels)},
        compares=compares,
    )
