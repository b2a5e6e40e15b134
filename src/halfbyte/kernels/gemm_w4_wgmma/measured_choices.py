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
from typing import Any, Final

from halfbyte.errors import CheckpointError, printable

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


_WORDS: Final = ("mode", "weight", "out_dtype")
_TIMES: Final = ("total_us", "bf16_us")


def parse_choices(text: str, name: str = FILE_NAME) -> tuple[MeasuredChoice, ...]:
    """Return the choices of a table's text.

    Raises CheckpointError naming the line of `name` that is no measured choice.
    """
    choices = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            values = parse_line(line, f"{name} line {number}")
            columns = {column: values[column] for column in _NAMES}
            extra = tuple(values.get("extra", {}).items())
            choices.append(MeasuredChoice(**columns, extra=extra))
    return tuple(choices)


def parse_line(line: str, place: str) -> dict[str, Any]:
    """Return the object of a line; its columns have the types and ranges of MeasuredChoice.

    Raises CheckpointError for anything else, with `place` in the message.
    """
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _make_error(place, str(error)) from None
    if not isinstance(values, dict):
        raise _make_error(place, f"a {type(values).__name__}, wanted an object")
    for name in _NAMES:
        if name not in values:
            raise _make_error(place, f"{name} is missing")
        if not _is_sound(name, values[name]):
            raise _make_error(place, f"{name} is {printable(repr(values[name]))}")
    extra = values.get("extra", {})
    if not (isinstance(extra, dict) and all(isinstance(one, int) for one in extra.values())):
        raise _make_error(place, "extra: wanted integers by name")
    return values


def _is_sound(name: str, value: object) -> bool:
    if name in _WORDS:
        return isinstance(value, str)
    if name in _TIMES:
        return isinstance(value, int | float) and math.isfinite(value) and value > 0
    return isinstance(value, int) and value >= (0 if name == "rank" else 1)


def _make_error(place: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{place} is no measured choice: {problem}; remove the line, `halfbyte bench tune` "
        "measures it again"
    )


@lru_cache(maxsize=1)
def read_choices() -> tuple[MeasuredChoice, ...]:
    """Return the choices that this version ships; none where there is no table.

    Raises CheckpointError for a table that is damaged.
    """
    table = resources.files(__package__) / FILE_NAME
    if not table.is_file():
        return ()
    return parse_choices(table.read_bytes().decode(errors="replace"), str(table))


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
