"""What one full instruction form means to the tools: its operands, its handler, how it converges.

A form is keyed by its full dotted text (`add.sat.s32`), as the PTX ISA document spells it. The
operand pattern is a string of items separated by spaces, in textual order:

    =b32          destination register of 32 bits (b8 b16 b32 b64 b128 pred)
    b32           source: register, immediate or symbol
    =b32*4, b32*4 vector of four, `{a, b, c, d}`; a lone register is accepted for `*1`
    =pred|pred    pair `p|q`; the second may be absent
    [b32], [b64]  address `[register + offset]` with a base of that width
    [b64,{b32*3}] tensor address `[map, {c0, c1, c2}]`
    ?item         the item may be absent; it is present when more operands are left than the
                  items after it need
    label         a label, or the name of a `.branchtargets` table (its labels, in order)
    imm, func, any

Where one text has several operand shapes (`mov.b64 %rd, %rd` and `mov.b64 %rd, {%r, %r}`), the
family lists one form per shape under the same name; the first that fits an instruction is taken.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

from halfbyte.ptx.syntax import Address, Immediate, Pair, TensorAddress, Vector

Convergence = Literal["none", "aligned", "membermask"]
OperandKind = Literal["value", "pair", "address", "tensor_address", "label", "imm", "func", "any"]

WIDTHS = {"b8": 8, "b16": 16, "b32": 32, "b64": 64, "b128": 128, "pred": 1}

# The register width of every PTX type; sub-32-bit types live zero-extended in 32-bit lanes.
TYPE_WIDTHS = {
    "pred": "pred",
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), "b8"),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), "b16"),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), "b32"),
    **dict.fromkeys(("u16x2", "s16x2", "u8x4", "s8x4", "b8x4", "b16x2"), "b32"),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), "b64"),
    "b128": "b128",
}


@dataclass(frozen=True, slots=True)
class OperandPattern:
    """One item of a form's operand pattern; `kind` says how the syntax looks, `width` the bits."""

    kind: OperandKind
    width: str = "b32"
    count: int = 1
    is_vector: bool = False
    is_destination: bool = False
    is_optional: bool = False
    second_width: str = ""  # pairs: width of the second; tensor addresses: width of a coordinate


@dataclass(frozen=True, slots=True)
class InstructionForm:
    """One full instruction form and everything the tools know about it.

    `handler` names the routine of the virtual GPU's core; `attributes` are the integers that tell
    it which variant this is. `convergence` says which lanes must arrive together: all live lanes
    of the warp ("aligned"), or those in the instruction's membermask ("membermask": the last
    `b32` source of the pattern unless `membermask_operand` counts another from zero).
    """

    name: str
    family: str
    operands: str
    handler: str
    attributes: tuple[int, ...] = ()
    convergence: Convergence = "none"
    membermask_operand: int = -1
    terminates: bool = False
    # Forms of the same name whose operands are spelled otherwise (a matrix in shared or in tensor
    # memory, optional operands in the middle); `choose_form` picks by the syntax.
    alternatives: tuple["InstructionForm", ...] = ()

    @property
    def patterns(self) -> tuple[OperandPattern, ...]:
        """The parsed operand pattern."""
        return parse_operand_patterns(self.operands)


_ITEM = re.compile(
    r"(?P<optional>\?)?(?P<destination>=)?(?:"
    r"\[(?P<map>b32|b64),\{(?P<coordinate>b\d+)\*(?P<coordinates>\d)\}\]"
    r"|\[(?P<address>b32|b64)\]"
    r"|(?P<width>b8|b16|b32|b64|b128|pred)(?:\|(?P<second>b8|b16|b32|b64|pred))?(?:\*(?P<count>\d+))?"
    r"|(?P<word>label|imm|func|any))"
)


@cache
def parse_operand_patterns(text: str) -> tuple[OperandPattern, ...]:
    """Return the items of an operand pattern, e.g. of `"=b32|pred b32 ?[b64]"`.

    Raises ValueError for a pattern this language does not know: a mistake in the forms.
    """
    return tuple(_parse_item(item) for item in text.split())


def _parse_item(item: str) -> OperandPattern:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise ValueError(f"operand pattern {item!r} is not in the pattern language")
    flags: dict[str, Any] = {
        "is_destination": bool(match["destination"]),
        "is_optional": bool(match["optional"]),
    }
    if match["map"]:
        count = int(match["coordinates"])
        return OperandPattern(
            "tensor_address", match["map"], count, second_width=match["coordinate"], **flags
        )
    if match["address"]:
        return OperandPattern("address", match["address"], **flags)
    if match["second"]:
        return OperandPattern("pair", match["width"], second_width=match["second"], **flags)
    if match["width"]:
        count = int(match["count"] or 1)
        return OperandPattern("value", match["width"], count, bool(match["count"]), **flags)
    return OperandPattern(cast(OperandKind, match["word"]), **flags)


def choose_form(form: InstructionForm, operands: tuple[object, ...]) -> InstructionForm:
    """Return `form` or that of its alternatives whose operand pattern the syntax has.

    `operands` are operands of the syntax tree. Where none fits, it is `form` itself: lowering then
    says what is wrong with the operands.
    """
    if form.alternatives:
        for candidate in (form, *form.alternatives):
            if is_spelled_as(candidate.patterns, operands):
                return candidate
    return form


def is_spelled_as(patterns: tuple[OperandPattern, ...], operands: tuple[object, ...]) -> bool:
    """Whether operands of the syntax tree have the kinds, counts and optional ends of a pattern."""
    needed = sum(not pattern.is_optional for pattern in patterns)
    if not needed <= len(operands) <= len(patterns):
        return False
    return all(map(_is_operand_spelled_as, patterns, operands))


def _is_operand_spelled_as(pattern: OperandPattern, operand: object) -> bool:
    match operand:
        case Address():
            return pattern.kind in ("address", "any")
        case TensorAddress():
            return pattern.kind in ("tensor_address", "any")
        case Vector(items=items):
            return pattern.is_vector and len(items) == pattern.count
        case Immediate():
            is_scalar = pattern.kind == "value" and not pattern.is_vector
            return pattern.kind in ("imm", "any") or (is_scalar and pattern.width != "pred")
        case Pair():
            return pattern.kind == "pair"
        case _:
            is_lone = pattern.kind == "value" and (not pattern.is_vector or pattern.count == 1)
            return is_lone or pattern.kind in ("pair", "label", "func", "any")


def index_forms(*families: Iterable[InstructionForm]) -> dict[str, InstructionForm]:
    """Return the forms of all families by full name; more shapes are `alternatives` of the first.

    Raises ValueError where a name is given twice with the same operands.
    """
    shapes: dict[str, list[InstructionForm]] = {}
    for form in (form for family in families for form in family):
        same_name = shapes.setdefault(form.name, [])
        for shape in (form, *form.alternatives):
            parse_operand_patterns(shape.operands)
            if any(shape.operands == other.operands for other in same_name):
                raise ValueError(f"form {form.name!r} ({shape.operands}) is listed twice")
            same_name.append(shape)
    return {
        name: replace(first, alternatives=tuple(rest)) if rest else first
        for name, (first, *rest) in shapes.items()
    }
