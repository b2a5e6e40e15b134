"""popc, clz, bfind, fns, brev, bfe, bfi, bmsk, szext against the loops of the PTX ISA document."""

import numpy as np
import pytest

from .lane_cases import Case, check_cases, make_pairs, map_values
from .test_integer import UNSIGNED, make_edges, signed

NOT_FOUND = 0xFFFFFFFF


def read_count(value: int, bits: int) -> int:
    """Return a position or length: modulo 256 in 32-bit forms, whole in 64-bit ones (H200)."""
    return value & 0xFF if bits == 32 else value


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_and_reversing(bits: int) -> None:
    a, _ = make_pairs(make_edges(bits), 300, bits)
    dtype = UNSIGNED[bits]
    narrow = a >> np.arange(len(a), dtype=dtype) % dtype(bits)  # leading zeros of every length

    def find(x: int, is_signed: bool) -> int:
        if is_signed and x >> (bits - 1):
            x ^= (1 << bits) - 1
        return x.bit_length() - 1 if x else NOT_FOUND

    def shift_of(x: int, is_signed: bool) -> int:
        found = find(x, is_signed)
        return found if found == NOT_FOUND else bits - 1 - found

    cases = [
        Case(f"popc.b{bits} {{o}}, %i0", map_values(lambda x: x.bit_count(), np.uint32, narrow)),
        Case(
            f"clz.b{bits} {{o}}, %i0",
            map_values(lambda x: bits - x.bit_length(), np.uint32, narrow),
        ),
        Case(
            f"brev.b{bits} {{o}}, %i0",
            map_values(lambda x: int(f"{x:0{bits}b}"[::-1], 2), dtype, narrow),
        ),
    ]
    for kind, is_signed in ((f"u{bits}", False), (f"s{bits}", True)):
        for name, function in (("bfind", find), ("bfind.shiftamt", shift_of)):
            expected = map_values(lambda x, f=function, s=is_signed: f(x, s), np.uint32, narrow)
            cases.append(Case(f"{name}.{kind} {{o}}, %i0", expected))
    check_cases([narrow], cases)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_extracting_follows_the_document(kind: str) -> None:
    bits, is_signed = int(kind[1:]), kind[0] == "s"
    a, _ = make_pairs(make_edges(bits), 800, bits)
    rng = np.random.default_rng(1)
    position = rng.integers(0, 300, len(a), np.uint32)
    length = rng.integers(0, 300, len(a), np.uint32)
    position[::2] %= bits + 1
    length[::3] %= bits + 1

    def extract(x: int, pos: int, count: int) -> int:
        pos, count, top = read_count(pos, bits), read_count(count, bits), bits - 1
        sign = 0 if not is_signed or count == 0 else x >> min(pos + count - 1, top) & 1
        result = 0
        for i in range(bits):
            bit = x >> (pos + i) & 1 if i < count and pos + i <= top else sign
            result |= bit << i
        return result

    expected = map_values(extract, UNSIGNED[bits], a, position, length)
    check_cases([a, position, length], [Case(f"bfe.{kind} {{o}}, %i0, %i1, %i2", expected)])


@pytest.mark.parametrize("bits", [32, 64])
def test_inserting_follows_the_document(bits: int) -> None:
    a, b = make_pairs(make_edges(bits), 800, bits)
    rng = np.random.default_rng(2)
    position = rng.integers(0, 300, len(a), np.uint32)
    length = rng.integers(0, 300, len(a), np.uint32)
    position[::2] %= bits + 1
    length[::3] %= bits + 1

    def insert(x: int, y: int, pos: int, count: int) -> int:
        pos, count = read_count(pos, bits), read_count(count, bits)
        for i in range(count):
            if pos + i < bits:
                y = y & ~(1 << (pos + i)) | (x >> i & 1) << (pos + i) if i < bits else y
        return y

    expected = map_values(insert, UNSIGNED[bits], a, b, position, length)
    check_cases(
        [a, b, position, length], [Case(f"bfi.b{bits} {{o}}, %i0, %i1, %i2, %i3", expected)]
    )


def test_masks_and_extensions() -> None:
    a, _ = make_pairs(make_edges(32), 400, 4)
    count = np.arange(len(a), dtype=np.uint32) % 40
    first = np.arange(len(a), dtype=np.uint32) // 40 % 40

    def mask(start: int, width: int, wraps: bool) -> int:
        start, width = (start & 31, width & 31) if wraps else (min(start, 32), min(width, 32))
        return ((1 << width) - 1) << start

    def extend(x: int, width: int, wraps: bool, is_signed: bool) -> int:
        width = width & 31 if wraps else min(width, 32)
        if width == 0:
            return 0
        return signed(x, width) if is_signed else x & ((1 << width) - 1)

    cases = []
    for mode, wraps in (("clamp", False), ("wrap", True)):
        cases.append(
            Case(
                f"bmsk.{mode}.b32 {{o}}, %i2, %i1",
                map_values(lambda s, w, m=wraps: mask(s, w, m), np.uint32, first, count),
            )
        )
        for kind, is_signed in (("u32", False), ("s32", True)):
            cases.append(
                Case(
                    f"szext.{mode}.{kind} {{o}}, %i0, %i1",
                    map_values(
                        lambda x, w, m=wraps, s=is_signed: extend(x, w, m, s), np.uint32, a, count
                    ),
                )
            )
    check_cases([a, count, first], cases)


def test_nth_set_bit_is_counted_from_the_start() -> None:
    rng = np.random.default_rng(3)
    mask = rng.integers(0, 1 << 32, 1024, np.uint32)
    start = rng.integers(0, 32, 1024, np.uint32)
    offset = rng.integers(-12, 13, 1024).astype(np.int32).view(np.uint32)

    def find(bits: int, begin: int, count: int) -> int:
        count = signed(count, 32)
        if count == 0:
            return begin if bits >> begin & 1 else NOT_FOUND
        positions = range(begin, 32) if count > 0 else range(begin, -1, -1)
        set_bits = [p for p in positions if bits >> p & 1]
        return set_bits[abs(count) - 1] if len(set_bits) >= abs(count) else NOT_FOUND

    expected = map_values(find, np.uint32, mask, start, offset)
    check_cases([mask, start, offset], [Case("fns.b32 {o}, %i0, %i1, %i2", expected)])
