"""f16, bf16 and their pairs (PTX ISA, "Half Precision Floating Point Instructions")."""

from collections.abc import Iterator

from halfbyte.ptx.forms.float32 import join_words
from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "half"

_KINDS = ("f16", "f16x2", "bf16", "bf16x2")


def _make(name: str, kind: str, sources: int, handler: str = "") -> InstructionForm:
    width = TYPE_WIDTHS[kind]
    return InstructionForm(name, FAMILY, f"={width}" + f" {width}" * sources, handler or name)


def _list_arithmetic(kind: str) -> Iterator[InstructionForm]:
    is_f16 = kind.startswith("f16")
    for flush in ("", "ftz") if is_f16 else ("",):
        for saturate in ("", "sat") if is_f16 else ("",):
            for stem in ("add", "sub", "mul"):
                handler = join_words(stem, flush, saturate, kind)
                for rounding in ("", "rn"):
                    name = join_words(stem, rounding, flush, saturate, kind)
                    yield _make(name, kind, 2, handler)
            name = join_words("fma.rn", flush, saturate, kind)
            yield _make(name, kind, 3, join_words("fma", flush, saturate, kind))
        name = join_words("fma.rn", flush, "relu", kind)
        yield _make(name, kind, 3, join_words("fma", flush, "relu", kind))
    for relu in ("", "relu"):
        name = join_words("fma.rn.oob", relu, kind)
        yield _make(name, kind, 3, join_words("fma.oob", relu, kind))


def _list_simple(kind: str) -> Iterator[InstructionForm]:
    for flush in ("", "ftz") if kind.startswith("f16") else ("",):
        for stem in ("abs", "neg"):
            yield _make(join_words(stem, flush, kind), kind, 1)
        for stem in ("min", "max"):
            for nan in ("", "NaN"):
                for sign in ("", "xorsign.abs"):
                    yield _make(join_words(stem, flush, nan, sign, kind), kind, 2)


def _list_approximate() -> Iterator[InstructionForm]:
    for kind in ("f16", "f16x2"):
        yield _make(f"ex2.approx.{kind}", kind, 1)
        yield _make(f"tanh.approx.{kind}", kind, 1)
    for kind in ("bf16", "bf16x2"):
        yield _make(f"ex2.approx.ftz.{kind}", kind, 1)
        yield _make(f"tanh.approx.{kind}", kind, 1)


FORMS = (
    *(form for kind in _KINDS for form in _list_arithmetic(kind)),
    *(form for kind in _KINDS for form in _list_simple(kind)),
    *_list_approximate(),
)
