"""Comparison and selection (PTX ISA, "Comparison and Selection Instructions"), predicate logic.

Attribute 0 of setp and set: the Boolean operator of the third source (0 none, 1 and, 2 or, 3 xor);
attribute 1 of set: what a true lane is set to. Attribute of predicate logic: 0 and, 1 or, 2 xor,
3 not, 4 mov.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "compare_select"

BOOLEANS = {"": 0, "and": 1, "or": 2, "xor": 3}
ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT_COMPARISONS = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f32", "ftz.f32", "f64", "f16", "ftz.f16", "bf16", "f16x2", "ftz.f16x2", "bf16x2")
# What set writes for true, by destination type.
_TRUE = {
    "u32": 0xFFFFFFFF,
    "s32": 0xFFFFFFFF,
    "f32": 0x3F800000,
    "u16": 0xFFFF,
    "s16": 0xFFFF,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "f16x2": 0x3C00,
    "bf16x2": 0x3F80,
}


def _list_comparisons() -> Iterator[tuple[str, str, str]]:
    """Yield (comparison, type text, handler suffix) of every comparison there is."""
    for kind in _INTEGERS:
        for name in ORDERED:
            yield name, kind, f"{name}.{kind}"
        if kind.startswith("u"):
            for name, handler in UNSIGNED_NAMES.items():
                yield name, kind, f"{handler}.{kind}"
    for bits in ("16", "32", "64"):
        for name in ("eq", "ne"):
            yield name, f"b{bits}", f"{name}.u{bits}"
    for kind in _FLOATS:
        for name in FLOAT_COMPARISONS:
            yield name, kind, f"{name}.{kind}"


def _list_setp() -> Iterator[InstructionForm]:
    for name, kind, handler in _list_comparisons():
        flush, _, plain = kind.rpartition(".")
        width = TYPE_WIDTHS[plain]
        for boolean, number in BOOLEANS.items():
            words = [word for word in ("setp", name, boolean, flush, plain) if word]
            sources = f"{width} {width}" + (" pred" if boolean else "")
            yield InstructionForm(
                ".".join(words), FAMILY, f"=pred|pred {sources}", f"setp.{handler}", (number,)
            )


def _list_set_results(plain: str) -> tuple[str, ...]:
    """Return the destination types of `set` for a source type."""
    if plain in ("f16x2", "bf16x2"):
        return (plain, "u32", "s32")
    if plain == "f16":
        return ("f16", "bf16", "u16", "s16", "u32", "s32", "f32")
    if plain == "bf16":
        return (plain, "u16", "s16", "u32", "s32", "f32")
    return ("u32", "s32", "f32", "f16", "bf16")


def _list_set() -> Iterator[InstructionForm]:
    for name, kind, handler in _list_comparisons():
        flush, _, plain = kind.rpartition(".")
        width = TYPE_WIDTHS[plain]
        for boolean, number in BOOLEANS.items():
            for result in _list_set_results(plain):
                if flush and "bf16" in result:
                    continue
                words = [word for word in ("set", name, boolean, flush, result, plain) if word]
                sources = f"{width} {width}" + (" pred" if boolean else "")
                yield InstructionForm(
                    ".".join(words),
                    FAMILY,
                    f"={TYPE_WIDTHS[result]} {sources}",
                    f"set.{handler}",
                    (number, _TRUE[result]),
                )


def _list_select() -> Iterator[InstructionForm]:
    for kind in ("b16", "b32", "b64", *_INTEGERS, "f16", "bf16", "f16x2", "bf16x2", "f32", "f64"):
        width = TYPE_WIDTHS[kind]
        yield InstructionForm(
            f"selp.{kind}", FAMILY, f"={width} {width} {width} pred", f"selp.{width}"
        )
    for kind in ("b16", "b32", "b64", *_INTEGERS, "f32", "f64"):
        width = TYPE_WIDTHS[kind]
        operands = f"={width} {width} {width} b32"
        for choice in ("s32", "f32"):
            yield InstructionForm(
                f"slct.{kind}.{choice}", FAMILY, operands, f"slct.{width}.{choice}"
            )
        flushed = "slct.ftz.f32.f32" if kind == "f32" else f"slct.ftz.{width}.f32"
        yield InstructionForm(f"slct.ftz.{kind}.f32", FAMILY, operands, flushed)


def _list_predicate_logic() -> Iterator[InstructionForm]:
    for number, name in enumerate(("and", "or", "xor", "not", "mov")):
        operands = "=pred pred" + (" pred" if number < 3 else "")
        yield InstructionForm(f"{name}.pred", FAMILY, operands, "predicate.logic", (number,))


FORMS = (*_list_setp(), *_list_set(), *_list_select(), *_list_predicate_logic())
