"""The array covers what it promises, in few rows, and the same ones on every run."""

import itertools

import pytest

from tests.covering_array import make_covering_array

AXES = {"a": (1, 2, 3, 4), "b": "xyz", "c": (True, False), "d": range(7), "e": "pq"}


@pytest.mark.parametrize("strength", [2, 3])
def test_every_tuple_of_values_meets(strength: int) -> None:
    rows = make_covering_array(AXES, strength)
    for names in itertools.combinations(AXES, strength):
        wanted = set(itertools.product(*(AXES[name] for name in names)))
        assert {tuple(row[name] for name in names) for row in rows} == wanted


def test_pairs_take_few_rows_and_no_chance() -> None:
    rows = make_covering_array(AXES)
    assert 28 <= len(rows) <= 32  # 4 x 7 at least; the product has 336
    assert rows == make_covering_array(AXES)
    assert all(list(row) == list(AXES) for row in rows)
