"""Statistics of a linear's input: which rows are kept, and sums over all of them."""

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.svdquant.statistics import InputStatistics, RowSample


def make_numbered_rows(count: int, columns: int = 3) -> torch.Tensor:
    """Return rows whose first entry is their index."""
    rows = torch.randn(count, columns, generator=torch.Generator().manual_seed(count))
    rows[:, 0] = torch.arange(count)
    return rows


def feed(statistics: InputStatistics, rows: torch.Tensor, sizes: tuple[int, ...]) -> None:
    start = 0
    for size in sizes:
        statistics.update(rows[start : start + size])
        start += size
    statistics.update(rows[start:])


@pytest.mark.parametrize("sizes", [(), (1, 1, 1), (5, 0, 7), (3, 3, 3, 3), (100,)], ids=str)
def test_every_fourth_row_over_all_batches_is_held_out(sizes: tuple[int, ...]) -> None:
    statistics = InputStatistics(3)
    feed(statistics, make_numbered_rows(101), sizes)
    assert statistics.num_rows == 101
    assert statistics.held_out.rows[:, 0].tolist() == list(range(0, 101, 4))
    assert statistics.fit.rows[:, 0].tolist() == [i for i in range(101) if i % 4]


@pytest.mark.parametrize("sizes", [(), (1,) * 30, (17, 100, 1)], ids=str)
def test_sums_equal_those_over_all_rows_at_once(sizes: tuple[int, ...]) -> None:
    rows = make_numbered_rows(150, 8)
    rows[:, 0] = 1e-3
    statistics = InputStatistics(8)
    feed(statistics, rows, sizes)
    held_out = torch.arange(150) % 4 == 0
    for gram, part in (
        (statistics.fit_gram, rows[~held_out].double()),
        (statistics.held_out_gram, rows[held_out].double()),
    ):
        assert gram is not None
        wanted = part.T @ part
        assert float((gram - wanted).norm() / wanted.norm()) < 2 * 150 * 2**-24
    assert torch.equal(statistics.absmax, rows.abs().amax(0))
    assert torch.allclose(statistics.rms, rows.double().square().mean(0).sqrt().float(), rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_thinned_sample_is_evenly_spread_and_bounded(batch: int) -> None:
    sample = RowSample(3, max_rows=100)
    rows = make_numbered_rows(1000)
    for start in range(0, 1000, batch):
        sample.add(rows[start : start + batch])
        assert sample.rows.shape[0] <= 100
    kept = sample.rows[:, 0].tolist()
    assert kept == list(range(0, 1000, 16))  # 1000 / 8 is more than 100
    assert torch.equal(sample.rows, rows[::16])


def test_sample_does_not_alias_the_callers_rows() -> None:
    rows = make_numbered_rows(8)
    statistics = InputStatistics(3)
    statistics.update(rows)
    rows.zero_()
    assert statistics.fit.rows[:, 0].tolist() == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_any_float_dtype_and_leading_dimensions_are_rows_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    statistics = InputStatistics(4)
    statistics.update(x)
    statistics.update(x[0, 0])
    statistics.update(x.transpose(0, 1)[1:2])
    assert statistics.num_rows == 13
    assert statistics.held_out.rows.dtype == torch.float32
    assert torch.equal(statistics.held_out.rows[0], x[0, 0].float())
    assert torch.equal(statistics.held_out.rows[1], x[0, 4].float())


def test_no_gram_is_gathered_where_none_is_wanted() -> None:
    statistics = InputStatistics(4, keep_gram=False)
    statistics.update(torch.ones(9, 4))
    assert statistics.fit_gram is None
    assert statistics.held_out_gram is None


def test_nothing_seen_has_zero_magnitudes_and_no_rows() -> None:
    statistics = InputStatistics(4)
    statistics.update(torch.empty(0, 4))
    assert statistics.num_rows == 0
    assert torch.equal(statistics.rms, torch.zeros(4))
    statistics = InputStatistics(0)
    statistics.update(torch.empty(5, 0))
    assert statistics.num_rows == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_nan_and_infinity_are_refused_and_leave_nothing_behind(bad: float) -> None:
    statistics = InputStatistics(4)
    x = torch.ones(6, 4)
    x[2, 1] = bad
    with pytest.raises(FormatError, match="NaN/Inf: 1 of 24"):
        statistics.update(x)
    assert statistics.num_rows == 0
    assert float(statistics.absmax.max()) == 0.0


def test_wrong_arguments_are_named() -> None:
    statistics = InputStatistics(4)
    for x in (torch.ones(3, 5), torch.ones(())):
        with pytest.raises(FormatError, match=r"shape .* wanted self\.columns=4"):
            statistics.update(x)
    with pytest.raises(FormatError, match="max_rows=0"):
        InputStatistics(4, max_rows=0)
