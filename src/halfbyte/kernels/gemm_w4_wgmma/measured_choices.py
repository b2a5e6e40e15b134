"""What was measured: the fastest configuration of each shape, and whether bf16 was faster still.

`measured_choices.jsonl` beside this file has one JSON object a line and is written by
`halfbyte bench tune`, on one GPU at a time. Nothing else of the package knows figures of a shape.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import resources
from typing import Final

FILE_NAME: Final = "measured_choices.jsonl"


@dataclass(frozen=True)
class MeasuredChoice:
    """One line of the table.

    Attributes:
        mode, weight, out_dtype, m, n, k, rank: of the product, as in WgmmaGemmRequest.
        tokens, stages, cluster, splits: of the fastest configuration.
        extra: (name, value) of further fields of the configuration that was timed.
        total_us: quantization and GEMM together. bf16_us: torch's product of 16-bit operands.
    """

    mode: str
    weight: str
    out_dtype: str
    m: int
    n: int
    k: int
    rank: int
    tokens: int
    stages: int
    cluster: int
    splits: int
    total_us: float
    bf16_us: float
    extra: tuple[tuple[str, int], ...] = ()


_NAMES: Final = tuple(field.name for field in fields(MeasuredChoice) if field.name != "extra")


def parse_choices(text: str) -> tuple[MeasuredChoice, ...]:
    """Return the choices of a table's text."""
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    return tuple(
        MeasuredChoice(
            **{name: line[name] for name in _NAMES}, extra=tuple(line.get("extra", {}).items())
        )
        for line in lines
    )


@lru_cache(maxsize=1)
def read_choices() -> tuple[MeasuredChoice, ...]:
    """Return the choices that this version ships; none where there is no table."""
    table = resources.files(__package__) / FILE_NAME
    return parse_choices(table.read_text(encoding="utf-8")) if table.is_file() else ()


def find_nearest(
    choices: Iterable[MeasuredChoice], sizes: tuple[int, int, int], reach: float
) -> MeasuredChoice | None:
    """Return the choice whose m, n and k are nearest to `sizes`, None beyond `reach` octaves.

    The distance is the largest of |log2| of the three ratios; of equals the first is taken.
    """
    best, best_distance = None, reach
    for choice in choices:
        pairs = zip(sizes, (choice.m, choice.n, choice.k), strict=True)
        distance = max(abs(math.log2(wanted / measured)) for wanted, measured in pairs)
        if distance < best_distance or (best is None and distance <= best_distance):
            best, best_distance = choice, distance
    return best
