"""Float values as patterns of the types of matrix instructions, independent of the package."""

import numpy as np


def _encode_eight_bits(values: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Return the nearest 8-bit patterns; ties to even; values must be in the normal range or 0."""
    bias = (1 << (exponent_bits - 1)) - 1
    magnitude = np.abs(values.astype(np.float64))
    exponent = np.floor(np.log2(np.maximum(magnitude, 2.0 ** (1 - bias))))
    scaled = np.rint(magnitude / np.exp2(exponent - mantissa_bits)).astype(np.int64)
    carry = scaled >> (mantissa_bits + 1)
    exponent, scaled = exponent + carry, scaled >> carry
    is_normal = scaled >> mantissa_bits
    field = np.where(is_normal, exponent + bias, 0).astype(np.int64)
    code = field << mantissa_bits | (scaled & ((1 << mantissa_bits) - 1))
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)


def encode(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the patterns of float32 `values` in `kind`, one array element each."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        word = values.view(np.uint32)
        return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    if kind == "f64":
        return values.astype(np.float64).view(np.uint64)
    if kind == "tf32":
        return (values.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)
    if kind in ("e4m3", "e5m2"):
        return _encode_eight_bits(values, int(kind[1]), int(kind[3]))
    if kind in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8)
    return values.view(np.uint32)
