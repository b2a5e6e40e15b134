"""tcgen05.ld, .ld.red, .st and .wait (PTX ISA, sections of these names).

Attributes: shape, registers per thread, 1 for two 16-bit columns per register; ld.red also
reduction, type, .abs, .NaN. The numbers are those of exec/tcgen05_transfer.cpp.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "tcgen05_transfer"

# Number of the shape, registers per repetition; at most 128 registers.
SHAPES = {
    "32x32b": (0, 1),
    "16x64b": (1, 1),
    "16x128b": (2, 2),
    "16x256b": (3, 4),
    "16x32bx2": (4, 1),
}
REPETITIONS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_REGISTERS = 128
REDUCTIONS = {"min": 1, "max": 2}
REDUCED_TYPES = {"u32": 0, "s32": 1, "f32": 2}


def _list_transfers() -> Iterator[InstructionForm]:
    for shape, (number, per_repetition) in SHAPES.items():
        split = " imm" if shape == "16x32bx2" else ""
        for repetition in REPETITIONS:
            registers = per_repetition * repetition
            if registers > MAX_REGISTERS:
                continue
            stem = f"sync.aligned.{shape}.x{repetition}"
            for packed in (0, 1):
                attributes = (number, registers, packed)
                yield InstructionForm(
                    f"tcgen05.ld.{stem}{'.pack::16b' if packed else ''}.b32",
                    FAMILY,
                    f"=b32*{registers} [b32]{split}",
                    "tcgen05.ld",
                    attributes,
                    "aligned",
                )
                yield InstructionForm(
                    f"tcgen05.st.{stem}{'.unpack::16b' if packed else ''}.b32",
                    FAMILY,
                    f"[b32]{split} b32*{registers}",
                    "tcgen05.st",
                    attributes,
                    "aligned",
                )


def _list_reductions() -> Iterator[InstructionForm]:
    for shape in ("32x32b", "16x32bx2"):
        number = SHAPES[shape][0]
        split = " imm" if shape == "16x32bx2" else ""
        for registers in REPETITIONS[1:]:
            for word, reduction in REDUCTIONS.items():
                for type_name, flags, options in _list_types():
                    tail = "".join(f".{flag}" for flag in flags)
                    stem = f"tcgen05.ld.red.sync.aligned.{shape}.x{registers}"
                    attributes = (
                        number,
                        registers,
                        0,
                        reduction,
                        REDUCED_TYPES[type_name],
                        *options,
                    )
                    form = InstructionForm(
                        f"{stem}.{word}{tail}.{type_name}",
                        FAMILY,
                        f"=b32*{registers} =b32 [b32]{split}",
                        "tcgen05.ld.red",
                        attributes,
                        "aligned",
                    )
                    yield form


def _list_types() -> Iterator[tuple[str, tuple[str, ...], tuple[int, int]]]:
    yield "u32", (), (0, 0)
    yield "s32", (), (0, 0)
    for absolute in (0, 1):
        for nan in (0, 1):
            flags = ("abs",) * absolute + ("NaN",) * nan
            yield "f32", flags, (absolute, nan)


FORMS: tuple[InstructionForm, ...] = (
    *_list_transfers(),
    *_list_reductions(),
    InstructionForm("tcgen05.wait::ld.sync.aligned", FAMILY, "", "tcgen05.wait", (0,), "aligned"),
    InstructionForm("tcgen05.wait::st.sync.aligned", FAMILY, "", "tcgen05.wait", (1,), "aligned"),
)
