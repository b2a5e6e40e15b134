"""Tokens: what a word carries, what numbers are, what is skipped."""

import pytest

from halfbyte.errors import PtxError
from halfbyte.ptx.lexer import DIRECTIVE, NUMBER, STRING, WORD, tokenize


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("cp.async.bulk.tensor.4d.shared::cluster.global", WORD),
        ("%tid.x", WORD),
        ("$L__BB0_2", WORD),
        ("_", WORD),
        ("%r1$2", WORD),
        (".reqntid", DIRECTIVE),
        ("0f3F800000", NUMBER),
        ("0d3FF0000000000000", NUMBER),
        ("1.5e-3", NUMBER),
        ("0x10U", NUMBER),
        ("8.8", NUMBER),
        ('"a \\" // b"', STRING),
        ("<<", "<<"),
        ("%", "%"),
    ],
)
def test_a_token_is_one_piece(text: str, kind: str) -> None:
    tokens = tokenize(f" {text}\n")
    assert tokens.texts == [text, ""]
    assert tokens.kinds == [kind, "end"]


def test_directives_without_spaces_are_apart() -> None:
    assert tokenize(".reg.pred P1;").texts == [".reg", ".pred", "P1", ";", ""]


def test_comments_and_line_markers_are_no_tokens() -> None:
    source = 'a // b\n/* c * / \n d */ e\n# 1 "x.c"\n#line 3\nf'
    assert tokenize(source).texts == ["a", "e", "f", ""]


def test_lines_count_from_one() -> None:
    tokens = tokenize("a\n\n  b c\nd")
    assert [tokens.find_line(index) for index in range(4)] == [1, 3, 3, 4]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n /* b", r"line 2, column 2: found '/\*', expected a comment that is closed"),
        ('a "b\n"', "line 1, column 3: .* a string that is closed on its line"),
        ("a\n\x00b", r"line 2, column 1: found '\\\\x00', expected PTX text"),
        ("`", "line 1, column 1"),
    ],
)
def test_an_error_names_line_column_and_text(source: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        tokenize(source)
