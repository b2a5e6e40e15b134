"""The older tensor core path: ldmatrix, stmatrix, movmatrix and mma.sync of every type."""

from dataclasses import dataclass

import numpy as np

from ..numbers import encode
from ..program import Buffer, ConformanceProgram, make_program, poison
from ..values import make_random, small_integers


@dataclass(frozen=True)
class Form:
    """One mma.sync form: registers of D, A, B and C per lane, and the element types."""

    opcode: str
    registers: tuple[int, int, int, int]
    types: tuple[str, str, str]  # A, B, C
    metadata: bool = False


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the matrix fragment and mma.sync programs."""
    return (
        _ldmatrix(),
        _stmatrix(),
        _movmatrix(),
        _mma("tensor_mma_f16", _half_forms("f16")),
        _mma("tensor_mma_bf16_tf32", _half_forms("bf16") + _tf32_forms()),
        _mma("tensor_mma_e4m3_e5m2", _eight_bit_forms()),
        _mma("tensor_mma_integers", _integer_forms()),
        _mma("tensor_mma_four_and_one_bits", _narrow_forms()),
        _mma("tensor_mma_f64", _double_forms()),
        _mma(
            "tensor_mma_sparse",
            _sparse_forms(),
            compares="not run: the virtual GPU does not know sparse products and says so",
        ),
        _mma(
            "tensor_mma_random",
            [*_half_forms("f16"), *_half_forms("bf16"), *_tf32_forms(), *_eight_bit_forms()],
            compares="documented difference: the tensor core truncates aligned products before "
            "it adds them; here products are exact and the sum is rounded once more",
            is_random=True,
        ),
    )


def _mma_name(shape: str, d: str, a: str, b: str, c: str, suffix: str = "") -> str:
    return f"mma.sync.aligned.{shape}.row.col{suffix}.{d}.{a}.{b}.{c}"


def _half_forms(kind: str) -> list[Form]:
    forms = [
        Form(_mma_name("m16n8k8", "f32", kind, kind, "f32"), (4, 2, 1, 4), (kind, kind, "f32")),
        Form(_mma_name("m16n8k16", "f32", kind, kind, "f32"), (4, 4, 2, 4), (kind, kind, "f32")),
    ]
    if kind == "f16":
        forms += [
            Form(_mma_name("m16n8k8", "f16", kind, kind, "f16"), (2, 2, 1, 2), (kind,) * 3),
            Form(_mma_name("m16n8k16", "f16", kind, kind, "f16"), (2, 4, 2, 2), (kind,) * 3),
        ]
    return forms


def _tf32_forms() -> list[Form]:
    types = ("tf32", "tf32", "f32")
    return [
        Form(_mma_name("m16n8k4", "f32", *types), (4, 2, 1, 4), types),
        Form(_mma_name("m16n8k8", "f32", *types), (4, 4, 2, 4), types),
    ]


def _eight_bit_forms() -> list[Form]:
    return [
        Form(_mma_name("m16n8k32", "f32", a, b, "f32"), (4, 4, 2, 4), (a, b, "f32"))
        for a in ("e4m3", "e5m2")
        for b in ("e4m3", "e5m2")
    ]


def _integer_forms() -> list[Form]:
    return [
        Form(_mma_name(shape, "s32", a, b, "s32", saturate), (4, *registers, 4), (a, b, "s32"))
        for shape, registers in (("m16n8k16", (2, 1)), ("m16n8k32", (4, 2)))
        for a in ("s8", "u8")
        for b in ("s8", "u8")
        for saturate in ("", ".satfinite")
    ] + [
        Form(_mma_name("m8n8k16", "s32", "s8", "u8", "s32"), (2, 1, 1, 2), ("s8", "u8", "s32")),
    ]


def _narrow_forms() -> list[Form]:
    forms = [
        Form(_mma_name(shape, "s32", a, b, "s32", ".satfinite"), (4, *registers, 4), (a, b, "s32"))
        for shape, registers in (("m16n8k32", (2, 1)), ("m16n8k64", (4, 2)))
        for a in ("s4", "u4")
        for b in ("s4", "u4")
    ]
    for shape, registers in (("m16n8k128", (2, 1)), ("m16n8k256", (4, 2))):
        for operation in ("and", "xor"):
            opcode = f"{_mma_name(shape, 's32', 'b1', 'b1', 's32')}.{operation}.popc"
            forms.append(Form(opcode, (4, *registers, 4), ("b1", "b1", "s32")))
    return forms


def _double_forms() -> list[Form]:
    types = ("f64", "f64", "f64")
    return [
        Form(_mma_name("m8n8k4", "f64", *types), (4, 2, 2, 4), types),
        Form(_mma_name("m16n8k4", "f64", *types), (8, 4, 2, 8), types),
        Form(_mma_name("m16n8k8", "f64", *types), (8, 8, 4, 8), types),
        Form(_mma_name("m16n8k16", "f64", *types), (8, 16, 8, 8), types),
    ]


def _sparse_forms() -> list[Form]:
    def name(shape: str, *types: str) -> str:
        return f"mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{'.'.join(types)}"

    return [
        Form(
            name("m16n8k16", "f32", "f16", "f16", "f32"), (4, 2, 2, 4), ("f16", "f16", "f32"), True
        ),
        Form(
            name("m16n8k32", "f32", "f16", "f16", "f32"), (4, 4, 4, 4), ("f16", "f16", "f32"), True
        ),
        Form(
            name("m16n8k16", "f32", "tf32", "tf32", "f32"),
            (4, 4, 4, 4),
            ("tf32", "tf32", "f32"),
            True,
        ),
        Form(name("m16n8k64", "s32", "s8", "u8", "s32"), (4, 4, 4, 4), ("s8", "u8", "s32"), True),
        Form(
            name("m16n8k64", "f32", "e4m3", "e5m2", "f32"),
            (4, 4, 4, 4),
            ("e4m3", "e5m2", "f32"),
            True,
        ),
    ]


def _draw(kind: str, words: int, is_random: bool, salt: int) -> np.ndarray:
    """Return 32 lanes of `words` register words whose elements are of `kind`."""
    random = make_random(12, salt)
    if kind == "s32":
        values = random.randint(-1000, 1000, 32 * words).astype(np.int32)
        values[::7] = np.iinfo(np.int32).max - 100
        return values.view(np.uint32).reshape(32, words)
    if kind in ("s8", "u8", "s4", "u4", "b1"):
        return np.frombuffer(random.bytes(128 * words), np.uint32).reshape(32, words)
    bits = {"f64": 64, "f32": 32, "tf32": 32, "f16": 16, "bf16": 16}.get(kind, 8)
    count = 32 * words * 32 // bits
    values = small_integers((count,), random)
    if is_random:
        values = random.standard_normal(count).astype(np.float32)
    return encode(values, kind).view(np.uint32).reshape(32, words)


def _operand(prefix: int, count: int, wide: bool) -> str:
    name = "%d" if wide else "%r"
    return ", ".join(f"{name}{prefix + k}" for k in range(count))


def _mma(
    name: str, forms: list[Form], compares: str = "bits", is_random: bool = False
) -> ConformanceProgram:
    """Return a program of one warp that runs every form on fragments given lane by lane."""
    body, inputs, offset_in, offset_out = [], [], 0, 0
    for row, form in enumerate(forms):
        d, a, b, c = form.registers
        words = []
        for operand, (count, kind) in enumerate(zip((a, b, c), form.types, strict=True)):
            words.append(_draw(kind, count, is_random, row * 10 + operand))
        wide = form.types[2] == "f64"
        if form.metadata:
            words.append(np.full((32, 1), 0x44E44E44 if row % 2 else 0x4E4E4E4E, np.uint32))
        packed = np.concatenate(words, 1)
        inputs.append(packed.reshape(-1))
        per_lane = packed.shape[1]
        body.append(f"mad.wide.u32 %d100, %thread, {per_lane * 4}, %source;")
        step = 2 if wide else 1
        for word in range(0, per_lane, step):
            register = f"%d{10 + word // 2}" if wide else f"%r{10 + word}"
            load = "ld.global.b64" if wide else "ld.global.b32"
            body.append(f"{load} {register}, [%d100+{offset_in + word * 4}];")
        counts = [value // step for value in (d, a, b, c)]
        starts = [10, 10 + counts[1], 10 + counts[1] + counts[2]]
        operands = [
            _operand(70, counts[0], wide),
            *(_operand(s, n, wide) for s, n in zip(starts, counts[1:], strict=True)),
        ]
        text = ", ".join(f"{{{operand}}}" for operand in operands)
        tail = f", %r{10 + a + b + c}, 0x0" if form.metadata else ""
        body.append(f"{form.opcode} {text}{tail};")
        body.append(f"mad.wide.u32 %d101, %thread, {d * 4}, %out;")
        for index in range(counts[0]):
            register = f"%d{70 + index}" if wide else f"%r{70 + index}"
            store = "st.global.b64" if wide else "st.global.b32"
            body.append(f"{store} [%d101+{offset_out + index * 4 * step}], {register};")
        offset_in += per_lane * 128
        offset_out += d * 128
    labels = [form.opcode for form in forms for _ in range(form.registers[0])]
    return make_program(
        name,
        "\n".join(body),
        inputs=[Buffer("source", np.concatenate(inputs))],
        outputs=[Buffer("out", poison((len(labels), 32), np.uint32))],
        row_names={"out": tuple(labels)},
        compares=compares,
    )


MATRICES = """
.shared .align 16 .b8 tile[1024];
mov.u32 %r1, tile; mad.lo.u32 %r2, %thread, 32, %r1; mad.wide.u32 %d1, %thread, 32, %source;
ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%d1]; st.shared.v4.u32 [%r2], {%r3, %r4, %r5, %r6};
ld.global.v4.u32 {%r3, %r4, %r5, %r6}, [%d1+16]; st.shared.v4.u32 [%r2+16], {%r3, %r4, %r5, %r6};
bar.sync 0;
xor.b32 %r7, %thread, 13; mad.lo.u32 %r8, %r7, 32, %r1;
mad.wide.u32 %d9, %thread, 4, %out;
"""


def _source() -> Buffer:
    return Buffer("source", np.frombuffer(make_random(12, 999).bytes(1024), np.uint32))


def _ldmatrix() -> ConformanceProgram:
    body, row, names = MATRICES, 0, []
    for count in (1, 2, 4):
        for transpose in ("", ".trans"):
            for offset in (0, 16):
                registers = ", ".join(f"%r{20 + k}" for k in range(count))
                opcode = f"ldmatrix.sync.aligned.m8n8.x{count}{transpose}.shared.b16"
                body += f"{opcode} {{{registers}}}, [%r8+{offset}];\n"
                for k in range(count):
                    body += f"st.global.u32 [%d9+{row * 128}], %r{20 + k};\n"
                    names.append(opcode)
                    row += 1
    return make_program(
        "tensor_ldmatrix",
        body,
        inputs=[_source()],
        outputs=[Buffer("out", poison((row, 32), np.uint32))],
        row_names={"out": tuple(names)},
    )


def _stmatrix() -> ConformanceProgram:
    body, row = MATRICES, 0
    for count in (1, 2, 4):
        for transpose in ("", ".trans"):
            registers = ", ".join(f"%r{3 + k}" for k in range(count))
            opcode = f"stmatrix.sync.aligned.m8n8.x{count}{transpose}.shared.b16"
            body += f"{opcode} [%r8], {{{registers}}};\nbar.sync 0;\n"
            body += "ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r2];\nbar.sync 0;\n"
            for k in range(4):
                body += f"st.global.u32 [%d9+{row * 128}], %r{20 + k};\n"
                row += 1
    return make_program(
        "tensor_stmatrix",
        body,
        inputs=[_source()],
        outputs=[Buffer("out", poison((row, 32), np.uint32))],
    )


def _movmatrix() -> ConformanceProgram:
    body = MATRICES + "movmatrix.sync.aligned.m8n8.trans.b16 %r20, %r3;\n"
    body += "st.global.u32 [%d9], %r20;\nmovmatrix.sync.aligned.m8n8.trans.b16 %r20, %r20;\n"
    body += "st.global.u32 [%d9+128], %r20;\n"
    return make_program(
        "tensor_movmatrix",
        body,
        inputs=[_source()],
        outputs=[Buffer("out", poison((2, 32), np.uint32))],
    )
