"""What one PTX instruction computes from values of which some bits are known.

Integer moves, arithmetic, logic, comparisons and conversions are followed (PTX ISA, sections of
these names); the result of anything else is unknown.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from halfbyte.checks import known_bits
from halfbyte.checks.known_bits import KnownBits, make_constant
from halfbyte.ptx.syntax import Address, Instruction, Operand, Register, Sink, Vector

Results: TypeAlias = list[tuple[Register | Sink, KnownBits]] | None
ReadOperand: TypeAlias = Callable[[Operand, int], KnownBits]  # operand, width wanted

_WIDTHS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16}
_WIDTHS |= {f"{sign}{width}": width for sign in "bus" for width in (32, 64)}
_BINARY: dict[str, Callable[[KnownBits, KnownBits], KnownBits]] = {
    "add": known_bits.add,
    "sub": known_bits.subtract,
    "and": known_bits.combine_and,
    "or": known_bits.combine_or,
    "xor": known_bits.combine_xor,
    "mul": known_bits.multiply,
}
# Modifiers that keep the low bits of an integer sum or product as they are.
_PLAIN_WORDS = frozenset(("lo", "rn"))


def find_results(instruction: Instruction, read: ReadOperand) -> Results:
    """Return (destination, value) pairs, None where the instruction is not followed.

    Values have the width of the instruction's type.
    """
    family, *words = instruction.opcode.split(".")
    follow = _FAMILIES.get(family)
    if follow is None or not words:
        return None
    return follow(words, instruction.operands, read)


def _type_of(words: Sequence[str]) -> tuple[int, bool] | None:
    """Return width and signedness of the last word; None unless it is an integer type."""
    width = _WIDTHS.get(words[-1])
    return None if width is None else (width, words[-1].startswith("s"))


def _one(target: Operand, value: KnownBits) -> Results:
    return [(target, value)] if isinstance(target, Register | Sink) else None


def _follow_move(words: Sequence[str], operands: Sequence[Operand], read: ReadOperand) -> Results:
    kind = _type_of(words)
    if kind is None or len(operands) != 2:
        return None
    width, target, source = kind[0], operands[0], operands[1]
    if isinstance(source, Vector):
        value = _pack([read(item, width // len(source.items)) for item in source.items])
    else:
        value = read(source, width)
    if not isinstance(target, Vector):
        return _one(target, value)
    part = width // len(target.items)
    return [
        (item, known_bits.shift_right(value, make_constant(i * part, 32), False).resize(part))
        for i, item in enumerate(target.items)
        if isinstance(item, Register | Sink)
    ]


def _pack(parts: Sequence[KnownBits]) -> KnownBits:
    width = mask = value = 0
    for part in parts:
        mask |= part.mask << width
        value |= part.value << width
        width += part.width
    return KnownBits(width, mask, value)


def _follow_binary(
    family: str, words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    kind = _type_of(words)
    if kind is None or len(operands) != 3:
        return None
    width, is_signed = kind
    if words[:-1] == ["wide"]:
        first, second = (read(o, width).resize(2 * width, is_signed) for o in operands[1:])
        return _one(operands[0], known_bits.multiply(first, second))
    if not _PLAIN_WORDS.issuperset(words[:-1]):
        return None
    return _one(operands[0], _BINARY[family](read(operands[1], width), read(operands[2], width)))


def _make_binary(family: str) -> Callable[..., Results]:
    return lambda words, operands, read: _follow_binary(family, words, operands, read)


def _follow_multiply_add(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    if len(operands) != 4:
        return None
    product = _follow_binary("mul", words, operands[:3], read)
    if not product:
        return None
    target, value = product[0]
    return _one(target, known_bits.add(value, read(operands[3], value.width)))


def _follow_shift(
    is_left: bool, words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    kind = _type_of(words)
    if kind is None or len(words) != 1 or len(operands) != 3:
        return None
    width, is_signed = kind
    value, amount = read(operands[1], width), read(operands[2], 32)
    if is_left:
        return _one(operands[0], known_bits.shift_left(value, amount))
    return _one(operands[0], known_bits.shift_right(value, amount, is_signed))


def _follow_not(words: Sequence[str], operands: Sequence[Operand], read: ReadOperand) -> Results:
    kind = _type_of(words)
    if kind is None or len(operands) != 2:
        return None
    return _one(operands[0], known_bits.invert(read(operands[1], kind[0])))


def _follow_select(words: Sequence[str], operands: Sequence[Operand], read: ReadOperand) -> Results:
    kind = _type_of(words)
    if kind is None or len(operands) != 4:
        return None
    first, second = (read(operand, kind[0]) for operand in operands[1:3])
    return _one(operands[0], known_bits.choose(read(operands[3], 1), first, second))


def _follow_compare(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    kind = _type_of(words)
    if kind is None or len(words) != 2 or len(operands) != 3:
        return None
    first, second = (read(operand, kind[0]) for operand in operands[1:])
    return _one(operands[0], known_bits.compare(words[0], first, second, kind[1]))


def _follow_convert(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    if len(words) != 2 or len(operands) != 2:  # no saturation, no rounding
        return None
    target, source = _type_of(words[:1]), _type_of(words[1:])
    if target is None or source is None:
        return None
    return _one(operands[0], read(operands[1], source[0]).resize(target[0], source[1]))


def _follow_address_conversion(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    """Keep the number: checks follow addresses back to their variable, whatever window they use."""
    kind = _type_of(words)
    if kind is None or len(operands) != 2:
        return None
    return _one(operands[0], read(operands[1], kind[0]))


def _follow_map_address(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    """Keep the offset of a shared::cluster address and forget the CTA rank above it."""
    kind = _type_of(words)
    if kind is None or len(operands) != 3 or isinstance(operands[1], Address):
        return None
    value = read(operands[1], kind[0])
    low = (1 << 24) - 1
    return _one(operands[0], KnownBits(value.width, value.mask & low, value.value & low))


def _follow_look_up(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    if words != ["b32"] or len(operands) != 5:
        return None
    table = read(operands[4], 32).constant
    if table is None:
        return None
    first, second, third = (read(operand, 32) for operand in operands[1:4])
    return _one(operands[0], known_bits.look_up(table, (first, second, third)))


def _follow_shuffle(
    words: Sequence[str], operands: Sequence[Operand], read: ReadOperand
) -> Results:
    """A bit that is the same in every lane is the same in the lane that is read."""
    if len(words) != 3 or words[-1] != "b32" or not isinstance(operands[0], Register):
        return None
    return _one(operands[0], read(operands[1], 32))


_FAMILIES: dict[str, Callable[..., Results]] = {
    "mov": _follow_move,
    **{family: _make_binary(family) for family in _BINARY},
    "mad": _follow_multiply_add,
    "shl": lambda *arguments: _follow_shift(True, *arguments),
    "shr": lambda *arguments: _follow_shift(False, *arguments),
    "not": _follow_not,
    "selp": _follow_select,
    "setp": _follow_compare,
    "cvt": _follow_convert,
    "cvta": _follow_address_conversion,
    "mapa": _follow_map_address,
    "lop3": _follow_look_up,
    "shfl": _follow_shuffle,
}
