"""Each tool's files land on the linears that they were trained for, at the scale they mean."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.nn import W4A4Linear
from halfbyte.nn.adapters import add_adapter, read_adapter
from tests.nn.adapters.adapter_files import (
    Factors,
    Tower,
    lengthen,
    make_factors,
    make_tower_factors,
    spell,
    write,
)
from tests.random_linears import make_input
from tests.tolerance import assert_close_to_reference

RANK = 4
PEFT_CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8}


def assert_applied(model: Tower, plain: Tower, factors: dict[str, Factors], scale: float) -> None:
    """Compare every target with its float64 reference."""
    for path, one in factors.items():
        module, before = model.get_submodule(path), plain.get_submodule(path)
        x = make_input(7, one.down.shape[1])
        if isinstance(before, W4A4Linear):
            assert_close_to_reference(module(x), x, lengthen(before.to_record(), (one, scale)))
            continue
        assert isinstance(before, nn.Linear)
        wanted = x.double() @ (before.weight.double() + scale * one.dense).T + before.bias
        torch.testing.assert_close(module(x).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("style", "scale"),
    [
        ("peft_named", 1.0),
        ("diffusers", 1.0),
        ("diffusers_old", 1.0),
        ("kohya", 0.5),
        ("comfyui", 0.5),
    ],
)
def test_every_style_is_applied_everywhere(tmp_path: Path, style: str, scale: float) -> None:
    factors = make_tower_factors(RANK)
    model = Tower()
    report = add_adapter(model, write(tmp_path / "style.safetensors", spell(style, factors)))
    assert {layer.name for layer in report.layers} == set(factors)
    assert {(layer.rank, layer.scale, layer.error) for layer in report.layers} == {(4, scale, 0.0)}
    assert report.name == "style"
    assert_applied(model, Tower(), factors, scale)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"attn.to_q|to_out.0|.*mod.1": 1}}, 0.25),
    ],
    ids=["alpha", "rslora", "alpha_pattern"],
)
def test_a_peft_directory_scales_by_its_configuration(
    tmp_path: Path, changes: dict[str, Any], scale: float
) -> None:
    factors = make_tower_factors(RANK)
    write(tmp_path / "adapter_model.safetensors", spell("peft", factors))
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT_CONFIG | changes))
    model = Tower()
    assert add_adapter(model, tmp_path).name == tmp_path.name
    assert_applied(model, Tower(), factors, scale)


def test_peft_without_configuration_asks_for_alpha(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", spell("peft", make_tower_factors(RANK)))
    with pytest.raises(CheckpointError, match=r"lora_alpha is not known.*alpha="):
        read_adapter(path)
    assert {delta.scale for delta in read_adapter(path, alpha=6).deltas.values()} == {1.5}


def test_metadata_of_diffusers_and_kohya_give_alpha(tmp_path: Path) -> None:
    tensors = spell("diffusers", make_tower_factors(RANK))
    text = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": 2})
    path = write(tmp_path / "d.safetensors", tensors, lora_adapter_metadata=text)
    assert {delta.scale for delta in read_adapter(path).deltas.values()} == {0.5}
    path = write(tmp_path / "k.safetensors", tensors, ss_network_alpha="1.0", ss_network_dim="4")
    assert {delta.scale for delta in read_adapter(path).deltas.values()} == {0.25}
    path = write(tmp_path / "n.safetensors", tensors, ss_network_alpha="None")
    assert {delta.scale for delta in read_adapter(path).deltas.values()} == {1.0}


def test_older_spellings_lead_to_the_same_linear(tmp_path: Path) -> None:
    one = make_factors(64, 64)
    for down, up in (
        ("{}.attn.processor.to_q_lora.down.weight", "{}.attn.processor.to_q_lora.up.weight"),
        ("unet.{}.attn.to_q.lora.down.weight", "unet.{}.attn.to_q.lora.up.weight"),
        ("{}.attn.to_out.lora_A.weight", "{}.attn.to_out.lora_B.weight"),
        (
            "{}.attn.to_q.lora_linear_layer.down.weight",
            "{}.attn.to_q.lora_linear_layer.up.weight",
        ),
    ):
        block = "transformer_blocks.1"
        path = write(
            tmp_path / "old.safetensors",
            {down.format(block): one.down, up.format(block): one.up[:, :, None, None]},
        )
        (layer,) = add_adapter(Tower(), path).layers
        assert layer.name in (f"{block}.attn.to_q", f"{block}.attn.to_out.0")


def change(tensors: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**tensors, **{key.replace("__", "."): value for key, value in changes.items()}}


P = "transformer_blocks.0.attn.to_q"
GOOD = spell("comfyui", {P: make_factors(64, 64)})
STEM = f"diffusion_model.{P}"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (GOOD | {f"{STEM}.dora_scale": torch.ones(64, 1)}, r"dora_scale.*DoRA"),
        (GOOD | {f"{STEM}.lora_magnitude_vector.default.weight": torch.ones(64)}, "DoRA"),
        (GOOD | {f"{STEM}.lora_mid.weight": torch.ones(4, 4, 3, 3)}, "Tucker"),
        (GOOD | {f"{STEM}.diff_b": torch.ones(64)}, "diff_b.*full difference"),
        (GOOD | {f"{STEM}.lora_B.bias": torch.ones(64)}, "lora_bias"),
        (GOOD | {f"{STEM}.oft_blocks": torch.ones(4, 4, 4)}, "oft_blocks.*not a low rank"),
        (GOOD | {"something.else": torch.ones(3)}, "no adapter kind.*something.else"),
        (GOOD | {f"{STEM}.lora_A.weight": torch.ones(4, 64)}, "same factor"),
        (GOOD | {f"{STEM}.alpha": torch.tensor(0.0)}, "alpha' is 0, wanted a positive"),
        (GOOD | {f"{STEM}.alpha": torch.tensor(float("nan"))}, "alpha' is nan"),
        (GOOD | {f"{STEM}.alpha": torch.ones(2)}, r"alpha': shape \[2\]"),
        (GOOD | {f"{STEM}.lora_up.weight": torch.full((64, 4), torch.inf)}, "lora_up.*NaN or inf"),
        (GOOD | {f"{STEM}.lora_up.weight": torch.ones(64, 5)}, r"\[4, 64\].*\[64, 5\].*one rank"),
        (GOOD | {f"{STEM}.lora_up.weight": torch.ones(64, 4).long()}, "int64.*float dtype"),
        (GOOD | {f"{STEM}.lora_up.weight": torch.ones(64, 4, 3, 3)}, "wanted a matrix"),
        (GOOD | {f"{STEM}.lokr_w1": torch.ones(8, 8)}, "one LoRA, LoKr or LoHa"),
        ({f"{STEM}.lora_up.weight": torch.ones(64, 4)}, "without its down"),
        ({f"{STEM}.alpha": torch.tensor(1.0)}, "alpha alone"),
        ({}, "holds no adapter tensor"),
        (
            {f"{P}.lora_{ab}.{name}.weight": torch.ones(4, 4) for ab in "AB" for name in "xy"},
            "several adapters: 'x', 'y'",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "_", value)[:24] if isinstance(value, str) else "",
)
def test_what_is_no_low_rank_delta_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    path = write(tmp_path / "bad.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(path)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PEFT_CONFIG | {"use_dora": True}, "use_dora"),
        (PEFT_CONFIG | {"peft_type": "OFT"}, "peft_type 'OFT'"),
        (PEFT_CONFIG | {"lora_alpha": -1}, "lora_alpha -1"),
        (PEFT_CONFIG | {"alpha_pattern": {"(": 1}}, "alpha_pattern"),
        (PEFT_CONFIG | {"alpha_pattern": {"(a+)+b": 1}}, "repeated group"),
        (PEFT_CONFIG | {"alpha_pattern": ["a"]}, "alpha_pattern is no JSON object"),
        (["no", "object"], "wanted a JSON object"),
    ],
)
def test_a_configuration_that_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    write(tmp_path / "adapter_model.safetensors", spell("peft", make_tower_factors(RANK)))
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="corrupt or no safetensors file"):
        read_adapter(tmp_path / "adapter_model.bin")


def test_damaged_bytes_are_clean_errors_or_another_sound_adapter(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", GOOD)
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    draw = torch.Generator().manual_seed(5)
    refused = 0
    for index in range(300):
        data = bytearray(good)
        position = int(torch.randint(0, header, (1,), generator=draw))
        data[position] = int(torch.randint(0, 256, (1,), generator=draw))
        if index % 10 == 0:
            data = data[: int(torch.randint(0, len(data), (1,), generator=draw))]
        path.write_bytes(data)
        try:
            add_adapter(nn.ModuleDict(), path)
        except CheckpointError:
            refused += 1
    assert refused == 300  # the model has no linears: even a sound file names its targets
