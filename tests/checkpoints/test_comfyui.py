import json

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.comfyui import LAYER_TABLE, ComfyUI
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.concatenate([E2M1, -E2M1])


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def make_layer(n: int, k: int, mark: dict, seed: int = 0) -> tuple[dict, np.ndarray]:
    """Return a layer as ComfyUI stores it, and its weight in float64; one value at a time."""
    draw = np.random.default_rng(seed)
    rows, columns = up(n, 16), up(k, 16)
    codes = np.zeros((rows, columns), np.uint8)
    codes[:n, :k] = draw.integers(0, 16, (n, k))
    scales = torch.from_numpy(draw.integers(0x28, 0x48, (rows, columns // 16)).astype(np.uint8))
    values = scales.view(torch.float8_e4m3fn).double().numpy()
    height, width = up(rows, 128), up(columns // 16, 4)
    swizzled = torch.zeros(height * width, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns // 16):
            tile = (r // 128 * (width // 4) + c // 4) * 512
            swizzled[tile + r % 32 * 16 + r // 32 % 4 * 4 + c % 4] = scales[r, c]
    packed = codes[:, 0::2] << 4 | codes[:, 1::2]
    text = json.dumps({"format": "nvfp4", **mark}).encode()
    parts = {
        "weight": torch.from_numpy(packed),
        "weight_scale": swizzled.reshape(height, width).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.0021),
        "comfy_quant": torch.tensor(list(text), dtype=torch.uint8),
        "bias": torch.from_numpy(draw.standard_normal(n)).bfloat16(),
    }
    weight = CODES[codes] * values.repeat(16, 1) * np.float64(np.float32(0.0021))
    return parts, weight[:n, :k]


def write(folder, parts: dict, metadata: dict | None = None):
    tensors = name_parts("a.up", parts) | {"norm.weight": torch.ones(4)}
    return FamilyFile(tensors, metadata or {}).write(folder)


@pytest.mark.parametrize("shape", [(144, 96), (20, 32), (256, 64)])
def test_round_trip_and_values(tmp_path, shape):
    parts, weight = make_layer(*shape, {})
    path = write(tmp_path, parts)
    layer = assert_round_trip(path, "comfyui")["a.up"]
    assert layer.linear.weight.shape == shape  # rows by the bias
    assert layer.linear.activation.name == "nvfp4_dynamic"
    np.testing.assert_array_equal(dequantize(layer.linear.weight), weight)


def test_padded_columns_come_back_when_the_file_says_so(tmp_path):
    parts, weight = make_layer(18, 40, {"orig_shape": [18, 40]})
    layer = assert_round_trip(write(tmp_path, parts), "comfyui")["a.up"]
    np.testing.assert_array_equal(dequantize(layer.linear.weight), weight)


def test_calibrated_and_smoothed_input(tmp_path):
    parts, _ = make_layer(32, 32, {})
    parts["input_scale"] = torch.tensor([0.0043])
    parts["pre_quant_scale"] = torch.linspace(0.5, 2, 32).bfloat16()
    linear = assert_round_trip(write(tmp_path, parts), "comfyui")["a.up"].linear
    assert linear.activation.name == "nvfp4_static"
    assert float(linear.activation_global_scale) == pytest.approx(0.0043)
    wanted = 1 / parts["pre_quant_scale"].double()
    np.testing.assert_allclose(linear.smooth.double(), wanted, rtol=2.0**-24)


def test_full_precision_layers_are_weight_only_and_keep_their_unused_scale(tmp_path):
    parts, _ = make_layer(32, 32, {"full_precision_matrix_mult": True})
    parts["input_scale"] = torch.tensor(0.0043)
    linear = assert_round_trip(write(tmp_path, parts), "comfyui")["a.up"].linear
    assert linear.activation is None
    assert linear.activation_global_scale is None


def test_table_of_layers_in_the_metadata(tmp_path):
    parts, weight = make_layer(32, 32, {})
    del parts["comfy_quant"]
    table = json.dumps({"format_version": "1.0", "layers": {"a.up": {"format": "nvfp4"}}})
    layers = assert_round_trip(write(tmp_path, parts, {LAYER_TABLE: table}), "comfyui")
    np.testing.assert_array_equal(dequantize(layers["a.up"].linear.weight), weight)
    assert ComfyUI().make_side_content(layers, None).metadata[LAYER_TABLE] == table


@pytest.mark.parametrize("activation", [None, "nvfp4_static", "nvfp4_dynamic"])
def test_records_survive(activation):
    linear = make_linear(LinearShape(21, 56, 0, parts=False), ("nvfp4", activation))
    assert_survives(ComfyUI(), linear, ComfyUI().make_facts("a", linear))


@pytest.mark.parametrize("stated", ["float8_e4m3fn", "svdquant_w4a4", "int8_tensorwise"])
def test_other_formats_are_refused_by_name(tmp_path, stated):
    parts, _ = make_layer(32, 32, {"format": stated})
    with pytest.raises(CheckpointError, match=rf"a\.up.*{stated}"):
        read_all(write(tmp_path, parts))


def test_damaged_marks_and_shapes_are_named(tmp_path):
    parts, _ = make_layer(32, 32, {})
    cases = {
        "comfy_quant": (torch.tensor([123, 1], dtype=torch.uint8), "comfy_quant"),
        "weight_scale": (parts["weight_scale"][:32].contiguous(), "weight_scale.*swizzled"),
        "weight": (parts["weight"][:30].contiguous(), "weight.*multiples of 16"),
        "weight_scale_2": (torch.tensor(2688 / 3.0e-4), "reciprocal|must be converted"),
        "orig": (None, "orig_shape"),
    }
    for number, (part, (value, words)) in enumerate(cases.items()):
        broken = (
            {**parts, part: value}
            if value is not None
            else make_layer(32, 32, {"orig_shape": [8, 32]})[0]
        )
        with pytest.raises(CheckpointError, match=words):
            read_all(write(tmp_path / str(number), broken))


def test_layer_without_scales_and_left_over_tensor(tmp_path):
    parts, _ = make_layer(32, 32, {})
    missing = {name: part for name, part in parts.items() if name != "weight_scale_2"}
    with pytest.raises(CheckpointError, match="weight_scale_2 F32"):
        read_all(write(tmp_path / "missing", missing))
    extra = {**parts, "weight_zero": torch.zeros(32)}
    path = write(tmp_path / "extra", extra)
    with pytest.raises(CheckpointError, match=r"a\.up\.weight_zero"):
        read_all(path)


def test_obstacles():
    shape = LinearShape(32, 64, 8, parts=False)
    assert "lora_down" in ComfyUI().find_obstacle(make_linear(shape, ("nvfp4", "nvfp4_static")))
    assert "int4" in ComfyUI().find_obstacle(make_linear(shape, ("int4", "int4")))
