"""A few combinations of many choices, such that any t of the choices meet in all their values.

Most faults need two or three choices to meet (Kuhn, Wallace, Gallo: "Software fault interactions
and implications for software testing", 2004); the full product is run by `make test-long`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, int], ...]  # (axis, number of the value), in the order of the axes


def make_covering_array(axes: Mapping[str, Sequence[Any]], strength: int = 2) -> list[Row]:
    """Return combinations of `axes` in which every `strength` values of different axes meet.

    Greedy and without chance: each row starts with the first tuple that is not covered yet, then
    takes, axis by axis, the value that covers most of what is left. Where that decides nothing the
    value used least so far is taken, so that the rest is spread evenly.
    """
    left = _list_tuples(axes, strength)
    used = {name: [0] * len(values) for name, values in axes.items()}
    rows = []
    while left:
        numbers = dict(min(left))
        for name in axes:
            if name not in numbers:
                numbers[name] = _choose_value(name, numbers, left, used[name])
        ordered = [(name, numbers[name]) for name in axes]
        left.difference_update(itertools.combinations(ordered, strength))
        for name, number in ordered:
            used[name][number] += 1
        rows.append({name: axes[name][number] for name, number in ordered})
    return rows


def _list_tuples(axes: Mapping[str, Sequence[Any]], strength: int) -> set[Pair]:
    return {
        tuple(zip(names, numbers, strict=True))
        for names in itertools.combinations(axes, strength)
        for numbers in itertools.product(*(range(len(axes[name])) for name in names))
    }


def _choose_value(name: str, chosen: Mapping[str, int], left: set[Pair], used: list[int]) -> int:
    gains = [0] * len(used)
    for pair in left:
        values = dict(pair)
        number = values.pop(name, None)
        if number is not None and all(
            chosen.get(axis, value) == value for axis, value in values.items()
        ):
            gains[number] += 1 + 100 * sum(axis in chosen for axis in values)
    return max(range(len(used)), key=lambda number: (gains[number], -used[number]))
