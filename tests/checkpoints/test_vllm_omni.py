"""vllm-omni files of both kinds, made by packers of this test from plain values.

`permute_vector` walks over the lanes of nunchaku's scale packs; nothing is shared with the module.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import Layer, write_layer
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.checkpoints.vllm_omni import VllmOmni, VllmOmniConverted, make_omni_config
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear

LAYER = "layers.0.attention.to_qkv"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CONFIG = {"quant_method": "svdquant", "rank": 16, "precision": "nvfp4", "act_unsigned": False}


def make_parts(n: int = 128, k: int = 128, rank: int = 16) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(n + k)

    def positive(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=draw) + 0.5).bfloat16()

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).bfloat16()

    scales = torch.randint(0x28, 0x48, (k // 16, n), generator=draw).to(torch.uint8)
    return {
        "qweight": torch.randint(-128, 128, (n, k // 2), generator=draw).to(torch.int8),
        "wscales": scales.view(torch.float8_e4m3fn),
        "wtscale": torch.tensor([0.0371], dtype=torch.bfloat16),
        "wcscales": positive(n),
        "smooth_factor": positive(k),
        "proj_down": normal(k, rank),
        "proj_up": normal(n, rank),
        "bias": normal(n),
    }


def permute_vector(vector: torch.Tensor) -> torch.Tensor:
    """A vector as nunchaku stores it: lane after lane, two pairs eight apart for each."""
    stored = []
    for tile in range(0, len(vector), 128):
        for lane in range(32):
            start = tile + 16 * (lane // 4) + 2 * (lane % 4)
            stored += [start, start + 1, start + 8, start + 9]
    return vector[torch.tensor(stored)]


def convert_like_the_first_converter(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    vectors = ("smooth_factor", "wcscales", "bias")
    return {name: permute_vector(part) if name in vectors else part for name, part in parts.items()}


def multiply(parts: dict[str, torch.Tensor], x: np.ndarray) -> np.ndarray:
    """y of unquantized x, by the formula of the reader, in float64."""
    codes = parts["qweight"].numpy().view(np.uint8)
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(codes.shape[0], -1)
    values = E2M1[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
    floats = {name: part.double().numpy() for name, part in parts.items() if name != "qweight"}
    weight = values * np.repeat(floats["wscales"].T, 16, axis=1)
    y = (x / floats["smooth_factor"]) @ weight.T * floats["wtscale"] * floats["wcscales"]
    return y + x @ floats["proj_down"] @ floats["proj_up"].T + floats["bias"]


def apply_record(linear, x: np.ndarray) -> np.ndarray:
    y = (x / read_floats(linear.smooth)) @ dequantize(linear.weight).T
    y = y * read_floats(linear.channel_scale) + read_floats(linear.bias)
    return y + x @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T


def write_file(folder, parts, config=None, metadata=None):
    config = CONFIG if config is None else config
    model = {"_class_name": "ZImageTransformer2DModel", "quantization_config": config}
    files = {"config.json": json.dumps(model).encode()} if config else {}
    tensors = {**name_parts(LAYER, parts), "embed.weight": torch.ones(2, 2)}
    return FamilyFile(tensors, metadata or {}, files).write(folder)


def test_file_means_what_its_reader_computes(tmp_path):
    parts = make_parts()
    linear = read_all(write_file(tmp_path / "in", parts), "vllm-omni")[1][LAYER].linear
    x = np.random.default_rng(0).standard_normal((3, 128))
    y, wanted = apply_record(linear, x), multiply(parts, x)
    assert np.linalg.norm(y - wanted) <= 1e-12 * np.linalg.norm(wanted)
    assert linear.activation.name == "nvfp4_one_level"


def test_converted_file_means_what_was_converted(tmp_path):
    parts = make_parts(256, 128)
    path = write_file(tmp_path / "in", convert_like_the_first_converter(parts))
    linear = read_all(path, "vllm-omni-converted")[1][LAYER].linear
    x = np.random.default_rng(0).standard_normal((3, 128))
    y, wanted = apply_record(linear, x), multiply(parts, x)
    assert np.linalg.norm(y - wanted) <= 1e-12 * np.linalg.norm(wanted)
    misread = read_all(path, "vllm-omni")[1][LAYER].linear
    assert np.linalg.norm(apply_record(misread, x) - wanted) > 0.01 * np.linalg.norm(wanted)


def test_file_that_can_be_either_is_refused_with_both_names(tmp_path):
    with pytest.raises(CheckpointError, match=r"vllm-omni or vllm-omni-converted.*--from.*--orig"):
        read_all(write_file(tmp_path / "in", make_parts()))


@pytest.mark.parametrize("family", ["vllm-omni", "vllm-omni-converted"])
def test_original_decides(tmp_path, family):
    parts = make_parts()
    parts["smooth_factor"] = (parts["smooth_factor"].float() ** 4).bfloat16()
    stored = parts if family == "vllm-omni" else convert_like_the_first_converter(parts)
    bias = parts["bias"].double().numpy()
    weight = multiply(parts, np.eye(128)) - bias
    original = {f"{LAYER}.weight": torch.from_numpy(weight.T.copy()).float()}
    model = FamilyFile(original).write(tmp_path / "model")
    path = write_file(tmp_path / "in", stored)
    with SafetensorsSource(path) as source, SafetensorsSource(model) as unquantized:
        assert recognise(source, None, unquantized).family.name == family


@pytest.mark.parametrize("parts", [make_parts(64, 128), make_parts(128, 48), make_parts(rank=8)])
def test_sizes_that_fill_no_fragment_are_plain(tmp_path, parts):
    config = {**CONFIG, "rank": parts["proj_up"].shape[1]}
    assert_round_trip(write_file(tmp_path / "in", parts, config), "vllm-omni")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qweight": make_parts()["qweight"].view(torch.uint8)},
        {"wtscale": torch.tensor(0.0371)},
        {"smooth_factor": torch.rand(128) + 0.5, "bias": torch.randn(128).half()},
    ],
)
@pytest.mark.parametrize("dropped", [(), ("bias",), ("wcscales",)])
def test_marked_file_comes_back_byte_for_byte(tmp_path, changes, dropped):
    parts = {**make_parts(), **changes}
    parts = {name: part for name, part in parts.items() if name not in dropped}
    path = write_file(tmp_path / "in", parts, metadata={"svdquant_vectors": "plain"})
    assert_round_trip(path, "vllm-omni")


def test_mark_of_fragments_decides_too(tmp_path):
    path = write_file(tmp_path / "in", make_parts(), metadata={"svdquant_vectors": "fragments"})
    assert read_all(path)[0].family.name == "vllm-omni-converted"


def test_written_file_is_recognised_and_says_what_it_holds(tmp_path):
    linear = make_linear(LinearShape(128, 128, 16))
    layer = Layer(LAYER, linear)
    with SafetensorsSource(write_file(tmp_path / "in", make_parts(), {})) as source:
        side = VllmOmni().make_side_content({LAYER: layer}, source)
    parts = write_layer(VllmOmni(), layer)
    tensors = {**name_parts(LAYER, parts), "embed.weight": torch.ones(2, 2)}
    path = FamilyFile(tensors, side.metadata, side.files).write(tmp_path / "out")
    assert_round_trip(path, "vllm-omni")
    config = json.loads(side.files["config.json"])["quantization_config"]
    assert config == {**CONFIG, "modules_to_not_convert": ["embed"]}


def test_records_survive_encode_and_decode():
    linear = make_linear(LinearShape(48, 96, 8, dtype=torch.bfloat16))
    exact = replace(
        linear,
        weight=replace(linear.weight, global_scale=torch.tensor(0.0371).bfloat16().float()),
        channel_scale=linear.channel_scale.bfloat16().float(),
    )
    assert_survives(VllmOmni(), exact)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 32}, r"proj_down.*shape \[128, 16\].*32 columns"),
        ({"rank": 0}, "rank 0, wanted"),
        ({"precision": "int4"}, "precision .int4., wanted nvfp4"),
        ({"act_unsigned": True}, "act_unsigned"),
        ({"modules_to_not_convert": ["attention"]}, "to_qkv.*modules_to_not_convert .attention."),
        ({"modules_to_not_convert": "attention"}, "a list of names"),
    ],
)
def test_configuration_against_the_file_names_both(tmp_path, changes, words):
    path = write_file(tmp_path / "in", make_parts(), {**CONFIG, **changes})
    with pytest.raises(CheckpointError, match=words):
        read_all(path, "vllm-omni")


@pytest.mark.parametrize("part", ["wtscale", "smooth_factor", "proj_down"])
def test_missing_part_is_named(tmp_path, part):
    parts = make_parts()
    del parts[part]
    with pytest.raises(CheckpointError, match=rf"to_qkv\.qweight.*wanted .*{part}"):
        read_all(write_file(tmp_path / "in", parts))


def test_file_without_configuration_may_be_nunchaku_s_as_well(tmp_path):
    path = FamilyFile(name_parts(LAYER, make_parts())).write(tmp_path / "in")
    with pytest.raises(CheckpointError, match="nunchaku or vllm-omni or vllm-omni-converted"):
        read_all(path)


def test_names_that_the_reader_would_skip_are_refused(tmp_path):
    layer = Layer("blocks.0.embed", make_linear(LinearShape(128, 128, 16)))
    path = write_file(tmp_path / "in", make_parts(), {})
    with (
        SafetensorsSource(path) as source,
        pytest.raises(CheckpointError, match=r"embed.*part of quantized layer .blocks\.0\.embed"),
    ):
        make_omni_config({layer.name: layer}, source)


@pytest.mark.parametrize(
    ("shape", "pair", "word"),
    [
        (LinearShape(128, 128), ("int4", "int4"), "int4 weights"),
        (LinearShape(128, 128), ("nvfp4", "nvfp4_static"), "nvfp4_static"),
        (LinearShape(128, 128), ("nvfp4", None), "activation none"),
        (LinearShape(128, 128, 0), ("nvfp4", "nvfp4_one_level"), "rank 0"),
        (LinearShape(128, 120), ("nvfp4", "nvfp4_one_level"), "in_features 120"),
    ],
)
def test_obstacles_name_what_does_not_fit(shape, pair, word):
    linear = make_linear(shape, pair)
    assert word in VllmOmni().find_obstacle(linear)
    assert "write vllm-omni" in VllmOmniConverted().find_obstacle(linear)
