"""save_model and load_model: a quantized model survives the way through a file, or is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import read_halfbyte_file
from halfbyte.nn import W4A4Linear, load_model, quantize_model, save_model
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import QuantizeFileRequest, quantize_file


class Net(nn.Module):
    """An embedding, two blocks and an output head that is tied to the embedding."""

    def __init__(self, width: int = 64, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width)) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.lm_head = nn.Linear(width, 30, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out


TOKENS = torch.arange(30)


def make_net(seed: int, **options: bool | int) -> Net:
    torch.manual_seed(seed)
    return Net(**options).eval()  # type: ignore[arg-type]


def make_quantized(seed: int = 0) -> Net:
    net = make_net(seed)
    quantize_model(net, "nvfp4_svdquant_r32", calibration=TOKENS, progress=False)
    return net


def test_a_loaded_model_gives_the_same_bits_and_keeps_its_ties(tmp_path: Path) -> None:
    net = make_quantized()
    save_model(net, tmp_path / "net.safetensors")
    other = load_model(make_net(1), tmp_path / "net.safetensors")
    assert torch.equal(other(TOKENS), net(TOKENS))
    assert isinstance(other.get_submodule("layers.1.0"), W4A4Linear)
    assert other.get_parameter("lm_head.weight") is other.get_parameter("embed.weight")
    save_model(other, tmp_path / "again.safetensors")
    names = ("net.safetensors", "again.safetensors")
    first, second = ((tmp_path / name).read_bytes() for name in names)
    assert first == second


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    save_model(make_quantized(), tmp_path / "net.safetensors")
    contents = read_halfbyte_file(tmp_path / "net.safetensors")
    assert "lm_head.weight" not in contents.passthrough
    assert json.loads(contents.metadata["halfbyte_tied_tensors"]) == {
        "lm_head.weight": "embed.weight"
    }


def test_an_untied_model_takes_a_tied_file(tmp_path: Path) -> None:
    net = make_quantized()
    save_model(net, tmp_path / "net.safetensors")
    other = load_model(make_net(1, is_tied=False), tmp_path / "net.safetensors")
    assert torch.equal(other(TOKENS), net(TOKENS))


def test_a_model_on_meta_and_a_quantized_one_take_the_file(tmp_path: Path) -> None:
    net = make_quantized()
    save_model(net, tmp_path / "net.safetensors")
    with torch.device("meta"):
        empty = Net().eval()
    assert torch.equal(load_model(empty, tmp_path / "net.safetensors")(TOKENS), net(TOKENS))
    again = load_model(make_quantized(3), tmp_path / "net.safetensors")
    assert torch.equal(again(TOKENS), net(TOKENS))


def test_the_output_of_quantize_file_loads_into_the_model(tmp_path: Path) -> None:
    net = make_net(0, is_tied=False)
    save_file(net.state_dict(), tmp_path / "in.safetensors")
    preset = PRESETS["nvfp4_weight_only_r32"]
    quantize_file(
        QuantizeFileRequest(tmp_path / "in.safetensors", tmp_path / "out.safetensors", preset)
    )
    expected = net(TOKENS)
    loaded = load_model(make_net(1, is_tied=False), tmp_path / "out.safetensors")
    assert isinstance(loaded.get_submodule("layers.0.0"), W4A4Linear)
    assert (loaded(TOKENS) - expected).norm() < 0.1 * expected.norm()


def test_a_shared_linear_stays_shared(tmp_path: Path) -> None:
    def make(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        linear = nn.Linear(64, 64)
        return nn.ModuleDict({"a": linear, "b": linear})

    net = make(0)
    quantize_model(net, "int4_plain", progress=False)
    assert net["a"] is net["b"]
    save_model(net, tmp_path / "net.safetensors")
    other = make(1)
    load_model(other, tmp_path / "net.safetensors")
    assert other["a"] is other["b"]
    x = torch.randn(3, 64)
    assert torch.equal(other["a"](x), net["a"](x))


def test_a_half_model_keeps_its_dtype(tmp_path: Path) -> None:
    net = make_quantized()
    save_model(net, tmp_path / "net.safetensors")
    other = load_model(make_net(1).bfloat16(), tmp_path / "net.safetensors")
    assert other(TOKENS).dtype == torch.bfloat16


def widen(net: Net) -> None:
    net.layers[0][0] = nn.Linear(64, 96)  # type: ignore[index,operator]


def put_relu(net: Net) -> None:
    net.layers[0][0] = nn.ReLU()  # type: ignore[index,operator]


def lengthen(net: Net) -> None:
    net.layers.append(nn.Sequential(nn.Linear(64, 64)))


def drop_norm(net: Net) -> None:
    del net.norm


def grow_embedding(net: Net) -> None:
    net.embed = nn.Embedding(31, 64)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (widen, "64 -> 64 in the file and 64 -> 96"),
        (put_relu, "layers.0.0.*ReLU"),
        (lengthen, "missing.*layers.2.0"),
        (drop_norm, "left over.*norm"),
        (grow_embedding, r"embed.weight.*\(30, 64\).*\(31, 64\)"),
    ],
)
def test_a_file_of_another_model_is_refused_and_nothing_changes(
    change: Callable[[Net], None], text: str, tmp_path: Path
) -> None:
    save_model(make_quantized(), tmp_path / "net.safetensors")
    other = make_net(1)
    change(other)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        load_model(other, tmp_path / "net.safetensors")
    after = other.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_without_4_bit_linears_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantize it first"):
        save_model(make_net(0), tmp_path / "net.safetensors")
    assert not list(tmp_path.iterdir())
