"""cvt to and from e4m3, e5m2, e2m3, e3m2, e2m1, ue8m0 and s2f6 (PTX ISA, "cvt").

Attributes: .satfinite, .relu, .scaled::n2::ue8m0. Compilers spell .relu before or after
.satfinite; both are listed.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.convert import list_modifier_orders
from halfbyte.ptx.forms.float32 import join_words
from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "narrow_convert"

NARROW_FORMATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
SCALED = "scaled::n2::ue8m0"


def _pair_width(kind: str) -> str:
    return "b8" if kind == "e2m1" else "b16"


def _make(
    name: str, operands: str, handler: str, words: frozenset[str], scaled: str
) -> InstructionForm:
    attributes = (int("satfinite" in words), int("relu" in words), int(bool(scaled)))
    return InstructionForm(name, FAMILY, operands + (" b16" if scaled else ""), handler, attributes)


def _list_to_narrow() -> Iterator[InstructionForm]:
    for kind in (*NARROW_FORMATS, "s2f6"):
        for spelling, words in list_modifier_orders():
            if "satfinite" not in words:
                continue
            for scaled in ("", SCALED):
                for source, operands in (("f32", "b32 b32"), ("f16x2", "b32"), ("bf16x2", "b32")):
                    for rounding in ("rn", "rz"):
                        if kind == "s2f6" and (rounding == "rz" or source == "f16x2"):
                            continue
                        name = join_words("cvt", rounding, spelling, scaled, f"{kind}x2", source)
                        handler = join_words(
                            "cvt", "" if kind == "s2f6" else rounding, f"{kind}x2", source
                        )
                        width = _pair_width(kind)
                        yield _make(name, f"={width} {operands}", handler, words, scaled)


def _list_from_narrow() -> Iterator[InstructionForm]:
    for kind in (*NARROW_FORMATS, "s2f6"):
        for spelling, words in list_modifier_orders():
            for scaled in ("", SCALED):
                for target in ("f16x2", "bf16x2"):
                    name = join_words("cvt.rn", spelling, scaled, target, f"{kind}x2")
                    operands = f"=b32 {_pair_width(kind)}"
                    yield _make(name, operands, f"cvt.{target}.{kind}x2", words, scaled)


def _list_stochastic() -> Iterator[InstructionForm]:
    for kind in NARROW_FORMATS:
        for spelling, words in list_modifier_orders():
            if "satfinite" not in words:
                continue
            name = join_words("cvt.rs", spelling, f"{kind}x4", "f32")
            width = "b16" if kind == "e2m1" else "b32"
            yield _make(name, f"={width} b32*4 b32", f"cvt.rs.{kind}x4.f32", words, "")


def _list_scales() -> Iterator[InstructionForm]:
    for rounding in ("rz", "rp"):
        for saturate in ("", "satfinite"):
            words = frozenset({saturate})
            for source, operands in (("f32", "b32 b32"), ("bf16x2", "b32")):
                name = join_words("cvt", rounding, saturate, "ue8m0x2", source)
                handler = f"cvt.{rounding}.ue8m0x2.{source}"
                yield _make(name, f"=b16 {operands}", handler, words, "")
    yield _make("cvt.rn.bf16x2.ue8m0x2", "=b32 b16", "cvt.bf16x2.ue8m0x2", frozenset(), "")


FORMS = (*_list_to_narrow(), *_list_from_narrow(), *_list_stochastic(), *_list_scales())
