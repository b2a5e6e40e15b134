"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions").

Handlers named `.b<n>` serve signed and unsigned types alike. Attributes of the carry forms
(`addc`, `subc`, `madc`): whether the carry flag is read, whether it is written.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "integer"

_SIGNED_OR_NOT = ("u16", "s16", "u32", "s32", "u64", "s64")
_PACKED = ("u16x2", "s16x2", "u8x4", "s8x4")
_WIDE = {"u16": "b32", "s16": "b32", "u32": "b64", "s32": "b64"}


def _make(name: str, width: str, sources: int, handler: str = "") -> InstructionForm:
    operands = f"={width}" + f" {width}" * sources
    return InstructionForm(name, FAMILY, operands, handler or name)


def _list_arithmetic() -> Iterator[InstructionForm]:
    for kind in _SIGNED_OR_NOT:
        width = TYPE_WIDTHS[kind]
        yield _make(f"add.{kind}", width, 2, f"add.{width}")
        yield _make(f"sub.{kind}", width, 2, f"sub.{width}")
        yield _make(f"mul.lo.{kind}", width, 2, f"mul.lo.{width}")
        yield _make(f"mul.hi.{kind}", width, 2)
        yield _make(f"mad.lo.{kind}", width, 3, f"mad.lo.{width}")
        yield _make(f"mad.hi.{kind}", width, 3)
        yield _make(f"sad.{kind}", width, 3)
        for stem in ("div", "rem", "min", "max"):
            yield _make(f"{stem}.{kind}", width, 2)
    for kind in ("s16", "s32", "s64"):
        width = TYPE_WIDTHS[kind]
        yield _make(f"abs.{kind}", width, 1)
        yield _make(f"neg.{kind}", width, 1, f"neg.{width}")
    for kind, wide in _WIDE.items():
        width = TYPE_WIDTHS[kind]
        yield InstructionForm(
            f"mul.wide.{kind}", FAMILY, f"={wide} {width} {width}", f"mul.wide.{kind}"
        )
        yield InstructionForm(
            f"mad.wide.{kind}", FAMILY, f"={wide} {width} {width} {wide}", f"mad.wide.{kind}"
        )


def _list_32_bit() -> Iterator[InstructionForm]:
    for name in (
        "add.sat.s32",
        "sub.sat.s32",
        "add.sat.u32",
        "sub.sat.u32",
        "min.relu.s32",
        "max.relu.s32",
    ):
        yield _make(name, "b32", 2)
    yield _make("mad.hi.sat.s32", "b32", 3)
    for half in ("lo", "hi"):
        for kind in ("u32", "s32"):
            yield _make(f"mul24.{half}.{kind}", "b32", 2)
            yield _make(f"mad24.{half}.{kind}", "b32", 3)
    yield _make("mad24.hi.sat.s32", "b32", 3)
    for first in ("u32", "s32"):
        for second in ("u32", "s32"):
            for stem in ("dp4a", "dp2a.lo", "dp2a.hi"):
                yield _make(f"{stem}.{first}.{second}", "b32", 3)


def _list_packed() -> Iterator[InstructionForm]:
    for kind in _PACKED:
        for stem in ("add", "sub", "add.sat", "sub.sat", "min", "max"):
            yield _make(f"{stem}.{kind}", "b32", 2)
        yield _make(f"neg.{kind}", "b32", 1)
        if kind == "s16x2":
            yield _make(f"min.relu.{kind}", "b32", 2)
            yield _make(f"max.relu.{kind}", "b32", 2)
    # The spelling of PTX ISA, "min": `.relu` after the type of the packed signed form as well.
    for stem in ("min", "max"):
        yield _make(f"{stem}.s16x2.relu", "b32", 2, f"{stem}.relu.s16x2")


def _list_carries() -> Iterator[InstructionForm]:
    for kind in ("u32", "s32", "u64", "s64"):
        width = TYPE_WIDTHS[kind]
        for stem, name, attributes in (
            ("addc", "add.cc", (0, 1)),
            ("addc", "addc", (1, 0)),
            ("addc", "addc.cc", (1, 1)),
            ("subc", "sub.cc", (0, 1)),
            ("subc", "subc", (1, 0)),
            ("subc", "subc.cc", (1, 1)),
        ):
            yield InstructionForm(
                f"{name}.{kind}",
                FAMILY,
                f"={width} {width} {width}",
                f"{stem}.{width}",
                attributes,
            )
        for half in ("lo", "hi"):
            handler = f"madc.lo.{width}" if half == "lo" else f"madc.hi.{kind}"
            for name, attributes in (
                (f"mad.{half}.cc", (0, 1)),
                (f"madc.{half}", (1, 0)),
                (f"madc.{half}.cc", (1, 1)),
            ):
                yield InstructionForm(
                    f"{name}.{kind}",
                    FAMILY,
                    f"={width} {width} {width} {width}",
                    handler,
                    attributes,
                )


FORMS = (*_list_arithmetic(), *_list_32_bit(), *_list_packed(), *_list_carries())
