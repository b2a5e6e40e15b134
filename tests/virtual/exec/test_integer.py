"""Integer arithmetic against Python's integers."""

from collections.abc import Callable

import numpy as np
import pytest

from .lane_cases import Case, check_cases, make_pairs, map_values

UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def make_edges(bits: int) -> np.ndarray:
    """Return values where integer arithmetic of this width tends to go wrong."""
    top = 1 << bits
    values = [0, 1, 2, 3, 7, top // 2 - 1, top // 2, top // 2 + 1, top - 2, top - 1, top // 3]
    return np.array([*values, 0xFF, 0x80, 0x5A5A], dtype=UNSIGNED[bits])


def signed(value: int, bits: int) -> int:
    """Return the two's complement meaning of the low `bits` of a value."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def divide(a: int, b: int, bits: int) -> tuple[int, int]:
    """Return quotient and remainder, truncating; by zero both are all ones, as on an H200."""
    if b == 0:
        return (1 << bits) - 1, (1 << bits) - 1
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b


def read_kind(kind: str) -> tuple[int, Callable[[int], int]]:
    """Return the bits of an integer type and how it reads a bit pattern."""
    bits = int(kind[1:])
    return bits, (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_arithmetic_is_that_of_python(kind: str) -> None:
    bits, read = read_kind(kind)
    a, b = make_pairs(make_edges(bits), 300, bits)
    c = np.roll(b, 7)
    dtype = UNSIGNED[bits]
    two: dict[str, Callable[[int, int], int]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul.lo": lambda x, y: x * y,
        "mul.hi": lambda x, y: x * y >> bits,
        "div": lambda x, y: divide(x, y, bits)[0],
        "rem": lambda x, y: divide(x, y, bits)[1],
        "min": min,
        "max": max,
    }
    three: dict[str, Callable[[int, int, int], int]] = {
        "mad.lo": lambda x, y, z: x * y + z,
        "mad.hi": lambda x, y, z: (x * y >> bits) + z,
        "sad": lambda x, y, z: z + abs(x - y),
    }
    cases = [
        Case(
            f"{name}.{kind} {{o}}, %i0, %i1",
            map_values(lambda x, y, f=f: f(read(x), read(y)), dtype, a, b),
        )
        for name, f in two.items()
    ] + [
        Case(
            f"{name}.{kind} {{o}}, %i0, %i1, %i2",
            map_values(lambda x, y, z, f=f: f(read(x), read(y), read(z)), dtype, a, b, c),
        )
        for name, f in three.items()
    ]
    if kind[0] == "s":
        cases.append(Case(f"abs.{kind} {{o}}, %i0", map_values(lambda x: abs(read(x)), dtype, a)))
        cases.append(Case(f"neg.{kind} {{o}}, %i0", map_values(lambda x: -x, dtype, a)))
    check_cases([a, b, c], cases)


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products_keep_every_bit(kind: str) -> None:
    bits, read = read_kind(kind)
    a, b = make_pairs(make_edges(bits), 300, bits)
    wide = UNSIGNED[2 * bits]
    c = np.random.default_rng(5).integers(0, np.iinfo(wide).max, len(a), wide, endpoint=True)
    check_cases(
        [a, b, c],
        [
            Case(
                f"mul.wide.{kind} {{o}}, %i0, %i1",
                map_values(lambda x, y: read(x) * read(y), wide, a, b),
            ),
            Case(
                f"mad.wide.{kind} {{o}}, %i0, %i1, %i2",
                map_values(lambda x, y, z: read(x) * read(y) + z, wide, a, b, c),
            ),
        ],
    )


def clamp(value: int, low: int, high: int) -> int:
    """Return the value moved into [low, high]."""
    return max(low, min(high, value))


def test_saturating_32_bit_forms_stop_at_the_ends() -> None:
    a, b = make_pairs(make_edges(32), 300, 1)
    c = np.roll(a, 11)
    low, high = -(1 << 31), (1 << 31) - 1

    def s(value: int) -> int:
        return signed(value, 32)

    def product24(x: int, y: int) -> int:
        return signed(x, 24) * signed(y, 24)

    cases = [
        Case(
            "add.sat.s32 {o}, %i0, %i1",
            map_values(lambda x, y: clamp(s(x) + s(y), low, high), np.uint32, a, b),
        ),
        Case(
            "sub.sat.s32 {o}, %i0, %i1",
            map_values(lambda x, y: clamp(s(x) - s(y), low, high), np.uint32, a, b),
        ),
        Case(
            "mad.hi.sat.s32 {o}, %i0, %i1, %i2",
            map_values(
                lambda x, y, z: clamp((s(x) * s(y) >> 32) + s(z), low, high), np.uint32, a, b, c
            ),
        ),
        Case(
            "mad24.hi.sat.s32 {o}, %i0, %i1, %i2",
            map_values(
                lambda x, y, z: clamp((product24(x, y) >> 16) + s(z), low, high),
                np.uint32,
                a,
                b,
                c,
            ),
        ),
        Case(
            "min.relu.s32 {o}, %i0, %i1",
            map_values(lambda x, y: max(0, min(s(x), s(y))), np.uint32, a, b),
        ),
        Case(
            "max.relu.s32 {o}, %i0, %i1",
            map_values(lambda x, y: max(0, max(s(x), s(y))), np.uint32, a, b),
        ),
    ]
    check_cases([a, b, c], cases)


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products_ignore_the_upper_byte(kind: str) -> None:
    a, b = make_pairs(make_edges(32), 300, 2)
    c = np.roll(a, 3)

    def product(x: int, y: int) -> int:
        if kind == "s32":
            return signed(x, 24) * signed(y, 24)
        return (x & 0xFFFFFF) * (y & 0xFFFFFF)

    cases = []
    for half, shift in (("lo", 0), ("hi", 16)):
        cases.append(
            Case(
                f"mul24.{half}.{kind} {{o}}, %i0, %i1",
                map_values(lambda x, y, n=shift: product(x, y) >> n, np.uint32, a, b),
            )
        )
        cases.append(
            Case(
                f"mad24.{half}.{kind} {{o}}, %i0, %i1, %i2",
                map_values(lambda x, y, z, n=shift: (product(x, y) >> n) + z, np.uint32, a, b, c),
            )
        )
    check_cases([a, b, c], cases)


def split(value: int, bits: int, is_signed: bool) -> list[int]:
    """Return the parts of a packed 32-bit value, lowest first."""
    parts = [value >> at & ((1 << bits) - 1) for at in range(0, 32, bits)]
    return [signed(part, bits) for part in parts] if is_signed else parts


def join(parts: list[int], bits: int) -> int:
    """Return the parts packed, lowest first."""
    return sum((part & ((1 << bits) - 1)) << (bits * i) for i, part in enumerate(parts))


@pytest.mark.parametrize("kind", ["u16x2", "s16x2", "u8x4", "s8x4"])
def test_packed_integers_do_not_carry_into_each_other(kind: str) -> None:
    bits, is_signed = int(kind[1:].split("x")[0]), kind[0] == "s"
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    a, b = make_pairs(make_edges(32), 400, bits)
    operations: dict[str, Callable[[int, int], int]] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "add.sat": lambda x, y: clamp(x + y, low, high),
        "sub.sat": lambda x, y: clamp(x - y, low, high),
        "min": min,
        "max": max,
    }
    if kind == "s16x2":
        operations["min.relu"] = lambda x, y: max(0, min(x, y))
        operations["max.relu"] = lambda x, y: max(0, max(x, y))

    def apply(f: Callable[[int, int], int], x: int, y: int) -> int:
        pairs = zip(split(x, bits, is_signed), split(y, bits, is_signed), strict=True)
        return join([f(*pair) for pair in pairs], bits)

    cases = [
        Case(
            f"{name}.{kind} {{o}}, %i0, %i1",
            map_values(lambda x, y, f=f: apply(f, x, y), np.uint32, a, b),
        )
        for name, f in operations.items()
    ]
    cases.append(
        Case(
            f"neg.{kind} {{o}}, %i0",
            map_values(lambda x: join([-p for p in split(x, bits, False)], bits), np.uint32, a),
        )
    )
    check_cases([a, b], cases)


@pytest.mark.parametrize("first", ["u32", "s32"])
@pytest.mark.parametrize("second", ["u32", "s32"])
def test_dot_products_sum_the_bytes(first: str, second: str) -> None:
    a, b = make_pairs(make_edges(32), 400, 9)
    c = np.roll(b, 5)
    is_first, is_second = first == "s32", second == "s32"

    def dot4(x: int, y: int, z: int) -> int:
        pairs = zip(split(x, 8, is_first), split(y, 8, is_second), strict=True)
        return z + sum(p * q for p, q in pairs)

    def dot2(x: int, y: int, z: int, start: int) -> int:
        bytes_of_y = split(y, 8, is_second)[start : start + 2]
        pairs = zip(split(x, 16, is_first), bytes_of_y, strict=True)
        return z + sum(p * q for p, q in pairs)

    check_cases(
        [a, b, c],
        [
            Case(
                f"dp4a.{first}.{second} {{o}}, %i0, %i1, %i2",
                map_values(dot4, np.uint32, a, b, c),
            ),
            Case(
                f"dp2a.lo.{first}.{second} {{o}}, %i0, %i1, %i2",
                map_values(lambda x, y, z: dot2(x, y, z, 0), np.uint32, a, b, c),
            ),
            Case(
                f"dp2a.hi.{first}.{second} {{o}}, %i0, %i1, %i2",
                map_values(lambda x, y, z: dot2(x, y, z, 2), np.uint32, a, b, c),
            ),
        ],
    )


@pytest.mark.parametrize("bits", [32, 64])
def test_carry_chains_make_numbers_of_twice_the_width(bits: int) -> None:
    dtype = UNSIGNED[bits]
    low_a, low_b = make_pairs(make_edges(bits), 300, 3)
    high_a, high_b = np.roll(low_b, 5), np.roll(low_a, 9)
    mask = (1 << bits) - 1

    def halves(f: Callable[[int, int], int]) -> tuple[np.ndarray, np.ndarray]:
        def whole(la: int, lb: int, ha: int, hb: int) -> int:
            return f(ha << bits | la, hb << bits | lb)

        columns = (low_a, low_b, high_a, high_b)
        low = map_values(lambda *v: whole(*v) & mask, dtype, *columns)
        return low, map_values(lambda *v: whole(*v) >> bits & mask, dtype, *columns)

    total, difference = halves(lambda x, y: x + y), halves(lambda x, y: x - y)
    kind = f"u{bits}"
    body = {
        f"add.cc.{kind} {{o}}, %i0, %i1": total[0],
        f"addc.{kind} {{o}}, %i2, %i3": total[1],
        f"sub.cc.{kind} {{o}}, %i0, %i1": difference[0],
        f"subc.{kind} {{o}}, %i2, %i3": difference[1],
    }
    cases = [Case(text, expected) for text, expected in body.items()]
    product_low = map_values(lambda x, y, z: x * y + z, dtype, low_a, low_b, high_a)
    product_high = map_values(
        lambda x, y, z, w: ((x * y + z) >> bits) + w, dtype, low_a, low_b, high_a, high_b
    )
    cases += [
        Case(f"mad.lo.cc.{kind} {{o}}, %i0, %i1, %i2", product_low),
        Case(f"madc.hi.{kind} {{o}}, %i0, %i1, %i3", product_high),
    ]
    check_cases([low_a, low_b, high_a, high_b], cases)
