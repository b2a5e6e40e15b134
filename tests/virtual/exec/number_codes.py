"""Values of the narrow number formats, written from their definitions (OCP MX, PTX ISA)."""

import numpy as np


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))


# Every finite value by code; NaNs and infinities are left out (their entry is NaN).
MINIFLOATS = {
    "e4m3": [_minifloat(c, 4, 3, 7) if c & 0x7F != 0x7F else np.nan for c in range(256)],
    "e5m2": [_minifloat(c, 5, 2, 15) if c & 0x7C != 0x7C else np.nan for c in range(256)],
    "e2m3": [_minifloat(c, 2, 3, 1) for c in range(64)],
    "e3m2": [_minifloat(c, 3, 2, 3) for c in range(64)],
    "e2m1": [_minifloat(c, 2, 1, 1) for c in range(16)],
    "ue8m0": [2.0 ** (c - 127) for c in range(255)] + [np.nan],
    "ue4m3": [_minifloat(c, 4, 3, 7) for c in range(127)] + [np.nan],
}
BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "ue8m0": 8, "ue4m3": 8}


def pick_codes(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...], limit: float = 4.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return random codes of a format and their values; magnitudes of floats stay within `limit`.

    Floats of 16 bits and more get small integers, so that sums of products are exact.
    """
    if kind in MINIFLOATS:
        values = np.array(MINIFLOATS[kind])
        scale = 2.0 ** (0 if kind.startswith("u") else -3)
        legal = np.flatnonzero(
            (np.abs(values) <= limit) & (values / scale == np.round(values / scale))
        )
        codes = rng.choice(legal, shape)
        return codes.astype(np.uint8), values[codes]
    if kind in ("s8", "u8", "s4", "u4", "b1"):
        bits = int(kind[1])
        low = -(1 << (bits - 1)) if kind[0] == "s" else 0
        values = rng.integers(low, low + (1 << bits), shape)
        return (values & ((1 << bits) - 1)).astype(np.uint8), values.astype(np.float64)
    values = rng.integers(-8, 9, shape).astype(np.float64)
    return encode_float(kind, values), values


def encode_float(kind: str, values: np.ndarray) -> np.ndarray:
    """Return the bits of f16, bf16, tf32, f32 or f64 values that are exact in the format."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    if kind == "f64":
        return values.astype(np.float64).view(np.uint64)
    words = values.astype(np.float32).view(np.uint32)
    return (words >> 16).astype(np.uint16) if kind == "bf16" else words


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return 32-bit words of the codes along the last axis, the first in the lowest bits."""
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint64)
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    return (grouped << shifts).sum(axis=-1).astype(np.uint32)
