"""Tables of input values: edges of every type, and seeded random ones between them."""

import numpy as np

# numpy.random.RandomState: its streams are frozen, so that inputs are the same for ever.
SEED = 20260101


def make_random(*salt: int) -> np.random.RandomState:
    """Return a generator of its own for one program."""
    return np.random.RandomState([SEED, *salt])


def integer_edges(bits: int) -> np.ndarray:
    """Return the edge values of unsigned `bits`-bit words, shift counts included."""
    top = 1 << (bits - 1)
    mask = (1 << bits) - 1
    values = {0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256}
    values |= {top - 1, top, top + 1, mask, mask - 1, mask - 31, 0x5A5A5A5A5A5A5A5A & mask}
    values |= {0x0123456789ABCDEF & mask, 0xFEDCBA9876543210 & mask, (top >> 1) + 1, mask >> 1}
    if bits > 16:
        values |= {0x7FFF, 0x8000, 0xFFFF, 0x10000, 0xFFFF8000 & mask}
    if bits > 32:
        values |= {0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32}
    return np.array(sorted(value & mask for value in values), f"u{bits // 8}")


# Binary32 patterns: zeros, denormals, normals at rounding midpoints, infinities, NaNs.
FLOAT32_EDGES = np.array(
    [
        "00000000",
        "80000000",
        "00000001",
        "80000001",
        "00000002",
        "00400000",
        "007fffff",
        "807fffff",
        "00800000",
        "80800000",
        "00800001",
        "01000000",
        "33800000",
        "34000000",
        "3f7fffff",
        "3f800000",
        "bf800000",
        "3f800001",
        "3fc00000",
        "40000000",
        "40400000",
        "c0a00000",
        "4b000001",
        "4b7fffff",
        "4b800000",
        "4f000000",
        "cf000001",
        "7e800000",
        "7f7fffff",
        "ff7fffff",
        "7f800000",
        "ff800000",
        "7fc00000",
        "ffc12345",
        "7f800001",
    ],
    dtype=object,
)
FLOAT32_EDGES = np.array([int(text, 16) for text in FLOAT32_EDGES], np.uint32)

FLOAT64_EDGES = np.array(
    [
        int(text, 16)
        for text in [
            "0000000000000000",
            "8000000000000000",
            "0000000000000001",
            "800fffffffffffff",
            "0010000000000000",
            "3fefffffffffffff",
            "3ff0000000000000",
            "bff0000000000001",
            "3ff8000000000000",
            "4000000000000000",
            "4008000000000000",
            "36a0000000000000",
            "3690000000000000",
            "380fffffe0000000",
            "47efffffe0000000",
            "47efffffefffffff",
            "47effffff0000000",
            "41dfffffffc00000",
            "c1e0000000200000",
            "41efffffffe00000",
            "43e0000000000000",
            "c3e0000000000000",
            "43f0000000000000",
            "3fe0000000000000",
            "bfe0000000000000",
            "4004000000000000",
            "3ff0000010000000",
            "3ff0000030000000",
            "7fefffffffffffff",
            "ffefffffffffffff",
            "7ff0000000000000",
            "fff0000000000000",
            "7ff8000000000000",
            "fff4000000000001",
        ]
    ],
    np.uint64,
)

FLOAT16_EDGES = np.array(
    [
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x0200, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x0401, 0x1400),
        *(0x3800, 0x3BFF, 0x3C00, 0xBC00, 0x3C01, 0x3E00, 0x4000, 0x4200, 0xC500, 0x6400, 0x6BFF),
        *(0x7800, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE11, 0x7C01, 0x7FFF),
    ],
    np.uint16,
)
BFLOAT16_EDGES = np.array(
    [
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x0040, 0x007F, 0x807F, 0x0080, 0x8080, 0x0081, 0x3B80),
        *(0x3F00, 0x3F7F, 0x3F80, 0xBF80, 0x3F81, 0x3FC0, 0x4000, 0x4040, 0xC0A0, 0x4300, 0x4B80),
        *(0x7E80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7FFF),
    ],
    np.uint16,
)


def pairs(edges: np.ndarray, count: int, random: np.random.RandomState) -> dict[str, np.ndarray]:
    """Return columns a, b, c of `count` rows: the pairs of edges (all if they fit), then random.

    c is an edge or a random word by turns.
    """
    first, second = (grid.reshape(-1) for grid in np.meshgrid(edges, edges, indexing="ij"))
    if len(first) > count:
        chosen = random.permutation(len(first))[: count * 3 // 4]
        first, second = first[chosen], second[chosen]
    bits = edges.dtype.itemsize * 8
    rest = count - len(first)
    words = random.bytes(rest * 3 * bits // 8)
    words = np.frombuffer(words, edges.dtype).reshape(3, rest)
    third = edges[random.randint(0, len(edges), count)]
    third[len(first) :] = words[2]
    return {
        "a": np.concatenate([first, words[0]]),
        "b": np.concatenate([second, words[1]]),
        "c": third,
    }


def near_floats(count: int, random: np.random.RandomState) -> np.ndarray:
    """Return binary32 patterns of modest magnitude: what approximate functions are made for."""
    values = random.standard_normal(count) * np.exp2(random.randint(-12, 12, count))
    return values.astype(np.float32).view(np.uint32)


def small_integers(
    shape: tuple[int, ...], random: np.random.RandomState, low: int = -4, high: int = 5
) -> np.ndarray:
    """Return float32 small integers: products and sums of them are exact in every format."""
    return random.randint(low, high, shape).astype(np.float32)
