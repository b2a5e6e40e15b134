"""nunchaku files: read against the packer's own plain values, written back byte for byte."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoints.family import Layer, write_layer
from halfbyte.checkpoints.nunchaku import Nunchaku, make_quantization_config
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    read_all,
)
from tests.random_linears import LinearShape, make_linear

DATA = Path(__file__).parent.parent / "data" / "nunchaku"
PRECISIONS = ("int4", "nvfp4")
OLD_NAMES = {
    "proj_down": "lora_down",
    "proj_up": "lora_up",
    "smooth_factor": "smooth",
    "smooth_factor_orig": "smooth_orig",
}


def load_golden(precision: str, layer: str = "layer") -> dict[str, torch.Tensor]:
    tensors = load_file(DATA / f"nunchaku_{precision}_packed.safetensors")
    return {name.replace("layer.", f"{layer}."): tensor for name, tensor in tensors.items()}


def make_metadata(precision: str) -> dict[str, str]:
    return {"quantization_config": json.dumps(make_quantization_config(precision, 32))}


def rename_to_old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.{OLD_NAMES.get(part, part)}": tensor
        for (layer, _, part), tensor in ((name.rpartition("."), t) for name, t in tensors.items())
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_old", [False, True])
def test_round_trip_gives_every_byte_back(tmp_path, precision, is_old):
    tensors = load_golden(precision)
    tensors = rename_to_old(tensors) if is_old else tensors
    path = FamilyFile(tensors, make_metadata(precision)).write(tmp_path / "in")
    assert set(assert_round_trip(path, "nunchaku")) == {"layer"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layer_has_the_packer_s_own_output(tmp_path, precision):
    path = FamilyFile(load_golden(precision), make_metadata(precision)).write(tmp_path / "in")
    linear = read_all(path)[1]["layer"].linear
    plain = load_file(DATA / f"nunchaku_{precision}_plain.safetensors")
    x = read_floats(plain["x"])
    y = (x / read_floats(linear.smooth)) @ dequantize(linear.weight).T
    if linear.channel_scale is not None:
        y = y * read_floats(linear.channel_scale)
    y = y + read_floats(linear.bias)
    y = y + x @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T
    wanted = plain["y_w4a16"].numpy()
    assert np.linalg.norm(y - wanted) <= 1e-12 * np.linalg.norm(wanted)


@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_nunchaku"), ("int4", "int4")])
def test_records_survive_encode_and_decode(pair):
    linear = make_linear(LinearShape(128, 256, 16, parts=pair[0] == "nvfp4"), pair)
    facts = {"keys": "proj", "precision": pair[0], "activation": pair[1]}
    assert_survives(Nunchaku(), linear, facts)


@pytest.mark.parametrize(
    ("layer", "activation"),
    [
        ("transformer_blocks.0.mlp_fc2", "uint4_shifted"),
        ("transformer_blocks.0.ff_context.net.2", "uint4_shifted"),
        ("transformer_blocks.0.mlp_fc1", "int4"),
        ("transformer_blocks.0.mlp_fc20", "int4"),
        ("transformer_blocks.0.img_mlp.net.2", "uint4_shifted"),
        ("down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2", "int4"),
    ],
)
def test_linear_behind_a_gelu_is_unsigned_in_int4(tmp_path, layer, activation):
    path = FamilyFile(load_golden("int4", layer), make_metadata("int4")).write(tmp_path / "in")
    assert read_all(path)[1][layer].linear.activation.name == activation


def test_precision_against_the_metadata_names_both(tmp_path):
    path = FamilyFile(load_golden("nvfp4"), make_metadata("int4")).write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"wscales is nvfp4.*says int4"):
        read_all(path)


def test_layer_without_wtscale_and_wcscales_has_ones(tmp_path):
    tensors = load_golden("nvfp4")
    del tensors["layer.wtscale"], tensors["layer.wcscales"]
    tensors["layer.wscales"] = (
        tensors["layer.wscales"].view(torch.uint8).clamp(max=0x40).view(torch.float8_e4m3fn)
    )
    linear = read_all(FamilyFile(tensors, make_metadata("nvfp4")).write(tmp_path / "in"))[1][
        "layer"
    ].linear
    assert float(linear.weight.global_scale) == 1.0
    assert linear.channel_scale is None


def test_wtscale_of_037_comes_back(tmp_path):
    tensors = load_golden("nvfp4")
    tensors["layer.wtscale"] = torch.tensor([0.37], dtype=torch.bfloat16)
    path = FamilyFile(tensors, make_metadata("nvfp4")).write(tmp_path / "in")
    linear = assert_round_trip(path, "nunchaku")["layer"].linear
    assert float(linear.weight.global_scale) == float(torch.tensor(0.37).bfloat16())


def test_unknown_tensor_of_a_layer_is_named(tmp_path):
    tensors = load_golden("int4")
    tensors["layer.wzeros"] = torch.zeros(6, 256, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"layer\.wzeros"):
        read_all(FamilyFile(tensors, make_metadata("int4")).write(tmp_path / "in"))


def test_sizes_that_need_padding_are_an_obstacle_by_name():
    linear = make_linear(LinearShape(100, 256, 16, parts=False), ("int4", "int4"))
    assert "out_features 100" in Nunchaku().find_obstacle(linear)
    linear = make_linear(LinearShape(128, 256, 24, parts=False), ("int4", "int4"))
    assert "rank 24" in Nunchaku().find_obstacle(linear)


def test_layer_whose_name_says_another_activation_is_refused():
    linear = make_linear(LinearShape(128, 128, 16, parts=False), ("int4", "int4"))
    with pytest.raises(CheckpointError, match=r"mlp_fc2: activation int4.*uint4_shifted"):
        write_layer(Nunchaku(), Layer("transformer_blocks.0.mlp_fc2", linear))
