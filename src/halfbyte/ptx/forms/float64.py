"""f64 arithmetic (PTX ISA, "Floating Point Instructions")."""

from collections.abc import Iterator

from halfbyte.ptx.forms.float32 import ROUNDINGS, join_words
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "float64"


def _make(name: str, sources: int, handler: str = "") -> InstructionForm:
    return InstructionForm(name, FAMILY, "=b64" + " b64" * sources, handler or name)


def _list_forms() -> Iterator[InstructionForm]:
    for rounding in ("", *ROUNDINGS):
        full = rounding or "rn"
        for stem in ("add", "sub", "mul"):
            yield _make(join_words(stem, rounding, "f64"), 2, f"{stem}.{full}.f64")
        if rounding:
            yield _make(f"mad.{rounding}.f64", 3, f"fma.{rounding}.f64")
            yield _make(f"fma.{rounding}.f64", 3)
            yield _make(f"div.{rounding}.f64", 2)
            yield _make(f"rcp.{rounding}.f64", 1)
            yield _make(f"sqrt.{rounding}.f64", 1)
    for name in ("abs.f64", "neg.f64", "rcp.approx.ftz.f64"):
        yield _make(name, 1)
    for name in ("rsqrt.approx.f64", "rsqrt.approx.ftz.f64"):
        yield _make(name, 1)
    for name in ("min.f64", "max.f64", "copysign.f64"):
        yield _make(name, 2)


FORMS = tuple(_list_forms())
