"""The operands of PTX instructions, from tokens."""

from halfbyte.ptx.constant_expressions import FACTOR_PRECEDENCE, OPERATORS, parse_constant
from halfbyte.ptx.constants import WARP_SIZE, decode_literal
from halfbyte.ptx.cursor import Cursor
from halfbyte.ptx.lexer import NUMBER, WORD
from halfbyte.ptx.special_registers import is_special_register
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    Element,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Vector,
)

_SINK = Sink()


def parse_operand(cursor: Cursor) -> Operand:
    """Return the operand at the cursor; PtxError where none stands."""
    kind = cursor.kinds[cursor.index]
    if kind == WORD:
        return _parse_word(cursor)
    if kind == NUMBER:
        return _parse_number(cursor)
    if kind == "[":
        return _parse_brackets(cursor)
    if kind == "{":
        return Vector(_parse_list(cursor, "}"))
    if kind == "!" and cursor.kinds[cursor.index + 1] == WORD:
        cursor.index += 1
        return Negated(cursor.expect_register())
    if kind in ("-", "+", "~", "!", "("):
        return parse_constant(cursor)
    cursor.fail("an operand")


def parse_call_operand(cursor: Cursor) -> Operand:
    """Return the operand at the cursor of a call, where parentheses are lists."""
    if cursor.kind == "(":
        return ArgumentList(_parse_list(cursor, ")"))
    return parse_operand(cursor)


def make_word_operand(word: str) -> Operand | None:
    """Return what a word means as an operand, None for what cannot be one (`a::b`)."""
    if word == "_":
        return _SINK
    if word == WARP_SIZE.text:
        return WARP_SIZE
    if "::" in word:
        return None
    if "." in word and not is_special_register(word):
        name, _, component = word.rpartition(".")
        return Element(Register(name), component)
    return Register(word) if word[0] == "%" else Symbol(word)


def _parse_word(cursor: Cursor) -> Operand:
    word = cursor.texts[cursor.index]
    operand = cursor.word_operands.get(word)
    if operand is None:
        operand = make_word_operand(word)
        if operand is None:
            cursor.fail("an operand")
        cursor.word_operands[word] = operand
    cursor.index += 1
    following = cursor.kinds[cursor.index]
    if following in (",", ";", "]"):
        return operand
    if following == "|":
        return _parse_pair(cursor, operand)
    if following in ("+", "-") and type(operand) is Symbol:
        return SymbolOffset(operand.name, parse_offset(cursor))
    return operand


def _parse_pair(cursor: Cursor, first: Operand) -> Pair:
    if isinstance(first, Symbol):
        first = Register(first.name)
    if not isinstance(first, Register | Sink):
        cursor.fail("`,` or `;`: only registers and `_` make a pair")
    cursor.expect("|")
    second = cursor.expect_register("a register or `_`")
    return Pair(first, _SINK if second.name == "_" else second)


def _parse_number(cursor: Cursor) -> Immediate:
    if cursor.kinds[cursor.index + 1] in OPERATORS:
        return parse_constant(cursor)
    literal = decode_literal(cursor.texts[cursor.index])
    if literal is None:
        cursor.fail("a number of at most 64 bits")
    cursor.index += 1
    return literal


def parse_offset(cursor: Cursor) -> int:
    """Return the sum of the `+4`, `+-8`, `-8` at the cursor, 0 where none stands."""
    offset = 0
    while cursor.kind in ("+", "-"):
        sign = 1 if cursor.kind == "+" else -1
        cursor.index += 1
        term = parse_constant(cursor, FACTOR_PRECEDENCE)
        if term.is_float:
            cursor.index -= 1
            cursor.fail("an offset in bytes")
        offset += sign * term.bits
    return offset


def _parse_list(cursor: Cursor, close: str) -> tuple[Operand, ...]:
    cursor.enter()
    cursor.index += 1
    items: list[Operand] = []
    if cursor.kind != close:
        items.append(parse_operand(cursor))
        while cursor.accept(","):
            items.append(parse_operand(cursor))
    cursor.expect(close, f"`,` or `{close}`")
    cursor.leave()
    return tuple(items)


def _parse_brackets(cursor: Cursor) -> Address | TensorAddress:
    cursor.enter()
    cursor.index += 1
    target: Register | Element | Symbol | Immediate
    if cursor.kind == WORD:
        word = make_word_operand(cursor.text)
        if not isinstance(word, Register | Element | Symbol):
            cursor.fail("an address")
        target = word
        cursor.index += 1
        offset = parse_offset(cursor)
    else:
        target, offset = parse_constant(cursor), 0
    address = Address(target, offset)
    items: list[Operand] = []
    while cursor.accept(","):
        items.append(parse_operand(cursor))
    cursor.expect("]", "`+`, `,` or `]`")
    cursor.leave()
    if items:
        return TensorAddress(address, items[0], tuple(items[1:]))
    if cursor.accept_directive(".unified"):
        return Address(target, offset, True)
    return address
