"""Text that is no PTX, broken or made to hurt, gives a PtxError: no hang, no other exception."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import PtxError
from halfbyte.ptx.inline_calls import inline_calls
from halfbyte.ptx.parser import parse
from halfbyte.ptx.printer import format_module
from tests.ptx.texts import HEADER, KITCHEN_SINK, make_kernel

LONG = 200_000


def check_refused_or_parsed(text: str) -> bool:
    """Parse the text; True if it is PTX. Any exception but PtxError escapes."""
    try:
        module = parse(text)
    except PtxError:
        return False
    assert parse(format_module(module)) == module
    return True


def test_every_truncation_is_refused_or_a_shorter_module() -> None:
    outcomes = [
        check_refused_or_parsed(KITCHEN_SINK[:end]) for end in range(0, len(KITCHEN_SINK), 3)
    ]
    assert outcomes.count(False) > len(outcomes) // 2


def test_edited_text_gives_no_other_exception() -> None:
    source = random.Random(7)
    pieces = [*"{}()[];,.%<>|0@", '"', "\x00", "é"]
    for _ in range(300):
        position = source.randrange(len(KITCHEN_SINK))
        end = position + source.choice((0, 1, 5))
        edited = KITCHEN_SINK[:position] + source.choice(pieces) + KITCHEN_SINK[end:]
        check_refused_or_parsed(edited)


@given(st.text(max_size=60))
def test_any_text_after_a_header_is_refused_or_parsed(text: str) -> None:
    check_refused_or_parsed(HEADER + text)


@given(st.lists(st.sampled_from(KITCHEN_SINK.split()), max_size=40))
@settings(max_examples=100)
def test_shuffled_words_are_refused_or_parsed(words: list[str]) -> None:
    check_refused_or_parsed(make_kernel(" ".join(words)))


@pytest.mark.parametrize(
    "body",
    [
        "{" * 100_000,
        "}" * 1000,
        "add " + "{" * 100_000,
        "add " + "[" * 100_000,
        "call (" + "{" * 10_000,
        "add " + "(" * 100_000,
        "add " + "-" * 100_000 + "1;",
        "add 1" + "?1:1" * 1000 + ";",
        "add 1 ? " * 10_000,
        "a" * LONG,
        "add " + "9" * LONG + ";",
        "add 0x" + "f" * LONG + ";",
        "/*" + "*" * LONG,
        "/* " * (LONG // 3),
        '"' * LONG,
        '"' + "\\" * LONG,
        "." * LONG,
        "1." * LONG,
        "a." * LONG,
        "a::" * (LONG // 3),
        " " * LONG + "\x00",
        "%" * LONG,
        "#" * LONG,
        ".reg .b32 %r<" + "9" * 1000 + ">;",
        ".local .b8 x" + "[1]" * 100_000,
        ".global .b8 x = " + "{" * 100_000,
    ],
    ids=lambda text: f"{text[:12]!r}-{len(text)}",
)
def test_a_hostile_body_is_refused(body: str) -> None:
    with pytest.raises(PtxError) as caught:
        parse(make_kernel(body))
    assert len(str(caught.value)) < 300


def test_a_long_line_of_many_statements_parses() -> None:
    module = parse(make_kernel("add.s32 %r1, %r2, 1;" * 20_000))
    body = module.kernels[0].body
    assert body is not None
    assert len(body.statements) == 20_003


def test_a_billion_registers_cost_nothing() -> None:
    module = parse(make_kernel("mov.b32 %q999999998, 1;", ".reg .b32 %q<999999999>;"))
    assert inline_calls(module, module.kernels[0]).registers == {"%q999999998": "b32"}


def test_the_message_escapes_what_it_quotes() -> None:
    with pytest.raises(PtxError) as caught:
        parse(HEADER + '"\x1b[31m"')
    assert "\x1b" not in str(caught.value)
