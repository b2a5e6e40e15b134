"""Number literals and constant expressions."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import PtxError
from halfbyte.ptx.constant_expressions import parse_constant
from halfbyte.ptx.constants import decode_literal
from halfbyte.ptx.cursor import Cursor
from halfbyte.ptx.lexer import END, tokenize
from halfbyte.ptx.syntax import Immediate


def evaluate(text: str) -> Immediate:
    cursor = Cursor(tokenize(text))
    value = parse_constant(cursor)
    assert cursor.kind == END
    return value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("17", 17),
        ("017", 15),
        ("0b101", 5),
        ("0xFfU", 255),
        ("18446744073709551615", 2**64 - 1),
        ("-5", -5),
        ("- 5", -5),
        ("~0", -1),
        ("!3", 0),
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 - 2 - 1", 4),
        ("1 << 4 | 0b11", 19),
        ("-7 / 2", -3),
        ("-7 % 2", -1),
        ("1 << 64", 0),
        ("1 << 100000000000", 0),
        ("0xFFFFFFFFFFFFFFFF + 1", 0),
        ("(.s64)0xFFFFFFFFFFFFFFFF", -1),
        ("(.u64)-1", 2**64 - 1),
        ("3 > 2 ? 10 : 20", 10),
        ("WARP_SZ - 1", 31),
    ],
)
def test_an_integer_expression_has_the_value_of_c(text: str, value: int) -> None:
    result = evaluate(text)
    assert (result.bits, result.float_bits) == (value, 0)
    assert evaluate(result.text) == result


@pytest.mark.parametrize(
    ("text", "bits", "float_bits"),
    [
        ("0f3F800000", 0x3F800000, 32),
        ("-0f3F800000", 0xBF800000, 32),
        ("0DBFF0000000000000", 0xBFF0000000000000, 64),
        ("1.5", 0x3FF8000000000000, 64),
        ("-1.5", 0xBFF8000000000000, 64),
        ("1e1", 0x4024000000000000, 64),
        (".5", 0x3FE0000000000000, 64),
        ("2.", 0x4000000000000000, 64),
    ],
)
def test_a_float_keeps_its_bit_pattern(text: str, bits: int, float_bits: int) -> None:
    result = evaluate(text)
    assert (result.bits, result.float_bits, result.is_float) == (bits, float_bits, True)


@given(st.floats(width=32))
def test_every_float32_pattern_decodes(value: float) -> None:
    (bits,) = struct.unpack(">I", struct.pack(">f", value))
    literal = decode_literal(f"0f{bits:08X}")
    assert literal is not None
    assert literal.bits == bits
    assert math.isnan(value) or struct.unpack(">f", literal.bits.to_bytes(4))[0] == value


@pytest.mark.parametrize(
    "text",
    [
        "08",
        "1_0",
        "1_0.5",
        "0x",
        "0xg",
        "1x",
        "0b2",
        "18446744073709551616",
        "0x" + "f" * 17,
        "9" * 5000,
        "0f123",
    ],
)
def test_no_number_is_made_of_anything_else(text: str) -> None:
    assert decode_literal(text) is None


@pytest.mark.parametrize("text", ["1 / 0", "1.5 + 1", "1 + 1.5", "~1.5", "(", "1 +", "(1", "1 ? 2"])
def test_an_expression_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(PtxError, match="line 1, column"):
        evaluate(text)
