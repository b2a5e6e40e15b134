import json

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.compressed_tensors import CompressedTensors, make_quantization_config
from halfbyte.errors import CheckpointError
from halfbyte.formats.block_format import get_format
from halfbyte.reference.decode import dequantize, make_value_table
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear, make_weight

N, K = 24, 64
DIVISOR = 3584.0  # 2688 / 0.75


def make_parts(name: str) -> dict[str, torch.Tensor]:
    weight = make_weight(N, K, get_format(name))
    parts = {"weight_packed": weight.data, "weight_scale": weight.scales}
    if name == "nvfp4":
        parts["weight_global_scale"] = torch.tensor([DIVISOR])
        parts["input_global_scale"] = torch.tensor([131.0])
    else:
        parts["weight_scale"] = weight.scales.view(torch.uint8)
    parts["bias"] = torch.linspace(-1, 1, N).bfloat16()
    return parts


def make_file(name: str, is_w4a4: bool = True) -> FamilyFile:
    config = {"quantization_config": make_quantization_config(name, is_w4a4)}
    tensors = name_parts("model.up", make_parts(name))
    tensors["model.norm.weight"] = torch.ones(K, dtype=torch.bfloat16)
    return FamilyFile(tensors, files={"config.json": json.dumps(config).encode()})


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_round_trip_gives_every_byte_back(tmp_path, name):
    assert_round_trip(make_file(name).write(tmp_path / "in"), "compressed-tensors")


def test_global_scale_divides(tmp_path):
    linear = read_all(make_file("nvfp4").write(tmp_path / "in"))[1]["model.up"].linear
    parts = make_parts("nvfp4")
    packed = parts["weight_packed"].numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(N, K)
    scales = make_value_table("e4m3")[parts["weight_scale"].view(torch.uint8).numpy()]
    wanted = make_value_table("e2m1")[codes] * np.repeat(scales, 16, axis=1) / DIVISOR
    np.testing.assert_allclose(dequantize(linear.weight), wanted, rtol=2.0**-24)
    assert linear.activation.name == "nvfp4_static"


def test_multiplier_in_place_of_the_divisor_is_refused_by_name(tmp_path):
    file = make_file("nvfp4")
    file.tensors["model.up.weight_global_scale"] = torch.tensor([1 / DIVISOR])
    with pytest.raises(CheckpointError, match=r"model\.up.*reciprocal"):
        read_all(file.write(tmp_path / "in"))


@pytest.mark.parametrize("value", [0.0, float("nan"), -1.0, float("inf")])
def test_global_scale_that_is_none_is_refused_by_name(tmp_path, value):
    file = make_file("nvfp4")
    file.tensors["model.up.weight_global_scale"] = torch.tensor([value])
    with pytest.raises(CheckpointError, match=r"model\.up\.weight_global_scale"):
        read_all(file.write(tmp_path / "in"))


@pytest.mark.parametrize("is_w4a4", [True, False])
def test_configuration_says_whether_mxfp4_quantizes_x(tmp_path, is_w4a4):
    linear = read_all(make_file("mxfp4", is_w4a4).write(tmp_path / "in"))[1]["model.up"].linear
    assert (linear.activation is not None) == is_w4a4


def test_format_of_the_configuration_against_the_tensors_names_both(tmp_path):
    file = make_file("nvfp4")
    config = {"quantization_config": make_quantization_config("mxfp4", True)}
    other = FamilyFile(file.tensors, files={"config.json": json.dumps(config).encode()})
    with pytest.raises(CheckpointError, match=r"tensors of nvfp4.*mxfp4-pack-quantized"):
        read_all(other.write(tmp_path / "in"))


@pytest.mark.parametrize(
    "pair", [("nvfp4", "nvfp4_static"), ("nvfp4", None), ("mxfp4", "mxfp4"), ("mxfp4", None)]
)
def test_records_survive_encode_and_decode(pair):
    linear = make_linear(LinearShape(N, K, 0, parts=False), pair)
    assert_survives(CompressedTensors(), linear, {"activation": pair[1] or "none"})


def test_obstacles_name_the_part_that_has_no_tensor():
    linear = make_linear(LinearShape(N, K, 8, parts=False), ("nvfp4", "nvfp4_static"))
    assert "lora_down" in CompressedTensors().find_obstacle(linear)
