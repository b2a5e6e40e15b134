"""Targets: all of a file's, fused and split ones, and what the model lacks is listed."""

from pathlib import Path

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.nn.adapters import add_adapter, list_adapters
from tests.nn.adapters.adapter_files import (
    Factors,
    Tower,
    lengthen,
    make_factors,
    make_layer,
    make_tower_factors,
    spell,
    write,
)
from tests.random_linears import make_input
from tests.tolerance import assert_close_to_reference

K = 64


def test_skipped_targets_are_an_error_that_lists_them(tmp_path: Path) -> None:
    factors = make_tower_factors()
    factors["transformer_blocks.0.norm"] = make_factors(64, 64)
    factors["transformer_blocks.7.attn.to_q"] = make_factors(64, 64)
    for style in ("diffusers", "kohya"):
        model = Tower()
        path = write(tmp_path / f"{style}.safetensors", spell(style, factors))
        with pytest.raises(CheckpointError, match="2 of 10") as caught:
            add_adapter(model, path)
        assert "(a LayerNorm)" in str(caught.value)
        assert "7" in str(caught.value)
        assert "ignore=" in str(caught.value)
        assert list_adapters(model) == {}
        report = add_adapter(model, path, ignore=["*norm.*", "*blocks?7?*"])
        if style == "kohya":
            report_names = {layer.name for layer in report.layers}
            assert report_names == set(make_tower_factors())


def test_a_shape_that_does_not_fit_names_tensor_and_wanted_shape(tmp_path: Path) -> None:
    name = "transformer_blocks.0.img_mod.1"
    path = write(tmp_path / "s.safetensors", spell("diffusers", {name: make_factors(64, 64)}))
    with pytest.raises(CheckpointError) as caught:
        add_adapter(Tower(), path)
    for words in (f"transformer.{name}.lora_A.weight", "[64, 64]", "[96, 64]", name):
        assert words in str(caught.value)


def test_rename_leads_to_other_names(tmp_path: Path) -> None:
    model = nn.ModuleDict({"proj": make_layer(32, K)})
    path = write(tmp_path / "r.safetensors", spell("diffusers", {"old.name": make_factors(32, K)}))
    report = add_adapter(model, path, rename=lambda path: path.replace("old.name", "proj"))
    assert [layer.name for layer in report.layers] == ["proj"]


def make_fused(rows: list[int], name: str = "qkv_proj") -> nn.Module:
    return nn.ModuleDict({"attn": nn.ModuleDict({name: make_layer(sum(rows), K)})})


@pytest.mark.parametrize(
    ("rows", "given"),
    [
        ([32, 32, 32], "qkv"),
        ([64, 16, 16], "qkv"),
        ([64, 16, 16], "qv"),
        ([64, 16, 16], "k"),
        ([64, 16, 16], "q"),
    ],
)
@pytest.mark.parametrize("style", ["peft_named", "kohya"])
def test_parts_of_a_fused_linear_stand_in_a_block_diagonal(
    tmp_path: Path, rows: list[int], given: str, style: str
) -> None:
    model, plain = make_fused(rows), make_fused(rows)
    starts = {"q": 0, "k": rows[0], "v": rows[0] + rows[1]}
    sizes = dict(zip("qkv", rows, strict=True))
    parts = {one: make_factors(sizes[one], K, rank=i + 2, seed=i) for i, one in enumerate(given)}
    tensors = spell(style, {f"attn.{one}_proj": part for one, part in parts.items()})
    (layer,) = add_adapter(model, write(tmp_path / "f.safetensors", tensors)).layers
    assert layer.rank == sum(range(2, 2 + len(given)))
    deltas = []
    for one, part in parts.items():
        up = torch.zeros(sum(rows), part.up.shape[1])
        up[starts[one] : starts[one] + sizes[one]] = part.up
        scale = 2.0 / part.up.shape[1] if style == "kohya" else 1.0
        deltas.append((Factors(part.down, up), scale))
    x = make_input(5, K)
    module, before = (one.get_submodule("attn.qkv_proj") for one in (model, plain))
    assert_close_to_reference(module(x), x, lengthen(before.to_record(), *deltas))


