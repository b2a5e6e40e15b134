"""Number literals of PTX as `Immediate` records (PTX ISA, "Constants")."""

import re
import struct
from functools import lru_cache

from halfbyte.ptx.syntax import Immediate

# The constant WARP_SZ, which PTX has beside its literals.
WARP_SIZE = Immediate("WARP_SZ", 32)

_INTEGER = re.compile(
    r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<binary>[01]+)|0(?P<octal>[0-7]+)|(?P<decimal>[1-9]\d*|0))U?",
    re.ASCII,
)
_FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+", re.ASCII)
_RADIX = {"hex": 16, "binary": 2, "octal": 8, "decimal": 10}
_MAX_DIGITS = 80  # 64 binary digits and some leading zeros
_SIGN_BITS = {32: 1 << 31, 64: 1 << 63}
_ALL_BITS = (1 << 64) - 1


@lru_cache(maxsize=4096)
def decode_literal(text: str) -> Immediate | None:
    """Return the literal `text` (without a sign), None if it is none or needs over 64 bits.

    `0f` and `0d` give the pattern they spell, `1.5` and `1e3` that of a float64.
    """
    if text[:2] in ("0f", "0F") and len(text) == 10:
        return Immediate(text, int(text[2:], 16), 32)
    if text[:2] in ("0d", "0D") and len(text) == 18:
        return Immediate(text, int(text[2:], 16), 64)
    match = _INTEGER.fullmatch(text)
    if match is not None:
        radix = match.lastgroup or "decimal"
        digits = match[radix]
        value = int(digits, _RADIX[radix]) if len(digits) <= _MAX_DIGITS else _ALL_BITS + 1
        return Immediate(text, value) if value <= _ALL_BITS else None
    if _FLOAT.fullmatch(text) is None:
        return None
    return Immediate(text, int.from_bytes(struct.pack(">d", float(text))), 64)


def negate(literal: Immediate) -> Immediate:
    """Return `-literal`: of a float the sign bit is flipped."""
    if literal.is_float:
        bits = literal.bits ^ _SIGN_BITS[literal.float_bits]
    else:
        bits = -literal.bits
    return Immediate("-" + literal.text, bits, literal.float_bits)


def wrap_integer(value: int) -> int:
    """Return `value` as 64 bits hold it: unchanged where it fits, else modulo 2^64."""
    return value if -(1 << 63) <= value <= _ALL_BITS else value & _ALL_BITS
