"""The quantization rules once more, in NumPy with ml_dtypes' codecs; shares no code with halfbyte.

Each function takes float32 [rows, columns] with whole blocks and returns unpacked codes
[rows, columns] uint8 and the stored scales.
"""

import ml_dtypes
import numpy as np

F32 = np.float32
ELEMENTS = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
}
E2M1, E4M3 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn


def encode(values: np.ndarray, dtype: type) -> np.ndarray:
    largest = F32(ml_dtypes.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype).view(np.uint8)


def decode(codes: np.ndarray, dtype: type) -> np.ndarray:
    return codes.view(dtype).astype(F32)


def split(x: np.ndarray, block: int) -> np.ndarray:
    return x.reshape(x.shape[0], x.shape[1] // block, block)


def global_scale(x: np.ndarray, e4m3_max: float = 448.0) -> np.float32:
    amax = np.abs(x).max(initial=0.0)
    return F32(amax) / F32(6 * e4m3_max) if amax else F32(1)


def nvfp4(
    x: np.ndarray, g: np.float32, is_unrounded: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    blocks = split(x, 16)
    amax = np.abs(blocks).max(-1)
    stored = encode(amax / F32(6) / g, E4M3)
    divisor = amax / F32(6) if is_unrounded else decode(stored, E4M3) * g
    safe = np.where(stored == 0, F32(1), divisor)[..., None]
    codes = np.where((stored == 0)[..., None], 0, encode(blocks / safe, E2M1))
    return codes.reshape(x.shape).astype(np.uint8), stored


def mx(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The floor rule; tensors without zero blocks."""
    blocks = split(x, 32)
    largest = float(ml_dtypes.finfo(ELEMENTS[name]).max)
    exponent = np.frexp(np.abs(blocks).max(-1))[1] - np.frexp(largest)[1]
    codes = encode(np.ldexp(blocks, -exponent[..., None]).astype(F32), ELEMENTS[name])
    return codes.reshape(x.shape), (exponent + 127).astype(np.uint8)


def integer(
    x: np.ndarray, largest: int, is_signed: bool, scale_dtype: type = np.float16
) -> tuple[np.ndarray, np.ndarray]:
    blocks = split(x, 64)
    amax = (np.abs(blocks) if is_signed else np.maximum(blocks, 0)).max(-1)
    scale = np.minimum(amax / F32(largest), F32(ml_dtypes.finfo(scale_dtype).max))
    scale = scale.astype(scale_dtype)
    scale[scale == 0] = 1
    least = -largest - 1 if is_signed else 0
    codes = np.clip(np.rint(blocks / scale.astype(F32)[..., None]), least, largest)
    return (codes.astype(np.int8).view(np.uint8) & 15).reshape(x.shape), scale


def tree_error(blocks: np.ndarray, values: np.ndarray, divisor: np.ndarray) -> np.ndarray:
    """Squared error of each block, added up in halves."""
    terms = blocks - values * divisor[..., None]
    terms = terms * terms
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms[..., 0]


def search(blocks: np.ndarray, candidates: list, quantize) -> tuple[np.ndarray, np.ndarray]:
    """Try (stored, divisor, is_legal) candidates in order; the first least error wins."""
    best = None
    for stored, divisor, is_legal in candidates:
        codes, values = quantize(blocks / divisor[..., None])
        error = tree_error(blocks, values, divisor)
        if best is None:
            best = [error, stored, codes]
            continue
        wins = (error < best[0]) & is_legal
        best[0] = np.where(wins, error, best[0])
        best[1] = np.where(wins, stored, best[1])
        best[2] = np.where(wins[..., None], codes, best[2])
    return best[2].reshape(blocks.shape[0], -1), best[1]


def search_nvfp4(x: np.ndarray, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Tensors without zero and flushed blocks."""
    blocks = split(x, 16)
    first = encode(np.abs(blocks).max(-1) / F32(6) / g, E4M3).astype(int)
    candidates = []
    for offset in (0, -2, -1, 1, 2, 3, 4, 5, 6):
        stored = first + offset
        is_legal = (stored >= 1) & (stored <= 0x7E)
        stored = np.clip(stored, 1, 0x7E).astype(np.uint8)
        candidates.append((stored, decode(stored, E4M3) * g, is_legal))

    def quantize(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = encode(scaled, E2M1)
        return codes, decode(codes, E2M1)

    return search(blocks, candidates, quantize)


def search_mx(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    blocks = split(x, 32)
    _, first = mx(x, name)
    candidates = []
    for offset in (0, -2, -1, 1):
        stored = first.astype(int) + offset
        divisor = np.ldexp(F32(1), stored - 127).astype(F32)
        candidates.append((stored.astype(np.uint8), divisor, np.ones(stored.shape, bool)))

    def quantize(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = encode(scaled, ELEMENTS[name])
        return codes, decode(codes, ELEMENTS[name])

    return search(blocks, candidates, quantize)


def search_integer(
    x: np.ndarray, largest: int, is_signed: bool, size: int = 64
) -> tuple[np.ndarray, np.ndarray]:
    blocks = split(x, size)
    amax = (np.abs(blocks) if is_signed else np.maximum(blocks, 0)).max(-1)
    least = -largest - 1 if is_signed else 0
    candidates = []
    for numerator in range(32, 49):
        stored = (amax / F32(largest * numerator / 32)).astype(np.float16)
        candidates.append((stored, stored.astype(F32), np.ones(stored.shape, bool)))

    def quantize(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values = np.clip(np.rint(scaled), least, largest)
        return values.astype(np.int8).view(np.uint8) & 15, values

    return search(blocks, candidates, quantize)
