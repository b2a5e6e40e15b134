"""Bits of integers: popc, clz, bfind, fns, brev, bfe, bfi, bmsk, szext (PTX ISA, same chapter)."""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "bit_fields"


def _list_forms() -> Iterator[InstructionForm]:
    for width in ("b32", "b64"):
        for stem in ("popc", "clz"):
            yield InstructionForm(f"{stem}.{width}", FAMILY, f"=b32 {width}", f"{stem}.{width}")
        yield InstructionForm(f"brev.{width}", FAMILY, f"={width} {width}", f"brev.{width}")
        yield InstructionForm(
            f"bfi.{width}", FAMILY, f"={width} {width} {width} b32 b32", f"bfi.{width}"
        )
    for kind in ("u32", "s32", "u64", "s64"):
        width = TYPE_WIDTHS[kind]
        for stem in ("bfind", "bfind.shiftamt"):
            yield InstructionForm(f"{stem}.{kind}", FAMILY, f"=b32 {width}", f"{stem}.{kind}")
        yield InstructionForm(f"bfe.{kind}", FAMILY, f"={width} {width} b32 b32", f"bfe.{kind}")
    yield InstructionForm("fns.b32", FAMILY, "=b32 b32 b32 b32", "fns.b32")
    for mode in ("clamp", "wrap"):
        yield InstructionForm(f"bmsk.{mode}.b32", FAMILY, "=b32 b32 b32", f"bmsk.{mode}.b32")
        for kind in ("u32", "s32"):
            yield InstructionForm(
                f"szext.{mode}.{kind}", FAMILY, "=b32 b32 b32", f"szext.{mode}.{kind}"
            )


FORMS = tuple(_list_forms())
