"""GPTQ rounding: what it gains, and its edge cases."""

import pytest
import torch

from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.svdquant.gptq import make_error_propagation, round_with_propagation

pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = ("nvfp4", "int4", "mxfp4")


def make_correlated_rows(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return inputs with the correlation of a low-dimensional signal and some noise."""
    mix = torch.randn(columns // 4, columns, generator=torch.Generator().manual_seed(77))
    draw = torch.Generator().manual_seed(seed)
    signal = torch.randn(rows, columns // 4, generator=draw) @ mix
    return signal + 0.5 * torch.randn(rows, columns, generator=draw)


def make_weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def round_with_gram(
    weight: torch.Tensor, gram: torch.Tensor, name: str, shrinkage: float = 0.0
) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    """Return (nearest, GPTQ) under the same scales."""
    nearest = quantize(weight, name)
    propagation = make_error_propagation(gram, shrinkage=shrinkage, damping=0.01)
    return nearest, round_with_propagation(weight, nearest, propagation)


def measure(rounded: BlockScaledTensor, weight: torch.Tensor, rows: torch.Tensor) -> float:
    return float((rows @ (dequantize(rounded) - weight).T).double().norm())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [64, 200, 300])
def test_less_output_error_than_nearest_on_calibration_and_on_held_out_rows(
    name: str, columns: int
) -> None:
    weight = make_weight(40, columns)
    x, unseen = make_correlated_rows(2048, columns, 1), make_correlated_rows(512, columns, 2)
    nearest, rounded = round_with_gram(weight, x.T @ x, name, shrinkage=0.1)
    # The signal lives in a quarter of the dimensions, so much more than 10 % is there to gain.
    assert measure(rounded, weight, x) < 0.9 * measure(nearest, weight, x)
    assert measure(rounded, weight, unseen) < 0.9 * measure(nearest, weight, unseen)


def test_shrinkage_helps_where_the_correlation_of_few_rows_is_chance() -> None:
    weight = make_weight(40, 256)
    x, unseen = torch.randn(1224, 256, generator=torch.Generator().manual_seed(1)).split(
        [200, 1024]
    )
    gram = x.T @ x
    _, loose = round_with_gram(weight, gram, "nvfp4", shrinkage=0.0)
    _, shrunk = round_with_gram(weight, gram, "nvfp4", shrinkage=0.3)
    assert measure(loose, weight, x) < measure(shrunk, weight, x)  # overfits what it saw
    assert measure(shrunk, weight, unseen) < measure(loose, weight, unseen)


@pytest.mark.parametrize("name", FORMATS)
def test_scales_shape_and_padding_codes_are_untouched(name: str) -> None:
    weight = make_weight(9, 75)
    x = make_correlated_rows(300, 75, 1)
    nearest, rounded = round_with_gram(weight, x.T @ x, name)
    assert rounded.shape == (9, 75)
    assert torch.equal(rounded.scales.view(torch.uint8), nearest.scales.view(torch.uint8))
    assert rounded.global_scale is nearest.global_scale
    assert bool((rounded.data[:, 38:] == 0).all())  # columns 76 and up
    assert bool((rounded.data[:, 37] >> 4 == 0).all())  # column 75
    assert not torch.equal(rounded.data, nearest.data)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shrinkage", [0.0, 1.0])
def test_uncorrelated_inputs_give_nearest_rounding(name: str, shrinkage: float) -> None:
    weight = make_weight(9, 75)
    gram = torch.diag(torch.rand(75, generator=torch.Generator().manual_seed(1)) + 0.1)
    if shrinkage == 1.0:
        gram = gram + 0.01
    nearest, rounded = round_with_gram(weight, gram, name, shrinkage)
    assert torch.equal(rounded.data, nearest.data)


@pytest.mark.parametrize("name", FORMATS)
def test_zero_gram_gives_nearest_rounding(name: str) -> None:
    weight = make_weight(9, 75)
    nearest, rounded = round_with_gram(weight, torch.zeros(75, 75), name)
    assert torch.equal(rounded.data, nearest.data)


def test_columns_that_never_were_on_are_rounded_to_nearest_and_disturb_nobody() -> None:
    weight = make_weight(16, 96)
    x = make_correlated_rows(400, 96, 1)
    x[:, 10:20] = 0.0
    nearest, rounded = round_with_gram(weight, x.T @ x, "int4")
    assert torch.equal(dequantize(rounded)[:, 10:20], dequantize(nearest)[:, 10:20])
    assert measure(rounded, weight, x) < 0.9 * measure(nearest, weight, x)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("damping", [0.0, 0.01])
def test_singular_gram_gives_finite_weights_no_worse_than_nearest(
    rank: int, damping: float
) -> None:
    weight = make_weight(16, 96)
    x = torch.randn(rank, 96, generator=torch.Generator().manual_seed(3))
    nearest = quantize(weight, "nvfp4")
    propagation = make_error_propagation(x.T @ x, shrinkage=0.0, damping=damping)
    assert bool(torch.isfinite(propagation.factor).all())
    rounded = round_with_propagation(weight, nearest, propagation)
    assert bool(torch.isfinite(dequantize(rounded)).all())
    assert measure(rounded, weight, x) <= measure(nearest, weight, x)


def test_factor_is_that_of_the_inverse_in_falling_order_of_the_diagonal() -> None:
    x = make_correlated_rows(400, 24, 1) * torch.rand(
        24, generator=torch.Generator().manual_seed(2)
    )
    gram = (x.T @ x) / 400
    propagation = make_error_propagation(gram, shrinkage=0.25, damping=0.02)
    order = propagation.order
    diagonal = gram.diagonal()[order]
    assert bool((diagonal[:-1] >= diagonal[1:]).all())
    wanted = 0.75 * gram.double() + 0.25 * torch.diag(gram.diagonal().double())
    wanted += 0.02 * gram.diagonal().double().mean() * torch.eye(24)
    upper = propagation.factor.double()
    assert torch.equal(upper, upper.triu())
    identity = (upper.T @ upper) @ wanted[order][:, order]
    assert torch.allclose(identity, torch.eye(24, dtype=torch.float64), atol=1e-4)


def test_blocks_of_zeros_keep_zero_codes_and_carry_their_error() -> None:
    weight = make_weight(8, 64)
    weight[:, 16:32] = 0.0  # scale 0: whatever is carried here cannot be stored
    x = make_correlated_rows(200, 64, 1)
    _, rounded = round_with_gram(weight, x.T @ x, "nvfp4")
    assert bool((rounded.data[:, 8:16] == 0).all())
    assert bool(torch.isfinite(dequantize(rounded)).all())


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (1, 1)], ids=str)
def test_empty_and_tiny_weights(shape: tuple[int, int]) -> None:
    weight = torch.ones(shape)
    nearest, rounded = round_with_gram(weight, torch.eye(shape[1]), "nvfp4")
    assert torch.equal(rounded.data, nearest.data)


def test_caller_tensors_are_not_written_to() -> None:
    weight = make_weight(9, 75)
    x = make_correlated_rows(100, 75, 1)
    gram = x.T @ x
    before = (weight.clone(), gram.clone())
    round_with_gram(weight, gram, "nvfp4", 0.3)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])
