"""diffusers' nunchaku_lite: configuration and tensors must agree, and both come back."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoints.family import Layer, write_layer
from halfbyte.checkpoints.nunchaku_lite import NunchakuLite, make_lite_config
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.checkpoints.test_nunchaku_awq import make_model, pack_like_the_exporter
from tests.random_linears import LinearShape, make_linear

DATA = Path(__file__).parent.parent / "data" / "nunchaku"
SVDQ, AWQ = "blocks.0.ff.net.2", "blocks.0.norm1.linear"
PAIRS = {"nvfp4": "nvfp4_nunchaku", "int4": "int4"}


def load_layer(precision: str) -> dict[str, torch.Tensor]:
    """A layer that nunchaku's own packer wrote, as the parameters of diffusers' module."""
    tensors = load_file(DATA / f"nunchaku_{precision}_packed.safetensors")
    parts = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    parts.pop("smooth_factor_orig", None)
    return {name: part.reshape(1) if name == "wtscale" else part for name, part in parts.items()}


def make_config(kind: str, columns: int, **changes) -> dict:
    section = {
        "precision": kind,
        "group_size": 16 if kind == "nvfp4" else 64,
        "rank": columns,
        "targets": [SVDQ],
    }
    awq = {"precision": "int4", "group_size": 64, "targets": [AWQ]}
    return {
        "quant_method": "nunchaku_lite",
        "compute_dtype": "bfloat16",
        "svdq_w4a4": {**section, **changes},
        "awq_w4a16": awq,
    }


def write_file(folder, precision="nvfp4", config=None, parts=None):
    parts = load_layer(precision) if parts is None else parts
    config = make_config(precision, parts["proj_down"].shape[1]) if config is None else config
    tensors = name_parts(SVDQ, parts)
    tensors |= name_parts(AWQ, pack_like_the_exporter(make_model(24, 64), 1))
    model = {"_class_name": "ErnieImageTransformer2DModel", "quantization_config": config}
    return FamilyFile(tensors, {}, {"config.json": json.dumps(model).encode()}).write(folder)


@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
def test_round_trip_gives_every_byte_and_the_configuration_back(tmp_path, precision):
    path = write_file(tmp_path / "in", precision)
    layers = assert_round_trip(path, "nunchaku_lite")
    with SafetensorsSource(path) as source:
        side = NunchakuLite().make_side_content(layers, source)
        assert json.loads(side.files["config.json"]) == source.configs["config.json"]


@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
def test_layer_has_the_packer_s_own_output(tmp_path, precision):
    linear = read_all(write_file(tmp_path / "in", precision))[1][SVDQ].linear
    plain = load_file(DATA / f"nunchaku_{precision}_plain.safetensors")
    x = read_floats(plain["x"])
    y = (x / read_floats(linear.smooth)) @ dequantize(linear.weight).T
    if linear.channel_scale is not None:
        y = y * read_floats(linear.channel_scale)
    y = y + read_floats(linear.bias)
    y = y + x @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T
    wanted = plain["y_w4a16"].numpy()
    assert np.linalg.norm(y - wanted) <= 1e-12 * np.linalg.norm(wanted)


def test_activations_are_signed_and_rows_in_order_whatever_the_name(tmp_path):
    layers = read_all(write_file(tmp_path / "in", "int4"))[1]
    assert layers[SVDQ].linear.activation.name == "int4"
    awq, model = layers[AWQ].linear, make_model(24, 64)
    low_rank = read_floats(awq.lora_up) @ read_floats(awq.lora_down)
    np.testing.assert_array_equal(dequantize(awq.weight) + low_rank, model.weight)
    np.testing.assert_array_equal(read_floats(awq.bias), read_floats(model.bias))


@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
@pytest.mark.parametrize("rank", [0, 16])
def test_layer_from_elsewhere_gets_every_parameter_in_bfloat16(tmp_path, precision, rank):
    linear = make_linear(LinearShape(128, 128, rank, parts=False), (precision, PAIRS[precision]))
    scales = linear.weight.scales
    if precision == "int4":
        linear = replace(linear, weight=replace(linear.weight, scales=scales.bfloat16()))
    layer = Layer(SVDQ, linear)
    assert NunchakuLite().find_obstacle(linear) is None
    parts = write_layer(NunchakuLite(), layer)
    wanted = {"qweight", "wscales", "smooth_factor", "proj_down", "proj_up"}
    wanted |= {"wcscales", "wtscale"} if precision == "nvfp4" else set()
    assert set(parts) == wanted
    assert parts["proj_up"].shape == (128, rank)
    floats = wanted - {"qweight"} - ({"wscales"} if precision == "nvfp4" else set())
    assert {parts[name].dtype for name in floats} == {torch.bfloat16}
    config = {"quantization_config": make_lite_config({SVDQ: layer})}
    files = {"config.json": json.dumps(config).encode()}
    path = FamilyFile(name_parts(SVDQ, parts), {}, files).write(tmp_path / "out")
    again = assert_round_trip(path, "nunchaku_lite")[SVDQ].linear
    assert again.rank == rank
    np.testing.assert_allclose(dequantize(again.weight), dequantize(linear.weight), rtol=2**-8)


def test_parts_of_another_dtype_and_a_scalar_come_back(tmp_path):
    parts = load_layer("nvfp4")
    parts["wtscale"] = parts["wtscale"].float().reshape(())
    parts["smooth_factor"] = parts["smooth_factor"].float() * 1.0001
    assert_round_trip(write_file(tmp_path / "in", parts=parts), "nunchaku_lite")


def test_records_survive_encode_and_decode():
    linear = make_linear(LinearShape(128, 128, dtype=torch.bfloat16))
    exact = replace(
        linear,
        weight=replace(linear.weight, global_scale=torch.tensor(0.0371).bfloat16().float()),
        channel_scale=linear.channel_scale.bfloat16().float(),
    )
    assert_survives(NunchakuLite(), exact, NunchakuLite().make_facts("up", exact))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 48}, r"proj_down.*shape \[\d+, \d+\].*48 columns by svdq_w4a4.rank 48"),
        ({"group_size": 32}, "group_size 32 with nvfp4, wanted 16"),
        ({"precision": "int4", "group_size": 64}, "F8_E4M3.*F16 or BF16"),
        ({"precision": "fp8"}, r"precision .fp8."),
        ({"targets": [SVDQ, "blocks.1.up"]}, r"target .blocks.1.up. with tensors {}"),
        ({"targets": [AWQ]}, "in svdq_w4a4 and awq_w4a16"),
        ({"targets": []}, "at least one layer"),
        ({"rank": "32"}, r"rank .32."),
    ],
)
def test_configuration_against_the_file_names_both(tmp_path, changes, words):
    config = make_config("nvfp4", load_layer("nvfp4")["proj_down"].shape[1], **changes)
    with pytest.raises(CheckpointError, match=words):
        read_all(write_file(tmp_path / "in", config=config))


def test_layer_that_is_no_target_is_named(tmp_path):
    config = make_config("nvfp4", 32)
    del config["awq_w4a16"]
    with pytest.raises(CheckpointError, match=r"norm1\.linear\.qweight.*of no target"):
        read_all(write_file(tmp_path / "in", config=config))


def test_missing_parameter_is_named(tmp_path):
    parts = load_layer("nvfp4")
    del parts["wcscales"]
    with pytest.raises(CheckpointError, match=r"target .blocks.0.ff.net.2..*wanted .*wcscales"):
        read_all(write_file(tmp_path / "in", parts=parts))


@pytest.mark.parametrize("family", ["nunchaku", "nunchaku_lite"])
def test_file_without_configuration_has_two_readings(tmp_path, family):
    path = FamilyFile(name_parts(SVDQ, load_layer("int4"))).write(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"nunchaku or nunchaku_lite.*--from"):
        read_all(path)
    activation = read_all(path, family)[1][SVDQ].linear.activation.name
    assert activation == {"nunchaku": "uint4_shifted", "nunchaku_lite": "int4"}[family]


def test_two_ranks_are_named():
    layers = {
        name: Layer(name, make_linear(LinearShape(128, 128, rank)))
        for name, rank in (("a.up", 16), ("b.up", 32))
    }
    with pytest.raises(CheckpointError, match=r"a.up has nvfp4 and rank 16 and b.up has"):
        make_lite_config(layers)


def test_numbers_that_leave_the_compute_dtype_are_named():
    linear = make_linear(LinearShape(128, 128))
    tiny = replace(linear.weight, global_scale=torch.tensor(1e-9))
    facts = {**NunchakuLite().make_facts("up", linear), "compute_dtype": "float16"}
    with pytest.raises(CheckpointError, match=r"wtscale: 1e-09 does not fit torch.float16"):
        NunchakuLite().encode(replace(linear, weight=tiny), facts)


def test_unsigned_activations_are_an_obstacle():
    linear = make_linear(LinearShape(128, 128), ("int4", "uint4_shifted"))
    assert "uint4_shifted" in NunchakuLite().find_obstacle(linear)
