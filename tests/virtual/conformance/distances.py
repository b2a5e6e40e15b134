"""How far apart two results of a documented difference lie, row by row."""

from dataclasses import dataclass

import numpy as np

# The largest distance allowed, by the first word of a row's opcode: in units of last place, or
# absolute. For the approximate functions, what PTX states for silicon plus the half unit of ours;
# products of numbers around 1: the tensor core drops bits of the addends (fp8: all but about 13).
LIMITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("rcp", "sqrt", "rsqrt", "div"), ("ulps", 2)),
    "ex2": ("ulps", 3),
    "lg2": ("absolute", 2.0**-16),  # relative 2^-22 beside 1, of results up to 128
    "sin": ("absolute", 2.0**-20),
    "cos": ("absolute", 2.0**-20),
    "tanh": ("absolute", 2.0**-10),
    "tanh to 16 bits": ("ulps", 1),
    "mma": ("absolute", 2.0**-18),
    "wgmma": ("absolute", 2.0**-15),
    "wgmma of e4m3": ("absolute", 2.0**-5),
    "wgmma to 16 bits": ("ulps", 2),
}


@dataclass(frozen=True)
class RowDistance:
    """One row of an output: elements that differ, the largest distance in units of last place.

    `special` counts elements where one side is NaN or infinite and the other is not the same; they
    do not enter `ulps`. `absolute` is the largest |virtual - silicon|.
    """

    name: str
    differing: int
    total: int
    ulps: int
    absolute: float
    special: int


def _order(bits: np.ndarray, width: int) -> np.ndarray:
    """Return integers that are ordered as the floats are, -0 equal to +0."""
    value = bits.astype(np.int64)
    sign = value >> (width - 1) & 1
    magnitude = value & ((1 << (width - 1)) - 1)
    return np.where(sign == 1, -magnitude, magnitude)


def _decode(bits: np.ndarray, width: int, name: str) -> np.ndarray:
    if width == 32:
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if "bf16" in name:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def measure_distance(name: str, virtual: np.ndarray, silicon: np.ndarray) -> RowDistance:
    """Return the distance of one row of float patterns (16 or 32 bits; two halves in f16 words)."""
    if virtual.dtype.itemsize == 4 and ".f16." in name and ".f32." not in name:
        virtual, silicon = virtual.view(np.uint16), silicon.view(np.uint16)
    width = virtual.dtype.itemsize * 8
    with np.errstate(all="ignore"):
        got, wanted = _decode(virtual, width, name), _decode(silicon, width, name)
        is_finite = np.isfinite(got) & np.isfinite(wanted)
        same_special = (np.isnan(got) & np.isnan(wanted)) | (got == wanted)
        steps = np.abs(_order(virtual, width) - _order(silicon, width))[is_finite]
        absolute = np.abs(got - wanted)[is_finite]
    return RowDistance(
        name,
        int((virtual != silicon).sum()),
        int(virtual.size),
        int(steps.max(initial=0)),
        float(absolute.max(initial=0.0)),
        int((~is_finite & ~same_special).sum()),
    )


def find_limit(name: str) -> tuple[str, float]:
    """Return (measure, limit) for a row; KeyError where none is written down."""
    word = name.split(".")[0]
    result = name.split(" ")[0].split(".")[5 if word == "wgmma" else -1]
    if word in ("tanh", "wgmma") and result in ("f16", "bf16"):
        return LIMITS[f"{word} to 16 bits"]
    return LIMITS["wgmma of e4m3" if word == "wgmma" and "e4m3" in name else word]


def is_within_limit(distance: RowDistance) -> bool:
    """Return whether a row lies as near to silicon as is written down."""
    measure, limit = find_limit(distance.name)
    return distance.special == 0 and getattr(distance, measure) <= limit


def measure_rows(
    names: tuple[str, ...], virtual: np.ndarray, silicon: np.ndarray
) -> list[RowDistance]:
    """Return one distance per row name; rows of the same name are put together."""
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        rows.setdefault(name, []).append(index)
    return [
        measure_distance(name, virtual[indices].reshape(-1), silicon[indices].reshape(-1))
        for name, indices in rows.items()
    ]
