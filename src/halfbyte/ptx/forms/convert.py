"""cvt between integers, f16, bf16, tf32, f32 and f64; f16x2 and bf16x2; cvt.pack.

Attributes of the general handler `cvt`: source and target type (positions in CONVERT_TYPES),
rounding of the result (position in RESULT_ROUNDINGS), rounding to an integer (0 none, then
position in INTEGER_ROUNDINGS plus one), .ftz, .sat, .satfinite, .relu. Of the pair handlers:
.satfinite, .relu. Of cvt.pack: bits and signedness of the target.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.float32 import join_words
from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm

FAMILY = "convert"

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
CONVERT_TYPES = (*INTEGERS, "f16", "bf16", "f32", "f64", "tf32")
RESULT_ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
_DIRECTED = ("rn", "rz", "rm", "rp")
_FLOATS = ("f16", "bf16", "f32", "f64")
_PRECISION = {"bf16": 8, "f16": 11, "f32": 24, "f64": 53}
# Forms with a loop of their own.
_FAST = {
    "cvt.rn.f32.s32",
    "cvt.rn.f32.u32",
    "cvt.f32.f16",
    "cvt.f32.bf16",
    "cvt.rn.f16.f32",
    "cvt.rn.bf16.f32",
    *(f"cvt.{rounding}.f64.{kind}64" for rounding in _DIRECTED for kind in "us"),
}


def make_cvt(
    name: str,
    target: str,
    source: str,
    rounding: str = "rn",
    integral: str = "",
    modifiers: frozenset[str] = frozenset(),
) -> InstructionForm:
    """Return the form of one conversion by the general handler, or by its own fast one."""
    operands = f"={TYPE_WIDTHS[target]} {TYPE_WIDTHS[source]}"
    if name in _FAST:
        return InstructionForm(name, FAMILY, operands, name)
    if (source, target) == ("bf16", "f32") and not integral and not any(modifiers):
        return InstructionForm(name, FAMILY, operands, "cvt.f32.bf16")  # exact: any rounding
    attributes = (
        CONVERT_TYPES.index(source),
        CONVERT_TYPES.index(target),
        RESULT_ROUNDINGS.index(rounding),
        INTEGER_ROUNDINGS.index(integral) + 1 if integral else 0,
        *(int(word in modifiers) for word in ("ftz", "sat", "satfinite", "relu")),
    )
    return InstructionForm(name, FAMILY, operands, "cvt", attributes)


def _holds(target: str, source: str) -> bool:
    """Return whether an integer type has every value of another: .sat then means nothing."""
    bits, other = int(target[1:]), int(source[1:])
    return (target[0] == source[0] and bits >= other) or (target[0] == "s" and bits > other)


def _list_between_integers() -> Iterator[InstructionForm]:
    for target in INTEGERS:
        for source in INTEGERS:
            for saturate in ("",) if _holds(target, source) else ("", "sat"):
                name = join_words("cvt", saturate, target, source)
                operands = f"={TYPE_WIDTHS[target]} {TYPE_WIDTHS[source]}"
                yield InstructionForm(name, FAMILY, operands, name)


def _list_integers_and_floats() -> Iterator[InstructionForm]:
    for integer in INTEGERS:
        for real in _FLOATS:
            flushes = ("", "ftz") if real == "f32" else ("",)
            saturates = ("",) if real == "bf16" else ("", "sat")
            for flush in flushes:
                for saturate in saturates:
                    words = frozenset({flush, saturate})
                    for rounding in _DIRECTED:
                        name = join_words("cvt", rounding, flush, saturate, real, integer)
                        yield make_cvt(name, real, integer, rounding, "", words)
                    for integral in INTEGER_ROUNDINGS:
                        name = join_words("cvt", integral, flush, saturate, integer, real)
                        yield make_cvt(name, integer, real, "rn", integral, words)


def _list_between_floats() -> Iterator[InstructionForm]:
    for target in _FLOATS:
        for source in _FLOATS:
            is_exact = _PRECISION[target] > _PRECISION[source] and target != "f16"
            roundings: tuple[str, ...] = ("",) if is_exact else _DIRECTED
            if (target, source) == ("f32", "bf16"):
                roundings = ("", *_DIRECTED)
            for flush in ("", "ftz") if "f32" in (target, source) else ("",):
                for saturate in ("",) if "bf16" in (target, source) else ("", "sat"):
                    words = frozenset({flush, saturate})
                    if target == source:
                        for integral in ("", *INTEGER_ROUNDINGS):
                            name = join_words("cvt", integral, flush, saturate, target, source)
                            yield make_cvt(name, target, source, "rn", integral, words)
                        continue
                    for rounding in roundings:
                        name = join_words("cvt", rounding, flush, saturate, target, source)
                        yield make_cvt(name, target, source, rounding or "rn", "", words)


def list_modifier_orders() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield every spelling of .relu and .satfinite together, both orders, with its words."""
    yield "", frozenset()
    yield "relu", frozenset({"relu"})
    yield "satfinite", frozenset({"satfinite"})
    yield "relu.satfinite", frozenset({"relu", "satfinite"})
    yield "satfinite.relu", frozenset({"relu", "satfinite"})


def _list_with_modifiers() -> Iterator[InstructionForm]:
    """Yield the conversions from f32 that know .relu and .satfinite."""
    for spelling, words in list_modifier_orders():
        for target in ("f16", "bf16", "tf32"):
            for rounding in ("rn", "rz", "rna") if target == "tf32" else ("rn", "rz"):
                if not spelling and target != "tf32":
                    continue
                name = join_words("cvt", rounding, spelling, target, "f32")
                yield make_cvt(name, target, "f32", rounding, "", words)
        attributes = (int("satfinite" in words), int("relu" in words))
        for target in ("f16x2", "bf16x2"):
            for rounding in ("rn", "rz", "rs"):
                yield InstructionForm(
                    join_words("cvt", rounding, spelling, target, "f32"),
                    FAMILY,
                    "=b32 b32 b32" + (" b32" if rounding == "rs" else ""),
                    f"cvt.{rounding}.{target}.f32",
                    attributes,
                )


def _list_packs() -> Iterator[InstructionForm]:
    for bits in (2, 4, 8, 16):
        for sign in "us":
            name = f"cvt.pack.sat.{sign}{bits}.s32"
            attributes = (bits, int(sign == "s"))
            if bits == 16:
                yield InstructionForm(name, FAMILY, "=b32 b32 b32", "cvt.pack", attributes)
            else:
                yield InstructionForm(
                    f"{name}.b32", FAMILY, "=b32 b32 b32 b32", "cvt.pack", attributes
                )


FORMS = (
    *_list_between_integers(),
    *_list_integers_and_floats(),
    *_list_between_floats(),
    *_list_with_modifiers(),
    *_list_packs(),
)
