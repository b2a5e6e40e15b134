"""Known bits: what is said to be known holds for every number that the unknown bits allow."""

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.checks import known_bits
from halfbyte.checks.known_bits import KnownBits, make_constant, make_unknown

WIDTH = 12
ONES = (1 << WIDTH) - 1
numbers = st.integers(0, ONES)


@st.composite
def values(draw: st.DrawFn) -> tuple[KnownBits, int]:
    """Return known bits and one number that has them."""
    mask, number = draw(numbers), draw(numbers)
    return KnownBits(WIDTH, mask, number & mask), number


def check_member(found: KnownBits, number: int) -> None:
    assert found.value & ~found.mask == 0
    assert number & found.mask == found.value, (found, number)


BINARY: list[tuple[Callable[..., KnownBits], Callable[[int, int], int]]] = [
    (known_bits.add, operator.add),
    (known_bits.subtract, operator.sub),
    (known_bits.multiply, operator.mul),
    (known_bits.combine_and, operator.and_),
    (known_bits.combine_or, operator.or_),
    (known_bits.combine_xor, operator.xor),
]


@pytest.mark.parametrize(("follow", "calculate"), BINARY, ids=lambda f: f.__name__)
@given(values(), values())
def test_known_bits_of_an_operation_hold(
    follow: Callable[..., KnownBits],
    calculate: Callable[[int, int], int],
    first: tuple[KnownBits, int],
    second: tuple[KnownBits, int],
) -> None:
    check_member(follow(first[0], second[0]), calculate(first[1], second[1]) & ONES)


@given(numbers, numbers)
def test_constants_give_constants(first: int, second: int) -> None:
    for follow, calculate in BINARY:
        found = follow(make_constant(first, WIDTH), make_constant(second, WIDTH))
        assert found.constant == calculate(first, second) & ONES


@given(values(), st.integers(0, WIDTH + 3))
def test_shifts_hold(value: tuple[KnownBits, int], count: int) -> None:
    known, number = value
    amount = make_constant(count, 32)
    check_member(known_bits.shift_left(known, amount), number << count & ONES)
    check_member(known_bits.shift_right(known, amount, False), number >> count)
    signed = number - (1 << WIDTH) if number >> (WIDTH - 1) else number
    check_member(known_bits.shift_right(known, amount, True), signed >> count & ONES)
    assert known_bits.shift_left(known, make_unknown(32)).mask == 0


@given(values(), values())
def test_a_join_holds_for_both(first: tuple[KnownBits, int], second: tuple[KnownBits, int]) -> None:
    joined = known_bits.join(first[0], second[0])
    check_member(joined, first[1])
    check_member(joined, second[1])


@given(values(), values(), st.sampled_from(["eq", "ne", "lt", "le", "gt", "ge", "lo", "hs"]))
def test_a_decided_comparison_is_right(
    first: tuple[KnownBits, int], second: tuple[KnownBits, int], relation: str
) -> None:
    compare = {"lo": operator.lt, "hs": operator.ge}.get(relation) or getattr(operator, relation)
    found = known_bits.compare(relation, first[0], second[0], is_signed=False).constant
    assert found in (None, int(compare(first[1], second[1])))


@given(st.integers(0, 255), values(), values(), values())
def test_a_table_of_three_inputs_holds(
    table: int, a: tuple[KnownBits, int], b: tuple[KnownBits, int], c: tuple[KnownBits, int]
) -> None:
    found = known_bits.look_up(table, (a[0], b[0], c[0]))
    number = 0
    for bit in range(WIDTH):
        row = (a[1] >> bit & 1) << 2 | (b[1] >> bit & 1) << 1 | c[1] >> bit & 1
        number |= (table >> row & 1) << bit
    check_member(found, number)


def test_a_field_is_known_where_all_its_bits_are() -> None:
    known = KnownBits(32, 0xFFFF9FFF, 0x10400480)
    assert known.constant is None
    assert known.read_field(23, 1) == 0
    assert known.read_field(17, 6) == 32
    assert known.read_field(12, 4) is None


def test_a_difference_of_an_unknown_sign_extends_to_nothing() -> None:
    known = KnownBits(8, 0x7F, 0x05)
    assert known.resize(16, is_signed=True).mask == 0x7F
    assert known.resize(16).mask == 0xFF7F
    assert make_constant(-3, 8).resize(16, is_signed=True).constant == 0xFFFD
