"""W4A4Linear.from_linear: from nn.Linear to 4 bits with a preset."""

import pytest
import torch
from torch import nn

from halfbyte.errors import FormatError
from halfbyte.nn import W4A4Linear
from halfbyte.svdquant.presets import PRESETS, get_preset
from halfbyte.svdquant.quantize_layer import quantize_linear_group
from halfbyte.svdquant.statistics import InputStatistics
from tests.nn.test_w4a4_linear_state import bytes_of
from tests.random_linears import make_input
from tests.tolerance import assert_close_to_reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_float_linear(
    n: int = 48, k: int = 100, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(k, n, bias=bias).to(dtype)


def relative_difference(y: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = y.detach().float() - wanted.detach().float()
    return float(difference.norm() / wanted.detach().float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_gives_a_module_close_to_the_float_linear(
    preset: str, dtype: torch.dtype
) -> None:
    linear = make_float_linear(dtype=dtype)
    module = W4A4Linear.from_linear(linear, preset)
    assert module.spec.weight_format == PRESETS[preset].weight_format
    assert module.spec.activation == PRESETS[preset].activation
    assert module.rank == PRESETS[preset].rank
    x = make_input(30, 100, dtype)
    y = module(x)
    assert_close_to_reference(y, x, module.to_record())
    # 4-bit rounding errs by about 0.1 in weight and in input; a wrong layout or scale by about 1
    assert relative_difference(y, linear(x)) < 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_take_the_dtype_of_a_half_precision_linear(dtype: torch.dtype) -> None:
    module = W4A4Linear.from_linear(make_float_linear(dtype=dtype))
    for part in (module.lora_down, module.lora_up, module.bias):
        assert part.dtype == dtype


def test_float64_linear_becomes_a_module_for_float32_input() -> None:
    linear = make_float_linear(dtype=torch.float64)
    module = W4A4Linear.from_linear(linear)
    x = make_input(30, 100)
    assert relative_difference(module(x), linear(x.double())) < 0.25


def test_from_linear_is_quantize_linear_group_of_one() -> None:
    linear = make_float_linear()
    statistics = InputStatistics(100)
    statistics.update(make_input(64, 100))
    preset = get_preset("nvfp4_svdquant_r32")
    module = W4A4Linear.from_linear(linear, preset, statistics=statistics)
    weight, bias = linear.weight.detach(), linear.bias.detach()
    records, _ = quantize_linear_group([weight], [bias], statistics, preset)
    ours = W4A4Linear(records[0]).state_dict()
    assert {name: bytes_of(value) for name, value in module.state_dict().items()} == {
        name: bytes_of(value) for name, value in ours.items()
    }


def test_result_is_reproducible() -> None:
    first = W4A4Linear.from_linear(make_float_linear())
    second = W4A4Linear.from_linear(make_float_linear())
    x = make_input(5, 100)
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("k", [1, 17, 63, 129])
def test_any_width_and_no_bias(k: int) -> None:
    module = W4A4Linear.from_linear(make_float_linear(n=7, k=k, bias=False))
    assert module.bias is None
    x = make_input(5, k)
    assert_close_to_reference(module(x), x, module.to_record())


@pytest.mark.parametrize("preset", ["nvfp4_plain", "int4_plain", "nvfp4_weight_only_r32"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_columns_give_the_bias(preset: str) -> None:
    linear = make_float_linear(n=7, k=0)
    assert linear.bias is not None
    linear.bias.data = torch.arange(7.0)
    module = W4A4Linear.from_linear(linear, preset)
    assert torch.equal(module(torch.empty(5, 0)), torch.arange(7.0).expand(5, 7))


def test_all_zero_weight_gives_exactly_the_bias() -> None:
    linear = make_float_linear()
    linear.weight.data.zero_()
    for preset in PRESETS:
        module = W4A4Linear.from_linear(linear, preset)
        y = module(make_input(3, 100))
        assert torch.equal(y, linear.bias.detach().expand(3, 48)), preset


def test_training_mode_follows_the_linear() -> None:
    assert not W4A4Linear.from_linear(make_float_linear().eval(), "nvfp4_plain").training
    assert W4A4Linear.from_linear(make_float_linear().train(), "nvfp4_plain").training


def test_bad_arguments_are_named() -> None:
    with pytest.raises(FormatError, match=r"linear: Conv1d, wanted torch\.nn\.Linear"):
        W4A4Linear.from_linear(nn.Conv1d(3, 3, 1))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="preset 'nvfp5' is unknown; use one of: nvfp4_plain"):
        W4A4Linear.from_linear(make_float_linear(), "nvfp5")
    linear = make_float_linear()
    linear.weight.data[3, 4] = float("nan")
    with pytest.raises(FormatError, match="NaN"):
        W4A4Linear.from_linear(linear)
