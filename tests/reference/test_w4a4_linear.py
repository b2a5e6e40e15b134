"""gemm_w4a4 and w4a4_linear against sums written out by hand."""

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference import gemm_w4a4, quantize_act_lora, w4a4_linear
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id


def make_hand_linear(activation: str | None) -> QuantizedLinear:
    """Two rows over 16 columns; only columns 0 and 1 are nonzero."""
    data = torch.zeros((2, 8), dtype=torch.uint8)
    data[0, 0] = 0x42  # 1.0, 2.0
    data[1, 0] = 0x9C  # codes 12, 9: -2.0, -0.5
    scales = torch.tensor([[0x38], [0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1, 2
    weight = BlockScaledTensor(get_format("nvfp4"), data, scales, torch.tensor(0.5), 16)
    down = torch.zeros((1, 16))
    down[0, :2] = torch.tensor([1.0, 10.0])
    return QuantizedLinear(
        weight=weight,
        activation=None if activation is None else get_activation_format(activation),
        channel_scale=torch.tensor([1.0, 3.0]),
        smooth=torch.full((16,), 2.0),
        lora_down=down,
        lora_up=torch.tensor([[100.0], [0.0]]),
        bias=torch.tensor([7.0, -1.0]),
    )


@pytest.mark.parametrize("activation", [None, "nvfp4_nunchaku", "nvfp4_one_level"])
def test_every_term_of_a_small_product(activation: str | None) -> None:
    x = torch.zeros((1, 16))
    x[0, :2] = torch.tensor([12.0, 4.0])  # x / smooth = 6, 2: exact in E2M1 at scale 1
    # weight rows: 0.5 * [1, 2] and 0.5 * 2 * [-2, -0.5]
    # products: 0.5*6 + 1*2 = 5;  (-2)*6 + (-0.5)*2 = -13, times channel_scale 3 = -39
    # low rank on the raw x: 1*12 + 10*4 = 52, times [100, 0]
    wanted = [[5.0 + 7.0 + 5200.0, -39.0 - 1.0]]
    assert w4a4_linear(x, make_hand_linear(activation)).tolist() == wanted


@pytest.mark.parametrize("pair", FORMAT_PAIRS[:-2], ids=pair_id)
def test_linear_is_gemm_of_quantize(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=5, k=100, rank=3), pair)
    x = make_input(4, 100, torch.bfloat16)
    wanted = gemm_w4a4(quantize_act_lora(x, linear), linear)
    np.testing.assert_array_equal(w4a4_linear(x, linear), wanted)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_no_rows_give_no_rows_and_no_columns_give_the_bias(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=5, k=64), pair)
    assert w4a4_linear(torch.empty((0, 64)), linear).shape == (0, 5)
    columnless = make_linear(LinearShape(n=5, k=0), pair)
    assert columnless.bias is not None
    y = w4a4_linear(torch.empty((3, 0)), columnless)
    np.testing.assert_array_equal(y, np.tile(columnless.bias.double().numpy(), (3, 1)))


def test_all_zero_input_gives_exactly_the_bias() -> None:
    for pair in FORMAT_PAIRS:
        if pair[1] == "uint4_shifted":  # x + shift is not zero there
            continue
        linear = make_linear(LinearShape(n=5, k=64), pair)
        assert linear.bias is not None
        y = w4a4_linear(torch.zeros((2, 64)), linear)
        np.testing.assert_array_equal(y, np.tile(linear.bias.double().numpy(), (2, 1)))


def test_strided_views_equal_their_contiguous_copies() -> None:
    linear = make_linear(LinearShape(n=5, k=64))
    wide = make_input(8, 128)
    sliced = wide[:, :64]
    np.testing.assert_array_equal(
        w4a4_linear(sliced, linear), w4a4_linear(sliced.contiguous(), linear)
    )
    turned = make_input(64, 8).t()
    np.testing.assert_array_equal(
        w4a4_linear(turned, linear), w4a4_linear(turned.contiguous(), linear)
    )


def test_column_count_mismatch_is_named() -> None:
    activation = quantize_act_lora(make_input(2, 64), make_linear(LinearShape(n=2, k=64)))
    with pytest.raises(FormatError, match="64 columns, wanted in_features=80"):
        gemm_w4a4(activation, make_linear(LinearShape(n=2, k=80)))
