"""Decoders of transformers, built from a configuration, through `halfbyte.load`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.errors import CheckpointError
from halfbyte.formats.activation import get_activation_format
from halfbyte.nn import W4A4Linear, save_model
from tests.peers.loaded_models import (
    assert_loads_equal,
    quantize_blocks,
    write_families,
)

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'halfbyte[peers]'"
)

pytestmark = pytest.mark.peers

IDS = torch.arange(12)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "rms_norm_eps": 1e-6,  # Phi-3's default differs from Llama's
}


def make_model(kind: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(dtype).eval()


@torch.no_grad()
def run(model: nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(IDS).logits
    return logits


@pytest.mark.parametrize(
    ("kind", "activation", "families"),
    [
        ("Llama", "nvfp4_nunchaku", ["nunchaku"]),
        ("Llama", "nvfp4_one_level", ["svdquant-kernels"]),
        ("Llama", "int4", ["nunchaku"]),
        ("Qwen2", "nvfp4_nunchaku", ["nunchaku"]),
        ("Qwen3", "nvfp4_nunchaku", ["nunchaku"]),
    ],
)
def test_a_loaded_decoder_is_the_quantized_one(
    tmp_path: Path, kind: str, activation: str, families: list[str]
) -> None:
    tied = {"tie_word_embeddings": kind == "Qwen3", "head_dim": 64}
    options = tied if kind != "Qwen2" else {"tie_word_embeddings": True}

    def make() -> nn.Module:
        return make_model(kind, **options)

    assert_loads_equal(make, run, tmp_path, activation, families)


def test_calibrated_families_give_the_same_decoder(tmp_path: Path) -> None:
    """ModelOpt and compressed-tensors invert each other's scales; the layers are the same."""
    torch.manual_seed(0)
    model = make_model("Llama")
    quantize_blocks(model, "nvfp4_dynamic")
    static = get_activation_format("nvfp4_static")
    for name, linear in list(model.named_modules()):
        if isinstance(linear, W4A4Linear):
            record = replace(
                linear.to_record(),
                activation=static,
                activation_global_scale=torch.tensor(0.002),
                smooth=None,
                lora_down=None,
                lora_up=None,
            )
            model.set_submodule(name, W4A4Linear(record))
    wanted = run(model)
    families = ["modelopt", "compressed-tensors", "comfyui", "torchao"]
    for family, path in write_families(model, tmp_path, families).items():
        assert torch.equal(run(halfbyte.load(path, make_model("Llama"))), wanted), family


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = make_model("Llama", torch.float32)
    quantize_blocks(model, "nvfp4_nunchaku")
    path = tmp_path_factory.mktemp("llama") / "llama.safetensors"
    save_model(model, path)
    return path


def test_a_decoder_with_fused_linears_takes_a_file_with_separate_ones(
    tmp_path: Path, llama_file: Path
) -> None:
    """Phi-3 is Llama with q, k, v in one linear, and gate, up in one."""
    separate = halfbyte.load(llama_file, make_model("Llama", torch.float32))
    fused = halfbyte.load(llama_file, make_model("Phi3", torch.float32))
    qkv = fused.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(qkv, W4A4Linear)
    assert (qkv.out_features, qkv.rank) == (3 * 128, 16)  # q, k, v share their lora_down
    wanted = run(separate).double()
    assert (run(fused).double() - wanted).norm() <= 1e-5 * wanted.norm()
    save_model(fused, tmp_path / "fused.safetensors")
    again = halfbyte.load(tmp_path / "fused.safetensors", make_model("Llama", torch.float32))
    assert (run(again).double() - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_model_of_another_size_or_kind_is_refused(llama_file: Path) -> None:
    with pytest.raises(CheckpointError, match=r"256 -> 128 in the file.*512 -> 128 in the model"):
        halfbyte.load(llama_file, make_model("Llama", torch.float32, intermediate_size=512))
    with pytest.raises(CheckpointError, match=r"7 quantized layer\(s\) have no place.*layers\.1\."):
        halfbyte.load(llama_file, make_model("Llama", torch.float32, num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"nothing in the file fills.*q_norm"):
        halfbyte.load(llama_file, make_model("Qwen3", torch.float32, head_dim=64))


def test_accelerate_builds_loads_and_dispatches(llama_file: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install 'halfbyte[peers]'")
    wanted = run(halfbyte.load(llama_file, make_model("Llama", torch.float32)))
    with accelerate.init_empty_weights():
        empty = make_model("Llama", torch.float32)
    device_map = {"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"}
    loaded = halfbyte.load(llama_file, empty, device_map=device_map)
    assert torch.equal(run(loaded), wanted)
    dispatched = accelerate.dispatch_model(loaded, device_map=device_map, force_hooks=True)
    assert torch.equal(run(dispatched), wanted)
    with pytest.raises(CheckpointError, match="has a hook of accelerate"):
        halfbyte.load(
            llama_file,
            accelerate.cpu_offload(make_model("Llama", torch.float32), execution_device="cpu"),
        )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_decoder_block_compiles_into_one_graph(llama_file: Path, backend: str) -> None:
    model: Any = halfbyte.load(llama_file, make_model("Llama", torch.float32)).model
    block = model.layers[0]
    hidden = torch.randn(1, 12, 128, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12)[None]
    embeddings = model.rotary_emb(hidden, positions)

    def first(value: Any) -> torch.Tensor:
        found: torch.Tensor = value[0] if isinstance(value, tuple) else value
        return found

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        wanted = first(block(hidden, position_embeddings=embeddings))
        got = first(compiled(hidden, position_embeddings=embeddings))
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
