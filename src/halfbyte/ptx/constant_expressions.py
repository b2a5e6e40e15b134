"""Constant expressions of PTX (`(1 << 4) + 3`), evaluated while parsing.

Operators, precedence and 64-bit results are those of the PTX ISA, "Constant Expressions".
"""

from collections.abc import Callable

from halfbyte.ptx.constants import WARP_SIZE, negate, wrap_integer
from halfbyte.ptx.cursor import Cursor
from halfbyte.ptx.lexer import DIRECTIVE, NUMBER, WORD
from halfbyte.ptx.syntax import Immediate

_PRECEDENCE = {
    "||": 1,
    "&&": 2,
    "|": 3,
    "^": 4,
    "&": 5,
    **dict.fromkeys(("==", "!="), 6),
    **dict.fromkeys(("<", "<=", ">", ">="), 7),
    **dict.fromkeys(("<<", ">>"), 8),
    **dict.fromkeys(("+", "-"), 9),
    **dict.fromkeys(("*", "/", "%"), 10),
}
FACTOR_PRECEDENCE = 10
OPERATORS = frozenset(_PRECEDENCE) | {"?"}


def _divide(left: int, right: int) -> int:
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


_BINARY: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a) or bool(b)),
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "<<": lambda a, b: a << b if 0 <= b < 64 else 0,
    ">>": lambda a, b: a >> b if 0 <= b < 64 else 0,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
}


def parse_constant(cursor: Cursor, minimum: int = 1) -> Immediate:
    """Return the value of the expression at the cursor, of operators that bind at least `minimum`.

    Floats may carry a sign and nothing else. PtxError for anything that is no constant.
    """
    left = _parse_unary(cursor)
    while (precedence := _PRECEDENCE.get(cursor.kind, 0)) >= minimum and precedence:
        operator = cursor.kind
        if left.is_float:
            cursor.fail("no operator after a floating-point constant")
        cursor.index += 1
        right = parse_constant(cursor, precedence + 1)
        if right.is_float or (operator in "/%" and right.bits == 0):
            cursor.index -= 1
            cursor.fail("an integer that the operator can take")
        value = wrap_integer(_BINARY[operator](left.bits, right.bits))
        left = Immediate(f"{left.text} {operator} {right.text}", value)
    if minimum == 1 and cursor.kind == "?" and not left.is_float:
        return _parse_choice(cursor, left)
    return left


def _parse_choice(cursor: Cursor, condition: Immediate) -> Immediate:
    cursor.enter()
    cursor.expect("?")
    first = parse_constant(cursor)
    cursor.expect(":")
    second = parse_constant(cursor)
    cursor.leave()
    chosen = first if condition.bits else second
    text = f"{condition.text} ? {first.text} : {second.text}"
    return Immediate(text, chosen.bits, chosen.float_bits)


def _parse_unary(cursor: Cursor) -> Immediate:
    kind = cursor.kind
    if kind == NUMBER:
        return cursor.expect_literal("a number of at most 64 bits")
    if kind == WORD and cursor.text == WARP_SIZE.text:
        cursor.index += 1
        return WARP_SIZE
    if kind == "(":
        return _parse_parenthesis(cursor)
    if kind not in ("-", "+", "~", "!"):
        cursor.fail("a constant")
    cursor.enter()
    cursor.index += 1
    operand = _parse_unary(cursor)
    cursor.leave()
    if kind == "-":
        return negate(operand)
    if kind == "+":
        return Immediate("+" + operand.text, operand.bits, operand.float_bits)
    if operand.is_float:
        cursor.index -= 1
        cursor.fail("an integer")
    return Immediate(kind + operand.text, ~operand.bits if kind == "~" else int(not operand.bits))


def _parse_parenthesis(cursor: Cursor) -> Immediate:
    cursor.enter()
    cursor.expect("(")
    if cursor.kind == DIRECTIVE and cursor.text in (".s64", ".u64"):
        cast = cursor.text
        cursor.index += 1
        cursor.expect(")")
        inner = _parse_unary(cursor)
        wrapped = inner.bits & ((1 << 64) - 1)
        if cast == ".s64" and wrapped >> 63:
            wrapped -= 1 << 64
        result = Immediate(f"({cast}){inner.text}", inner.bits if inner.is_float else wrapped)
    else:
        inner = parse_constant(cursor)
        cursor.expect(")")
        result = Immediate(f"({inner.text})", inner.bits, inner.float_bits)
    cursor.leave()
    return result
