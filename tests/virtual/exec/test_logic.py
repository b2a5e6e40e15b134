"""Logic, shifts, lop3 and prmt against Python's integers."""

import numpy as np
import pytest

from .lane_cases import Case, check_cases, make_pairs, map_values
from .test_integer import UNSIGNED, make_edges, signed


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bitwise_operations_and_shifts(bits: int) -> None:
    a, b = make_pairs(make_edges(bits), 300, bits)
    dtype = UNSIGNED[bits]
    amount = np.arange(len(a), dtype=np.uint32) % (bits + 4)
    amount[-3:] = (255, 1 << 20, 0xFFFFFFFF)
    cases = [
        Case(f"and.b{bits} {{o}}, %i0, %i1", a & b),
        Case(f"or.b{bits} {{o}}, %i0, %i1", a | b),
        Case(f"xor.b{bits} {{o}}, %i0, %i1", a ^ b),
        Case(f"not.b{bits} {{o}}, %i0", ~a),
        Case(f"cnot.b{bits} {{o}}, %i0", (a == 0).astype(dtype)),
        Case(
            f"shl.b{bits} {{o}}, %i0, %i2",
            map_values(lambda x, n: x << min(n, bits), dtype, a, amount),
        ),
        Case(
            f"shr.u{bits} {{o}}, %i0, %i2",
            map_values(lambda x, n: x >> min(n, bits), dtype, a, amount),
        ),
        Case(
            f"shr.b{bits} {{o}}, %i0, %i2",
            map_values(lambda x, n: x >> min(n, bits), dtype, a, amount),
        ),
        Case(
            f"shr.s{bits} {{o}}, %i0, %i2",
            map_values(lambda x, n: signed(x, bits) >> min(n, bits), dtype, a, amount),
        ),
    ]
    check_cases([a, b, amount], cases)


def test_funnel_shifts_move_bits_between_words() -> None:
    a, b = make_pairs(make_edges(32), 300, 1)
    c = np.arange(len(a), dtype=np.uint32) % 70

    def shift(x: int, y: int, n: int, is_left: bool, wraps: bool) -> int:
        n = n & 31 if wraps else min(n, 32)
        pair = y << 32 | x
        return (pair << n) >> 32 if is_left else pair >> n

    cases = [
        Case(
            f"shf.{direction}.{mode}.b32 {{o}}, %i0, %i1, %i2",
            map_values(
                lambda x, y, n, d=direction, m=mode: shift(x, y, n, d == "l", m == "wrap"),
                np.uint32,
                a,
                b,
                c,
            ),
        )
        for direction in "lr"
        for mode in ("clamp", "wrap")
    ]
    check_cases([a, b, c], cases)


@pytest.mark.parametrize("table", [0x00, 0x80, 0xE8, 0x96, 0x6A, 0x0F, 0xCA, 0xFE, 0xFF])
def test_lop3_looks_every_bit_up(table: int) -> None:
    a, b = make_pairs(make_edges(32), 200, 1)
    c = np.roll(a, 3)

    def look_up(x: int, y: int, z: int) -> int:
        return sum(
            (table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i
            for i in range(32)
        )

    expected = map_values(look_up, np.uint32, a, b, c)
    odd = np.arange(len(a)) % 2 == 1
    cases = [
        Case(f"lop3.b32 {{o}}, %i0, %i1, %i2, {table}", expected),
        Case(f"lop3.or.b32 _|{{o}}, %i0, %i1, %i2, {table}, %p7", (expected != 0) | odd),
        Case(f"lop3.and.b32 _|{{o}}, %i0, %i1, %i2, {table}, %p7", (expected != 0) & odd),
        Case(f"lop3.and.b32 _|{{o}}, %i0, %i1, %i2, {table}, !%p7", (expected != 0) & ~odd),
    ]
    check_cases([a, b, c], cases)


# PTX ISA, "prmt": byte sources d.b3 d.b2 d.b1 d.b0 for selector values 0, 1, 2, 3.
PRMT_TABLES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def test_prmt_picks_bytes() -> None:
    a, b = make_pairs(make_edges(32), 600, 1)
    c = np.random.default_rng(7).integers(0, 1 << 32, len(a), np.uint32)

    def pick(x: int, y: int, selector: int) -> int:
        data = (y << 32 | x).to_bytes(8, "little")
        result = []
        for i in range(4):
            nibble = selector >> (4 * i) & 15
            byte = data[nibble & 7]
            result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(result), "little")

    def pick_mode(x: int, y: int, selector: int, mode: str) -> int:
        data = (y << 32 | x).to_bytes(8, "little")
        sources = PRMT_TABLES[mode][selector & 3]
        return int.from_bytes(bytes(data[int(s)] for s in sources), "big")

    cases = [Case("prmt.b32 {o}, %i0, %i1, %i2", map_values(pick, np.uint32, a, b, c))]
    cases += [
        Case(
            f"prmt.b32.{mode} {{o}}, %i0, %i1, %i2",
            map_values(lambda x, y, z, m=mode: pick_mode(x, y, z, m), np.uint32, a, b, c),
        )
        for mode in PRMT_TABLES
    ]
    check_cases([a, b, c], cases)
