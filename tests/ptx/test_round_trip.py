"""Parse, print, parse again: nothing of a module gets lost."""

import pytest
from hypothesis import HealthCheck, given, settings

from halfbyte.ptx.lexer import tokenize
from halfbyte.ptx.parser import parse
from halfbyte.ptx.printer import format_module
from halfbyte.ptx.syntax import Module
from tests.ptx.random_modules import MODULES
from tests.ptx.texts import HEADER, KITCHEN_SINK, make_kernel


def test_every_construct_survives_printing() -> None:
    module = parse(KITCHEN_SINK)
    printed = format_module(module)
    assert parse(printed) == module
    assert format_module(parse(printed)) == printed


def test_printed_tokens_are_those_of_the_source() -> None:
    source = KITCHEN_SINK.replace("add .s32", "add.s32").replace("[%rd1-4]", "[%rd1+-4]")
    assert tokenize(format_module(parse(source))).texts == tokenize(source).texts


def test_a_changed_operand_makes_another_tree() -> None:
    first = parse(make_kernel("add.s32 %r1, %r2, 1;"))
    second = parse(make_kernel("add.s32 %r1, %r2, 2;"))
    assert first != second
    assert parse(make_kernel("\n\nadd.s32   %r1, %r2, 1; // same")) == first


@pytest.mark.parametrize("operand", ["{%r1, _, 0f3F800000}", "[%r1+-8]", "%p1|%p2", "!%p1", "-5"])
def test_an_operand_prints_as_written(operand: str) -> None:
    text = make_kernel(f"op.b32 {operand};")
    assert operand in format_module(parse(text))


def test_a_module_without_address_size_is_32_bit() -> None:
    assert parse(".version 1.0 .target sm_10").address_size == 32
    assert parse(HEADER).address_size == 64


@given(MODULES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_is_what_its_text_parses_to(module: Module) -> None:
    printed = format_module(module)
    assert parse(printed) == module
    assert tokenize(format_module(parse(printed))).texts == tokenize(printed).texts
