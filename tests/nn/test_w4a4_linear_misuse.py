"""W4A4Linear with what cannot work: every misuse is named, none gives numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.nn.quantize_model import quantize_model
from halfbyte.nn.w4a4_linear import W4A4Linear


def make_module() -> W4A4Linear:
    return W4A4Linear.from_linear(nn.Linear(96, 80), "nvfp4_svdquant_r32")


def test_a_part_or_input_on_the_meta_device_gives_no_unwritten_memory() -> None:
    x = torch.randn(3, 96)
    for name in ("weight_data", "weight_scales", "weight_global_scale", "lora_up", "bias"):
        module = make_module()
        setattr(module, name, getattr(module, name).to("meta"))
        with pytest.raises(FormatError, match=f"{name} is on meta"):
            module(x)
    with pytest.raises(FormatError, match="is on cpu, x on meta"):
        make_module()(x.to("meta"))
    module = make_module().to("meta")
    with pytest.raises(FormatError, match="is on meta, x on cpu"):
        module(x)
    assert module(x.to("meta")).shape == (3, 80)


@pytest.mark.parametrize("name", ["lora_down", "lora_up"])
def test_a_lost_low_rank_factor_is_an_error(name: str) -> None:
    state = make_module().state_dict()
    lost = {key: value for key, value in state.items() if key != name}
    for broken in (lost, {**state, name: state[name][:0]}):
        with pytest.raises(FormatError, match="a lost factor"):
            W4A4Linear.from_state_dict(broken)


@pytest.mark.parametrize("value", [None, "text", 1.0])
def test_a_state_entry_that_is_no_tensor_is_named(value: Any) -> None:
    state = make_module().state_dict()
    for name in state:
        with pytest.raises((FormatError, CheckpointError), match=name):
            W4A4Linear.from_state_dict({**state, name: value})


def test_an_extra_state_without_values_is_named() -> None:
    state = make_module().state_dict()
    state["_extra_state"] = state["_extra_state"].to("meta")
    with pytest.raises(CheckpointError, match="_extra_state: is on the meta device"):
        W4A4Linear.from_state_dict(state)


def test_an_input_that_is_no_dense_tensor_is_named() -> None:
    module, x = make_module(), torch.randn(3, 96)
    nested = torch.nested.nested_tensor([x[0], x[1]])
    for value in (None, 1, x.tolist(), x.numpy(), x.to_sparse(), nested):
        with pytest.raises(FormatError, match="x: "):
            module(value)


@pytest.mark.parametrize(
    ("linear", "word"),
    [
        (nn.Linear(64, 64, device="meta"), "meta device"),
        (nn.LazyLinear(64), "no weight yet"),
        (nn.Linear(64, 64, dtype=torch.complex64), "complex64"),
    ],
    ids=["meta", "lazy", "complex"],
)
def test_a_linear_without_float_values_is_refused(linear: nn.Linear, word: str) -> None:
    with pytest.raises(FormatError, match=word):
        W4A4Linear.from_linear(linear)


@pytest.mark.parametrize("preset", [None, 1, ["nvfp4_plain"]])
def test_a_preset_of_another_type_is_refused(preset: Any) -> None:
    with pytest.raises(FormatError, match="is unknown; use one of"):
        W4A4Linear.from_linear(nn.Linear(64, 64), preset)


def test_a_channel_scale_of_one_number_moves_whatever_its_stride() -> None:
    module = W4A4Linear.from_linear(nn.Linear(64, 1), "nvfp4_plain")
    module.channel_scale = torch.empty_strided((1,), (7,)).fill_(2.0)
    assert module.to("cpu").channel_scale == 2.0


def test_quantize_model_names_a_preset_and_a_calibration_that_it_cannot_take() -> None:
    x = torch.randn(4, 64)
    for preset in (None, 1, ["nvfp4_plain"]):
        with pytest.raises(FormatError, match="is unknown; use one of"):
            quantize_model(nn.Linear(64, 64), preset, progress=False)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="called with tuple, wanted a tensor"):
        quantize_model(nn.Sequential(nn.Linear(64, 64)), calibration=[((x,),)], progress=False)


def test_calibration_without_rows_counts_as_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    report = quantize_model(model, calibration=torch.empty(0, 64), progress=False)
    assert report.uncalibrated == ("0",)
    assert not report.layers[0].is_calibrated
    assert report.layers[0].relative_error > 0
