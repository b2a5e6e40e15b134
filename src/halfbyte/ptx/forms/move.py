"""mov, cvta, isspacep, mapa, getctarank (PTX ISA, "Data Movement and Conversion Instructions").

Attribute of cvta: the window of the state space in the generic address space, as
`virtual/machine/memory.h` has it (0: none); of isspacep: the window, and 1 where only the CTA's
own shared memory counts.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "move"

SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 1 << 57
LOCAL_WINDOW = 1 << 58

_WINDOWS = {
    "global": 0,
    "const": 0,
    "shared": SHARED_WINDOW,
    "shared::cta": SHARED_WINDOW,
    "shared::cluster": SHARED_WINDOW,
    "local": LOCAL_WINDOW,
    "param": PARAM_WINDOW,
    "param::entry": PARAM_WINDOW,
}
# Width of the whole: (width of a part, parts).
_VECTORS = {
    "b16": (("b8", 2),),
    "b32": (("b16", 2), ("b8", 4)),
    "b64": (("b32", 2), ("b16", 4)),
    "b128": (("b64", 2),),
}
_PLAIN = ("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")


def _list_moves() -> Iterator[InstructionForm]:
    for whole, vectors in _VECTORS.items():
        name = f"mov.{whole}"
        shapes = [
            InstructionForm(name, FAMILY, f"={whole} {part}*{count}", f"pack.{whole}.{part}")
            for part, count in vectors
        ] + [
            InstructionForm(name, FAMILY, f"={part}*{count} {whole}", f"unpack.{part}.{whole}")
            for part, count in vectors
        ]
        yield InstructionForm(name, FAMILY, f"={whole} {whole}", name, alternatives=tuple(shapes))
    for kind in _PLAIN:
        width = TYPE_WIDTHS[kind]
        yield InstructionForm(f"mov.{kind}", FAMILY, f"={width} {width}", f"mov.{width}")


def _list_address_forms() -> Iterator[InstructionForm]:
    for space, window in _WINDOWS.items():
        yield InstructionForm(f"cvta.{space}.u64", FAMILY, "=b64 b64", "cvta", (window,))
        yield InstructionForm(f"cvta.to.{space}.u64", FAMILY, "=b64 b64", "cvta.to", (window,))
        is_own = int(space in ("shared", "shared::cta"))
        yield InstructionForm(
            f"isspacep.{space}",
            FAMILY,
            "=pred b64",
            "isspacep.const" if space == "const" else "isspacep",
            (window, is_own),
        )
    yield InstructionForm("mapa.u64", FAMILY, "=b64 b64 b32", "mapa.generic")
    yield InstructionForm("mapa.shared::cluster.u32", FAMILY, "=b32 b32 b32", "mapa.b32")
    yield InstructionForm("mapa.shared::cluster.u64", FAMILY, "=b64 b64 b32", "mapa.b64")
    yield InstructionForm("getctarank.u64", FAMILY, "=b32 b64", "getctarank.b64")
    yield InstructionForm("getctarank.shared::cluster.u32", FAMILY, "=b32 b32", "getctarank.b32")
    yield InstructionForm("getctarank.shared::cluster.u64", FAMILY, "=b32 b64", "getctarank.b64")


FORMS = (*_list_moves(), *_list_address_forms())
