"""Logic and shifts (PTX ISA, "Logic and Shift Instructions"; prmt of "Data Movement").

Attribute of `lop3.BoolOp`: 0 and, 1 or.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "logic"

PRMT_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")


def _list_forms() -> Iterator[InstructionForm]:
    for width in ("b16", "b32", "b64"):
        for stem in ("and", "or", "xor"):
            yield InstructionForm(
                f"{stem}.{width}", FAMILY, f"={width} {width} {width}", f"{stem}.{width}"
            )
        for stem in ("not", "cnot"):
            yield InstructionForm(f"{stem}.{width}", FAMILY, f"={width} {width}", f"{stem}.{width}")
        yield InstructionForm(f"shl.{width}", FAMILY, f"={width} {width} b32", f"shl.{width}")
    for kind in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"):
        width = TYPE_WIDTHS[kind]
        handler = f"shr.{kind.replace('b', 'u')}"
        yield InstructionForm(f"shr.{kind}", FAMILY, f"={width} {width} b32", handler)
    for direction in ("l", "r"):
        for mode in ("clamp", "wrap"):
            name = f"shf.{direction}.{mode}.b32"
            yield InstructionForm(name, FAMILY, "=b32 b32 b32 b32", name)
    yield InstructionForm("prmt.b32", FAMILY, "=b32 b32 b32 b32", "prmt.b32")
    for mode in PRMT_MODES:
        name = f"prmt.b32.{mode}"
        yield InstructionForm(name, FAMILY, "=b32 b32 b32 b32", name)
    yield InstructionForm("lop3.b32", FAMILY, "=b32 b32 b32 b32 imm", "lop3.b32")
    for number, operator in enumerate(("and", "or")):
        yield InstructionForm(
            f"lop3.{operator}.b32",
            FAMILY,
            "=b32|pred b32 b32 b32 imm pred",
            "lop3.bool.b32",
            (number,),
        )


FORMS = tuple(_list_forms())
