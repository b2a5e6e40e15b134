"""Integers of which some bits are known: the values that the checks trace through PTX.

Every operation keeps a bit only where it holds for all values of the unknown ones; what is not
covered gives fewer known bits, never wrong ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownBits:
    """An integer of `width` bits; `mask` marks the known ones, `value` has them (others zero)."""

    width: int
    mask: int
    value: int

    @property
    def constant(self) -> int | None:
        """The number, unsigned, where every bit is known; else None."""
        return self.value if self.mask == _ones(self.width) else None

    def read_field(self, first: int, bits: int) -> int | None:
        """Return the bits from `first` on as a number, None unless all of them are known."""
        field = _ones(bits) << first
        return (self.value & field) >> first if self.mask & field == field else None

    def resize(self, width: int, is_signed: bool = False) -> "KnownBits":
        """Return the value cut, or extended with zeros or with its sign bit."""
        if width <= self.width:
            ones = _ones(width)
            return KnownBits(width, self.mask & ones, self.value & ones)
        upper = _ones(width) & ~_ones(self.width)
        sign = self.read_field(self.width - 1, 1) if is_signed else 0
        if sign is None:
            return KnownBits(width, self.mask, self.value)
        return KnownBits(width, self.mask | upper, self.value | (upper if sign else 0))


def _ones(width: int) -> int:
    return (1 << width) - 1


def make_constant(number: int, width: int) -> KnownBits:
    """Return a number of which every bit is known; negative ones in two's complement."""
    return KnownBits(width, _ones(width), number & _ones(width))


def make_unknown(width: int) -> KnownBits:
    """Return a number of which nothing is known."""
    return KnownBits(width, 0, 0)


def join(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return what holds for both."""
    mask = first.mask & second.mask & ~(first.value ^ second.value)
    return KnownBits(first.width, mask, first.value & mask)


def invert(operand: KnownBits) -> KnownBits:
    """Return the bitwise complement."""
    return KnownBits(operand.width, operand.mask, ~operand.value & operand.mask)


def combine_and(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return the bitwise and: a known zero on either side decides."""
    zeros = (first.mask & ~first.value) | (second.mask & ~second.value)
    ones = first.value & second.value
    return KnownBits(first.width, zeros | ones, ones)


def combine_or(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return the bitwise or."""
    return invert(combine_and(invert(first), invert(second)))


def combine_xor(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return the bitwise exclusive or."""
    mask = first.mask & second.mask
    return KnownBits(first.width, mask, (first.value ^ second.value) & mask)


def shift_left(operand: KnownBits, amount: KnownBits) -> KnownBits:
    """Return `operand << amount`; PTX clamps amounts above the width."""
    count = amount.constant
    if count is None:
        return make_unknown(operand.width)
    count = min(count, operand.width)
    ones = _ones(operand.width)
    mask = (operand.mask << count | _ones(count)) & ones
    return KnownBits(operand.width, mask, operand.value << count & ones)


def shift_right(operand: KnownBits, amount: KnownBits, is_signed: bool) -> KnownBits:
    """Return `operand >> amount`, filled with zeros or with the sign."""
    count = amount.constant
    if count is None:
        return make_unknown(operand.width)
    count = min(count, operand.width)
    extended = operand.resize(operand.width + count, is_signed)
    return KnownBits(
        operand.width,
        extended.mask >> count & _ones(operand.width),
        extended.value >> count & _ones(operand.width),
    )


def add(first: KnownBits, second: KnownBits, carry: int = 0) -> KnownBits:
    """Return the sum: where a bit and the carry into it are known.

    The carries are those of the smallest and the largest sum that the known bits allow; a bit of
    the carry that is the same in both is certain.
    """
    ones = _ones(first.width)
    low = first.value + second.value + carry
    first_high = first.value | (~first.mask & ones)
    second_high = second.value | (~second.mask & ones)
    high = first_high + second_high + carry
    carry_low = low ^ first.value ^ second.value
    carry_high = high ^ first_high ^ second_high
    mask = first.mask & second.mask & ~(carry_low ^ carry_high) & ones
    return KnownBits(first.width, mask, low & mask)


def subtract(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return the difference."""
    return add(first, invert(second), 1)


def multiply(first: KnownBits, second: KnownBits) -> KnownBits:
    """Return the low bits of the product: known where a constant factor's partial sums are."""
    factor, other = (first.constant, second) if first.constant is not None else (None, first)
    if factor is None:
        factor, other = second.constant, first
    if factor is None:
        return make_unknown(first.width)
    total = make_constant(0, first.width)
    for bit in range(factor.bit_length()):
        if factor >> bit & 1:
            total = add(total, shift_left(other, make_constant(bit, 32)))
    return total


def choose(predicate: KnownBits, if_true: KnownBits, if_false: KnownBits) -> KnownBits:
    """Return one of two by a predicate of width 1; what both share where it is unknown."""
    if predicate.constant is None:
        return join(if_true, if_false)
    return if_true if predicate.constant else if_false


def compare(relation: str, first: KnownBits, second: KnownBits, is_signed: bool) -> KnownBits:
    """Return the predicate `first relation second` (eq ne lt le gt ge, and lo ls hi hs)."""
    differ = first.mask & second.mask & (first.value ^ second.value)
    if relation in ("eq", "ne") and differ:
        return make_constant(int(relation == "ne"), 1)
    left, right = first.constant, second.constant
    if left is None or right is None:
        return make_unknown(1)
    if is_signed and relation not in ("lo", "ls", "hi", "hs"):
        left, right = _read_signed(left, first.width), _read_signed(right, first.width)
    results = {
        "eq": left == right,
        "ne": left != right,
        **dict.fromkeys(("lt", "lo"), left < right),
        **dict.fromkeys(("le", "ls"), left <= right),
        **dict.fromkeys(("gt", "hi"), left > right),
        **dict.fromkeys(("ge", "hs"), left >= right),
    }
    return make_constant(int(results[relation]), 1) if relation in results else make_unknown(1)


def _read_signed(number: int, width: int) -> int:
    return number - (1 << width) if number >> (width - 1) & 1 else number


def look_up(table: int, inputs: tuple[KnownBits, KnownBits, KnownBits]) -> KnownBits:
    """Return the bitwise function of three inputs that `lop3`'s table names."""
    result = make_constant(0, inputs[0].width)
    for row in range(8):
        if not table >> row & 1:
            continue
        term = make_constant(-1, inputs[0].width)
        for position, operand in enumerate(inputs):
            is_set = row >> (2 - position) & 1
            term = combine_and(term, operand if is_set else invert(operand))
        result = combine_or(result, term)
    return result
