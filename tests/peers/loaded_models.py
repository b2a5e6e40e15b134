"""Models of other packages: quantized, written in several families, loaded back."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import halfbyte
from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.nn import W4A4Linear, quantize_model, save_model
from halfbyte.svdquant.presets import SVDQuantPreset

Run = Callable[[nn.Module], torch.Tensor]


def make_quick_preset(activation: str, rank: int = 16) -> SVDQuantPreset:
    """Return a preset that takes no time: what is tested is files, not accuracy."""
    number = "int4" if activation == "int4" else "nvfp4"
    return SVDQuantPreset(f"quick_{activation}", number, activation, rank=rank, rounding="nearest")


def quantize_blocks(model: nn.Module, activation: str, min_features: int = 64) -> list[str]:
    """Quantize the model's block linears in place; return their names."""
    preset = make_quick_preset(activation)
    quantize_model(model, preset, progress=False)
    # Of a model with several lists of blocks quantize_model takes the longest.
    lists = [f"{name}." for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith(tuple(lists)):
            sizes = (module.in_features, module.out_features)
            if min(sizes) >= min_features:
                model.set_submodule(name, W4A4Linear.from_linear(module, preset))
    return [name for name, module in model.named_modules() if isinstance(module, W4A4Linear)]


def write_families(model: nn.Module, folder: Path, families: Sequence[str]) -> dict[str, Path]:
    """Write the model as a halfbyte file, and convert that to the other families."""
    paths = {"halfbyte": folder / "model.safetensors"}
    save_model(model, paths["halfbyte"])
    for family in families:
        paths[family] = folder / family
        convert_checkpoint(ConvertRequest(paths["halfbyte"], paths[family], family))
    return paths


def assert_loads_equal(
    make: Callable[[], nn.Module], run: Run, folder: Path, activation: str, families: Sequence[str]
) -> nn.Module:
    """Quantize a model and load its files into others with other weights: the outputs are equal.

    Both into a model with weights and into one on "meta" whose buffers have values. Returns the
    quantized model.
    """
    torch.manual_seed(0)
    quantized = make()
    before = run(quantized)
    names = quantize_blocks(quantized, activation)
    wanted = run(quantized)
    assert names
    assert not torch.equal(wanted, before)
    for family, path in write_families(quantized, folder, families).items():
        torch.manual_seed(1)
        other = make()
        assert not torch.equal(run(other), wanted)
        loaded = halfbyte.load(path, other)
        found = [name for name, m in loaded.named_modules() if isinstance(m, W4A4Linear)]
        assert found == names
        assert torch.equal(run(loaded), wanted), family
        halfbyte.load(path, loaded)  # again
        assert torch.equal(run(loaded), wanted), family
    empty = halfbyte.load(folder / "model.safetensors", drop_weights(make()))
    assert torch.equal(run(empty), wanted)
    return quantized


def drop_weights(model: nn.Module) -> nn.Module:
    """Return the model with parameters on "meta", as accelerate.init_empty_weights builds it."""
    held: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = held.setdefault(id(parameter), empty)
    return model
