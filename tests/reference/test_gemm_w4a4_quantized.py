"""The definition of a quantized output: its rounding and functions against torch's float64."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.input_rule import InputRule
from halfbyte.reference import (
    apply_activation,
    dequantize_activation,
    gemm_w4a4,
    gemm_w4a4_quantized,
    quantize_act_lora,
    round_to_dtype,
)
from tests.random_linears import LinearShape, make_input, make_linear


def make_wild_values(count: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    exponents = torch.randint(-149, 128, (count,), generator=draw)
    values = torch.randn(count, generator=draw) * torch.exp2(exponents.float())
    edges = torch.tensor([0.0, -0.0, 65519.9, 65520.0, -65520.0, 3.39e38, 3.3961e38, -3.4e38])
    specials = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-45, 257.0, 259.0])
    return torch.cat([values, edges, specials])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_of_float32_values_is_torchs(dtype: torch.dtype) -> None:
    values = make_wild_values(20000)
    rounded = round_to_dtype(values.double().numpy(), dtype)
    wanted = values.to(dtype).double().numpy()
    np.testing.assert_array_equal(rounded, wanted)
    np.testing.assert_array_equal(np.signbit(rounded[-14:-12]), [False, True])


def test_bfloat16_is_rounded_once() -> None:
    above_tie = 1.0 + 2.0**-8 + 2.0**-40  # by way of float32 it becomes the tie, and that 1.0
    assert round_to_dtype(np.array([above_tie]), torch.bfloat16)[0] == 1.0 + 2.0**-7


@pytest.mark.parametrize("name", ["none", "gelu", "gelu_tanh", "silu"])
def test_functions_are_torchs_in_float64(name: str) -> None:
    values = torch.linspace(-30, 30, 4001, dtype=torch.float64).reshape(-1, 1)
    wanted = {
        "none": values,
        "gelu": functional.gelu(values),
        "gelu_tanh": functional.gelu(values, approximate="tanh"),
        "silu": functional.silu(values),
    }[name]
    found = apply_activation(values.numpy(), name)
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12, atol=1e-15)


def test_an_unknown_function_or_dtype_is_named() -> None:
    with pytest.raises(FormatError, match="activation 'relu': wanted none, gelu"):
        apply_activation(np.zeros((1, 1)), "relu")
    with pytest.raises(FormatError, match=r"out_dtype torch\.float64"):
        round_to_dtype(np.zeros((1, 1)), torch.float64)


def test_what_is_quantized_is_the_rounded_output_over_the_next_smooth() -> None:
    linear = make_linear(LinearShape(n=24, k=64))
    activation = quantize_act_lora(make_input(5, 64, torch.bfloat16), linear)
    smooth = torch.linspace(0.5, 2.0, 24)
    rule = InputRule(get_activation_format("nvfp4_static"), smooth, torch.tensor(0.25))
    y, quantized = gemm_w4a4_quantized(activation, linear, rule, torch.bfloat16, "silu")
    exact = apply_activation(gemm_w4a4(activation, linear), "silu")
    assert (y != exact).any()
    assert np.abs(y - exact).max() <= np.abs(exact).max() * 2.0**-8
    assert (quantized.global_scale, quantized.columns) == (0.25, 24)
    assert quantized.lora_act is None
    wanted = y / smooth.numpy()
    largest = np.abs(np.pad(wanted, ((0, 0), (0, 8)))).reshape(5, 2, 16).max(axis=2)
    error = np.abs(dequantize_activation(quantized) - wanted)
    # half of E2M1's widest step, 1 of 6, and what the rounding of an E4M3 scale cuts off: 1 of 16
    assert (error <= np.repeat(largest, 16, axis=1)[:, :24] * (1 / 6 + 1 / 16)).all()


@pytest.mark.parametrize(
    ("name", "smooth", "scale", "message"),
    [
        ("nvfp4_static", None, None, "activation 'nvfp4_static' needs its global scale"),
        ("nvfp4_one_level", None, torch.tensor(1.0), "takes no global scale"),
        ("nvfp4_static", None, torch.ones(1), r"global_scale: torch.float32 \(1,\)"),
        ("nvfp4_static", None, torch.tensor(1.0).double(), r"global_scale: torch.float64"),
        ("nvfp4_one_level", torch.ones(1, 4), None, r"smooth: torch.float32 \(1, 4\)"),
        ("nvfp4_one_level", torch.ones(4).double(), None, r"smooth: torch.float64"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(
    name: str, smooth: torch.Tensor | None, scale: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        InputRule(get_activation_format(name), smooth, scale)


def test_a_weight_only_linear_has_no_rule() -> None:
    with pytest.raises(FormatError, match="weight-only"):
        InputRule.from_linear(make_linear(LinearShape(n=8, k=16), ("nvfp4", None)))
