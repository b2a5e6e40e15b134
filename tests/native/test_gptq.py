"""The compiled inner loop of GPTQ against the torch loop: every bit."""

from collections.abc import Callable

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.elements import decode_table
from halfbyte.formats.quantize import quantize
from halfbyte.native import NativeLibrary
from halfbyte.native.gptq import round_columns
from halfbyte.svdquant.gptq import (
    _round_block,
    make_error_propagation,
    round_with_propagation,
)

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_operands(rows: int, columns: int) -> Operands:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    weights = torch.randn(rows, columns, generator=draw)
    weights[:, ::7] *= 40.0  # saturates
    weights[::5] = 0.25 * weights[::5].mul(8).round()  # ties
    weights[:, 2::9] = -0.0
    divisors = torch.rand(rows, columns, generator=draw) + 0.25
    divisors[:, 1::6] = 0.5
    divisors[:, 3::11] = 0.0  # blocks without a scale
    factor = torch.randn(columns, columns, generator=draw).triu() * 0.2
    factor.diagonal().copy_(torch.rand(columns, generator=draw) + 0.5)
    return weights, divisors, factor


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == torch.float32:
        left, right = left.view(torch.int32), right.view(torch.int32)
    assert torch.equal(left, right)


@pytest.mark.parametrize("element", ["e2m1", "int4", "uint4"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (15, 5), (16, 128), (17, 127), (100, 33), (0, 8)], ids=str
)
def test_codes_and_carried_errors_equal_the_torch_loop(
    element: str,
    shape: tuple[int, int],
    loaded: NativeLibrary,
    use_torch_path: Callable[[], None],
) -> None:
    weights, divisors, factor = make_operands(*shape)
    codes, errors = round_columns(loaded, weights, divisors, factor, element)
    use_torch_path()
    wanted_codes, wanted_errors = _round_block(weights, divisors, factor, element)
    assert_same_bits(codes, wanted_codes)
    assert_same_bits(errors, wanted_errors)
    assert int(codes.max() if codes.numel() else 0) < decode_table(element).numel()


def test_rows_may_lie_apart(loaded: NativeLibrary) -> None:
    weights, divisors, factor = make_operands(20, 64)
    wide = torch.full((20, 300), float("nan"))
    wide[:, 100:164] = weights
    apart = round_columns(loaded, wide[:, 100:164], divisors, factor, "e2m1")
    dense = round_columns(loaded, weights, divisors, factor, "e2m1")
    assert_same_bits(apart[0], dense[0])
    assert_same_bits(apart[1], dense[1])


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_one_level", "int4", "mxfp4"])
@pytest.mark.parametrize("columns", [1, 75, 128, 129, 300])
def test_whole_weights_round_to_the_same_bytes(
    name: str, columns: int, level: str, use_torch_path: Callable[[], None]
) -> None:
    draw = torch.Generator().manual_seed(columns)
    weight = torch.randn(33, columns, generator=draw)
    weight[:, columns // 2 :] *= 1e-3
    weight[3] = 0.0
    x = torch.randn(64, columns, generator=draw).cumsum(1)
    propagation = make_error_propagation(x.T @ x, shrinkage=0.1, damping=0.01)
    nearest = quantize(weight, name, scale_search="optimal")
    compiled = round_with_propagation(weight, nearest, propagation)
    use_torch_path()
    wanted = round_with_propagation(weight, nearest, propagation)
    assert torch.equal(compiled.data, wanted.data)


def test_bytes_do_not_depend_on_the_number_of_threads(
    loaded: NativeLibrary, two_threads: None
) -> None:
    operands = make_operands(700, 128)
    several = round_columns(loaded, *operands, "int4")
    torch.set_num_threads(1)
    single = round_columns(loaded, *operands, "int4")
    assert_same_bits(several[0], single[0])
    assert_same_bits(several[1], single[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda w, d, f: (w, d[:, :-1].contiguous(), f),
        lambda w, d, f: (w, d, f[:-1].contiguous()),
        lambda w, d, f: (w.double(), d, f),
        lambda w, d, f: (w, d.t().contiguous().t(), f),
        lambda w, d, f: (w.t().contiguous().t(), d, f),
    ],
    ids=["divisor shape", "factor shape", "dtype", "divisor layout", "weight layout"],
)
def test_operands_that_do_not_fit_are_refused(
    change: Callable[..., Operands], loaded: NativeLibrary
) -> None:
    with pytest.raises(FormatError, match=r"divisors|weights"):
        round_columns(loaded, *change(*make_operands(6, 8)), "e2m1")


def test_more_columns_than_a_tile_holds_are_refused(loaded: NativeLibrary) -> None:
    with pytest.raises(FormatError, match="at most 128 columns"):
        round_columns(loaded, *make_operands(2, 129), "e2m1")
