"""Which inputs a linear is calibrated on, and where it is swapped: shared, repeated, unreached."""

import pytest
import torch
from torch import nn

from halfbyte.errors import FormatError
from halfbyte.nn import W4A4Linear
from halfbyte.svdquant.presets import SVDQuantPreset
from tests.nn.small_models import list_swapped, quantize, record_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Tied(nn.Module):
    """One linear under three names, two of them in one block."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.ModuleDict({"a": shared, "b": shared}) for _ in range(1))
        self.alias = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["b"](10.0 * torch.relu(layer["a"](x)))
        y: torch.Tensor = self.alias(x)
        return y


def test_shared_linear_is_swapped_everywhere_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    report = quantize(model, torch.randn(40, 64))
    assert [layer.name for layer in report.layers] == ["layers.0.a"]
    assert isinstance(model.alias, W4A4Linear)
    assert model.layers[0]["a"] is model.layers[0]["b"] is model.alias
    assert report.left_out == ()


class TwiceInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(input=100.0 * self.linear(x))
        return y


def test_linear_that_runs_twice_in_a_block_is_calibrated_on_both_inputs() -> None:
    torch.manual_seed(0)
    preset = SVDQuantPreset("static", "nvfp4", "nvfp4_static", 0)
    x = torch.randn(40, 64)
    model = TwiceInside()
    second = (100.0 * model.linear(x)).detach()
    quantize(model, x, preset)
    scale = record_of(model, "linear").activation_global_scale
    assert scale is not None
    assert float(scale) == pytest.approx(float(second.abs().max()) / 2688, rel=1e-5)


def test_linear_called_with_a_keyword_is_calibrated() -> None:
    class Keyword(TwiceInside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(input=x)
            return y

    report = quantize(Keyword(), torch.randn(40, 64))
    assert report.layers[0].is_calibrated


class Routed(nn.Module):
    """Each batch goes to one expert; one of them never gets any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList(nn.Linear(64, 64) for _ in range(3))])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        y: torch.Tensor = self.layers[0][expert](x)
        return y


def test_linears_reached_by_a_later_batch_are_calibrated_and_others_named() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(30, 64), 0), (torch.randn(30, 64), 2), (torch.randn(30, 64), 0)]
    model = Routed()
    report = quantize(model, batches)
    assert report.uncalibrated == ("layers.0.1",)
    calibrated = {layer.name: layer.is_calibrated for layer in report.layers}
    assert calibrated == {"layers.0.0": True, "layers.0.2": True, "layers.0.1": False}
    assert len(list_swapped(model)) == 3
    static = SVDQuantPreset("static", "nvfp4", "nvfp4_static", 0)
    with pytest.raises(FormatError, match=r"layers\.0\.1: .*needs calibration data"):
        quantize(Routed(), batches, static)


class WritesBetween(nn.Module):
    """b gets the tensor that a got, after it was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        y = self.a(x)
        z: torch.Tensor = y + self.b(x.mul_(-50.0))
        return z


def test_one_tensor_written_to_in_between_is_two_inputs() -> None:
    report = quantize(WritesBetween(), torch.randn(40, 64))
    assert [layer.group for layer in report.layers] == [("a",), ("b",)]


def test_subclasses_of_linear_are_left_out() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
            self.out = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.attention(x, x, x)[0])
            return y

    model = Mixed().eval()
    x = torch.randn(2, 20, 64)
    report = quantize(model, x)
    assert report.left_out == ("attention.out_proj",)
    assert list_swapped(model) == ["out"]
    assert model(x).shape == x.shape


def test_layers_that_read_their_linears_weights_are_left_out_and_still_run() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x)
            for layer in self.layers:
                x = layer(x)
            return x

    x = torch.randn(2, 20, 64)
    with pytest.raises(FormatError, match="no linear to quantize"):
        quantize(Encoder().encoder, x)
    model = Encoder().eval()
    report = quantize(model, x)
    assert "encoder.layers.0.linear1" in report.left_out
    with torch.no_grad():
        assert model(x).shape == x.shape


def test_a_model_that_is_itself_a_linear_is_refused_with_the_way_out() -> None:
    with pytest.raises(FormatError, match=r"W4A4Linear\.from_linear"):
        quantize(nn.Linear(128, 128), None)
