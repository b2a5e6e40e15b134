"""The randomized low-rank split against a full singular value decomposition."""

import pytest
import torch

from halfbyte.svdquant.low_rank import find_row_space, split_low_rank


def make_matrix(rows: int, columns: int, decay: float, seed: int = 0) -> torch.Tensor:
    """Return a matrix whose singular values fall by `decay` each."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, min(rows, columns), generator=draw)).Q
    right = torch.linalg.qr(torch.randn(columns, min(rows, columns), generator=draw)).Q
    values = decay ** torch.arange(min(rows, columns), dtype=torch.float32)
    return (left * values) @ right.T


def measure_best_error(matrix: torch.Tensor, rank: int) -> float:
    """Return the least Frobenius error of any matrix of this rank (Eckart, Young)."""
    return float(torch.linalg.svdvals(matrix.double())[rank:].norm())


@pytest.mark.parametrize("decay", [0.9, 0.99, 1.0], ids=str)
@pytest.mark.parametrize("rank", [1, 16, 32])
@pytest.mark.parametrize("shape", [(96, 200), (200, 96)], ids=str)
def test_error_is_within_two_percent_of_the_best_possible(
    shape: tuple[int, int], rank: int, decay: float
) -> None:
    matrix = make_matrix(*shape, decay)
    error = float((matrix - split_low_rank(matrix, rank).multiply()).double().norm())
    assert error <= 1.02 * measure_best_error(matrix, rank)


def test_gaussian_matrix_is_split_within_two_percent_of_the_best_possible() -> None:
    matrix = torch.randn(384, 512, generator=torch.Generator().manual_seed(3))
    error = float((matrix - split_low_rank(matrix, 32).multiply()).double().norm())
    assert error <= 1.02 * measure_best_error(matrix, 32)


def test_same_seed_gives_the_same_bits_and_another_seed_another_start() -> None:
    matrix = make_matrix(64, 80, 0.99)
    first, second = split_low_rank(matrix, 8), split_low_rank(matrix, 8)
    assert torch.equal(first.up, second.up)
    assert torch.equal(first.down, second.down)
    assert not torch.equal(first.up, split_low_rank(matrix, 8, seed=1).up)


@pytest.mark.parametrize("rank", [5, 20, 300])
def test_matrix_of_low_rank_is_found_exactly_and_no_noise_beside_it(rank: int) -> None:
    draw = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, 5, generator=draw) @ torch.randn(5, 60, generator=draw)
    low = split_low_rank(matrix, rank)
    assert low.up.shape == (40, min(rank, 40))
    assert low.down.shape == (min(rank, 40), 60)
    error = float((low.multiply() - matrix).norm() / matrix.norm())
    best = torch.linalg.svd(matrix, full_matrices=False)
    torch_error = float((best.U * best.S @ best.Vh - matrix).norm() / matrix.norm())
    assert error <= 2 * torch_error


def test_rank_zero_and_empty_matrices_give_empty_factors() -> None:
    low = split_low_rank(torch.ones(3, 7), 0)
    assert low.up.shape == (3, 0)
    assert low.down.shape == (0, 7)
    assert torch.equal(low.multiply(), torch.zeros(3, 7))
    for shape in ((0, 7), (3, 0)):
        empty = split_low_rank(torch.empty(shape), 4)
        assert tuple(empty.multiply().shape) == shape


def test_zero_matrix_gives_zero_factors_without_nan() -> None:
    low = split_low_rank(torch.zeros(20, 30), 6)
    assert torch.equal(low.multiply(), torch.zeros(20, 30))
    assert bool(torch.isfinite(low.up).all())
    assert bool(torch.isfinite(low.down).all())


def test_both_factors_carry_the_root_of_each_singular_value() -> None:
    low = split_low_rank(1e6 * make_matrix(50, 70, 0.8), 4)
    wanted = (1e6 * 0.8 ** torch.arange(4.0)).sqrt()
    assert torch.allclose(low.up.norm(dim=0), wanted, rtol=1e-4)
    assert torch.allclose(low.down.norm(dim=1), wanted, rtol=1e-4)


@pytest.mark.parametrize("step", [1, 7, 64, 200])
def test_chunks_of_rows_find_the_space_of_the_whole(step: int) -> None:
    matrix = make_matrix(100, 60, 0.9)
    whole, values = find_row_space(lambda: (matrix,), 60, 10)
    space, chunk_values = find_row_space(lambda: matrix.split(step), 60, 10)
    assert torch.allclose(chunk_values, values, rtol=1e-5)
    # The spaces agree, whatever the sign of a vector: the projectors are equal.
    difference = float((space @ space.T - whole @ whole.T).norm() / 10**0.5)
    assert difference < 1e-4  # the gap of .9 between values 10 and 11 amplifies 1e-7 by about ten
