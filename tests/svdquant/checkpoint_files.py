"""Small checkpoints for the file tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_tensors(layers: int = 2, rows: int = 64, columns: int = 80) -> dict[str, torch.Tensor]:
    """Return a toy transformer's bfloat16 tensors: 4 linears a layer, embedding, norms, biases."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).bfloat16()

    tensors = {"model.embed_tokens.weight": normal(100, columns), "step": torch.tensor(7)}
    for index in range(layers):
        for part in ATTENTION:
            tensors[f"model.layers.{index}.{part}.weight"] = normal(rows, columns)
        tensors[f"model.layers.{index}.q_proj.bias"] = normal(rows)
        tensors[f"model.layers.{index}.norm.weight"] = normal(columns)
    return tensors


def write_file(path: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write one safetensors file and return its path."""
    save_file(tensors or make_tensors(), path, {"format": "pt"})
    return path


def write_directory(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    """Write a directory of two shards, an index, a configuration and a tokenizer; return it.

    The shards split a q/k/v group and part a weight from its bias.
    """
    folder.mkdir()
    tensors = tensors or make_tensors()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    weight_map = {}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(held, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "tokenizer.model").write_bytes(b"\x00\x01")
    return folder


def read_tree(place: Path) -> dict[str, bytes]:
    """Return every file's bytes by relative name; one file under the name ''."""
    if place.is_file():
        return {"": place.read_bytes()}
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