def test_rows_that_do_not_add_up_are_named(tmp_path: Path) -> None:
    parts = {"attn.q_proj": make_factors(32, K), "attn.k_proj": make_factors(40, K)}
    path = write(tmp_path / "f.safetensors", spell("diffusers", parts))
    with pytest.raises(CheckpointError, match=r"'attn.qkv_proj' has 96 rows.*k_proj' 40"):
        add_adapter(make_fused([32, 32, 32]), path)
    parts = {"attn.q_proj": make_factors(32, 48)}
    path = write(tmp_path / "k.safetensors", spell("diffusers", parts))
    with pytest.raises(CheckpointError, match=r"\[32, 48\].*\[32, 64\]"):
        add_adapter(make_fused([32, 32, 32]), path)
    parts = {"attn.q_proj": make_factors(32, K), "attn.qkv_proj": make_factors(96, K)}
    path = write(tmp_path / "b.safetensors", spell("diffusers", parts))
    with pytest.raises(CheckpointError, match="as a whole and in part"):
        add_adapter(make_fused([32, 32, 32]), path)


def test_a_fused_file_is_cut_for_a_model_that_is_not(tmp_path: Path) -> None:
    names, rows = ("to_q", "to_k", "to_v"), (48, 16, 16)
    layers = {name: make_layer(n, K, seed=n) for name, n in zip(names, rows, strict=True)}
    model = nn.ModuleDict({"attn": nn.ModuleDict(layers)})
    whole = make_factors(80, K)
    path = write(tmp_path / "w.safetensors", spell("diffusers", {"attn.to_qkv": whole}))
    records = {name: layer.to_record() for name, layer in layers.items()}
    report = add_adapter(model, path)
    assert [layer.name for layer in report.layers] == [f"attn.{name}" for name in names]
    x = make_input(5, K)
    for name, up in zip(names, whole.up.split(rows), strict=True):
        wanted = lengthen(records[name], (Factors(whole.down, up), 1.0))
        assert_close_to_reference(layers[name](x), x, wanted)


def test_one_linear_under_two_names_gets_one_delta(tmp_path: Path) -> None:
    layer = make_layer(32, K)
    model = nn.ModuleDict({"a": layer, "b": layer})
    both = spell("diffusers", {"a": make_factors(32, K), "b": make_factors(32, K, seed=1)})
    with pytest.raises(CheckpointError, match="'a' and 'b' are one module"):
        add_adapter(model, write(tmp_path / "two.safetensors", both))
    twice = spell("diffusers", {"a": make_factors(32, K)}) | spell(
        "kohya", {"a": make_factors(32, K)}
    )
    with pytest.raises(CheckpointError, match="both mean 'a'"):
        add_adapter(model, write(tmp_path / "twice.safetensors", twice))


def test_names_that_underscores_confuse_are_not_guessed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"p": nn.ModuleDict({"q": make_layer(32, K)}), "p_q": make_layer(32, K)})
    path = write(tmp_path / "u.safetensors", spell("kohya", {"p.q": make_factors(32, K)}))
    with pytest.raises(CheckpointError, match=r"may mean 'p.q', 'p_q'.*rename="):
        add_adapter(model, path)


def test_a_linear_that_is_never_called_is_no_target(tmp_path: Path) -> None:
    model = nn.ModuleDict({"mha": nn.MultiheadAttention(K, 2)})
    path = write(
        tmp_path / "m.safetensors", spell("diffusers", {"mha.out_proj": make_factors(K, K)})
    )
    with pytest.raises(CheckpointError, match="NonDynamicallyQuantizableLinear"):
        add_adapter(model, path)
