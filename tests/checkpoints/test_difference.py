"""Differences of layers against plain float64 formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.difference import (
    ROUNDING,
    dequantize_rows,
    find_deviation,
    measure_layer,
    multiply_factors,
)
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import low_rank_product
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_linear, pair_id

N, K = 24, 70


def change_weight(linear: QuantizedLinear, **changes: torch.Tensor) -> QuantizedLinear:
    weight = linear.weight
    parts = {"data": weight.data, "scales": weight.scales, "global_scale": weight.global_scale}
    parts |= changes
    return replace(linear, weight=BlockScaledTensor(weight.format, columns=K, **parts))


def truth(linear: QuantizedLinear) -> np.ndarray:
    values = dequantize(linear.weight)
    if linear.channel_scale is not None:
        values = values * read_floats(linear.channel_scale)[:, None]
    return values


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_rows_are_dequantised_as_the_reference_does(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(N, K, 8), pair)
    for start, stop in ((0, N), (5, 9)):
        np.testing.assert_allclose(
            dequantize_rows(linear, start, stop).numpy(), truth(linear)[start:stop], rtol=2.0**-51
        )
    np.testing.assert_allclose(multiply_factors(linear, 0, N), low_rank_product(linear), rtol=1e-12)


def test_equal_layers_have_no_difference_however_they_are_stored() -> None:
    linear = make_linear(LinearShape(N, K, 8, parts=False))
    longhand = replace(
        linear,
        smooth=torch.ones(K),
        bias=torch.zeros(N),
        channel_scale=torch.ones(N),
        lora_down=torch.cat((linear.lora_down, torch.zeros(8, K))),
        lora_up=torch.cat((linear.lora_up, torch.zeros(N, 8)), 1),
    )
    codes = linear.weight.data.clone()
    codes[codes == 0] = 0x08  # the other zero
    for other in (linear, longhand, change_weight(linear, data=codes)):
        for found in measure_layer(linear, other).values():
            assert found.deviation < 1e-12  # a product of padded factors sums in another order
        assert all(value < 1e-12 for value in find_deviation(linear, other).values())


def test_figures_are_those_of_the_float64_formula() -> None:
    linear = make_linear(LinearShape(N, K, 8))
    codes = linear.weight.data.clone()
    codes[3, 12] ^= 0x12
    other = replace(
        change_weight(linear, data=codes),
        lora_up=linear.lora_up * 1.25,
        smooth=linear.smooth * 2,
        bias=linear.bias + 0.5,
    )
    found = measure_layer(linear, other)
    pairs = {
        "weight": (truth(linear), truth(other)),
        "low_rank": (low_rank_product(linear), low_rank_product(other)),
        "smooth": (read_floats(linear.smooth), read_floats(other.smooth)),
        "bias": (read_floats(linear.bias), read_floats(other.bias)),
    }
    for name, (left, right) in pairs.items():
        error = np.abs(left - right)
        assert found[name].largest == pytest.approx(error.max(), rel=1e-9)
        norms = np.linalg.norm(left - right) / np.linalg.norm(left)
        assert found[name].relative == pytest.approx(norms, rel=1e-9)
        assert not found[name].is_within_rounding
    assert found["activation_scale"].is_exact
    assert all(value > ROUNDING for key, value in find_deviation(linear, other).items()
               if key != "activation_scale")  # fmt: skip


def test_one_changed_code_is_found_whatever_else_is_equal() -> None:
    linear = make_linear(LinearShape(N, K, 8))
    for row, column, mask in ((0, 0, 0x01), (N - 1, 3, 0x70), (7, 34, 0x0F)):
        codes = linear.weight.data.clone()
        codes[row, column] ^= mask
        before = dequantize(change_weight(linear).weight)
        after = dequantize(change_weight(linear, data=codes).weight)
        deviation = find_deviation(linear, change_weight(linear, data=codes))["weight"]
        assert (deviation > 0) == bool((before != after).any())


def test_reciprocal_roundings_are_within_the_bound_and_more_is_not() -> None:
    linear = make_linear(LinearShape(N, K, 8))
    scale = linear.weight.global_scale
    twice = scale.reciprocal().reciprocal()
    smooth = linear.smooth.reciprocal().reciprocal()
    down = (linear.lora_down * linear.smooth) * linear.smooth.reciprocal()
    rounded = replace(change_weight(linear, global_scale=twice), smooth=smooth, lora_down=down)
    assert 0 < max(find_deviation(linear, rounded).values()) <= ROUNDING
    off = change_weight(linear, global_scale=scale * (1 + 2.0**-21))
    assert find_deviation(linear, off)["weight"] > ROUNDING
