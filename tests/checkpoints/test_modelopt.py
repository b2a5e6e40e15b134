import json

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.modelopt import ModelOpt
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.reference.decode import read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear, make_weight

CONFIG = json.dumps({"quantization": {"quant_algo": "NVFP4_SVD", "lora_rank": 8}}).encode()
N, K, RANK = 24, 64, 8


def make_parts(is_svd: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a layer as ModelOpt stores it, from random bytes."""
    draw = torch.Generator().manual_seed(seed)
    weight = make_weight(N, K, get_format("nvfp4"), seed)
    parts = {
        "weight": weight.data,
        "weight_scale": weight.scales,
        "weight_scale_2": torch.tensor(0.0021),
        "input_scale": torch.tensor([0.0043]),
        "bias": torch.randn(N, generator=draw).bfloat16(),
    }
    if is_svd:
        parts["pre_quant_scale"] = (torch.rand(K, generator=draw) + 0.5).bfloat16()
        parts["svdquant_lora_a"] = torch.randn(RANK, K, generator=draw).bfloat16()
        parts["svdquant_lora_b"] = torch.randn(N, RANK, generator=draw).bfloat16()
    return parts


def make_file(is_svd: bool = True, files=None) -> FamilyFile:
    tensors = name_parts("a.up", make_parts(is_svd)) | name_parts("a.down", make_parts(is_svd, 1))
    tensors["a.norm.weight"] = torch.ones(N, dtype=torch.bfloat16)
    return FamilyFile(tensors, files={"hf_quant_config.json": CONFIG} if files is None else files)


@pytest.mark.parametrize("is_svd", [True, False])
def test_round_trip_gives_every_byte_back(tmp_path, is_svd):
    layers = assert_round_trip(make_file(is_svd).write(tmp_path / "in"), "modelopt")
    assert set(layers) == {"a.up", "a.down"}


def test_low_rank_branch_sees_the_raw_x_and_smooth_divides(tmp_path):
    path = make_file().write(tmp_path / "in")
    _, layers = read_all(path)
    parts, linear = make_parts(), layers["a.up"].linear
    pre_quant_scale = read_floats(parts["pre_quant_scale"])
    x = np.random.default_rng(0).standard_normal((5, K))
    stored = (
        (x * pre_quant_scale)
        @ read_floats(parts["svdquant_lora_a"]).T
        @ read_floats(parts["svdquant_lora_b"]).T
    )
    ours = x @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T
    np.testing.assert_allclose(ours, stored, rtol=1e-12)  # bf16 products are exact in float32
    np.testing.assert_allclose(x / read_floats(linear.smooth), x * pre_quant_scale, rtol=2.0**-24)
    assert linear.activation == get_activation_format("nvfp4_static")
    assert float(linear.weight.global_scale) == pytest.approx(0.0021)


@pytest.mark.parametrize("rank", [0, 8])
def test_records_survive_encode_and_decode(rank):
    assert_survives(
        ModelOpt(),
        make_linear(LinearShape(N, K, rank, parts=False), ("nvfp4", "nvfp4_static")),
    )


def test_without_configuration_the_reading_is_only_possible(tmp_path):
    path = make_file(is_svd=False, files={}).write(tmp_path / "in")
    with SafetensorsSource(path) as source:
        claim = ModelOpt().claim(source)
    assert len(claim.layers) == 2
    assert not claim.is_certain


def test_left_over_tensor_of_a_layer_is_named(tmp_path):
    file = make_file()
    file.tensors["a.up.weight_zero_point"] = torch.zeros(N, dtype=torch.uint8)
    path = file.write(tmp_path / "in")
    with SafetensorsSource(path) as source, pytest.raises(CheckpointError) as error:
        recognise(source)
    assert "a.up.weight_zero_point" in str(error.value)


def test_reciprocal_global_scale_is_refused_by_name(tmp_path):
    file = make_file()
    file.tensors["a.up.weight_scale_2"] = torch.tensor(3584.0)
    with pytest.raises(CheckpointError, match=r"a\.up.*reciprocal"):
        read_all(file.write(tmp_path / "in"))


def test_obstacles_name_what_modelopt_lacks():
    shape = LinearShape(N, K, 8, parts=True)
    for pair, word in ((("nvfp4", "nvfp4_static"), "channel_scale"), (("int4", "int4"), "int4")):
        assert word in ModelOpt().find_obstacle(make_linear(shape, pair))
