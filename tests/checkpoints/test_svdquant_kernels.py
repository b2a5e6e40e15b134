"""Operand files of svdquant-kernels, against both formulas in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import Layer, read_layer, write_layer
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.svdquant_kernels import SvdquantKernels, SvdquantKernelsProduct
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    assert_writes_back,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear

N, K, R = 24, 128, 8
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FAMILIES = {
    "svdquant-kernels": SvdquantKernels(),
    "svdquant-kernels-product": SvdquantKernelsProduct(),
}


def make_parts(precision: str = "nvfp4") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    scales = torch.randint(0x28, 0x48, (K // 16, N), generator=draw).to(torch.uint8)
    parts = {
        "wgt": torch.randint(0, 256, (N, K // 2), generator=draw).to(torch.uint8),
        "wscales": scales.view(torch.float8_e4m3fn),
        "alpha": torch.tensor(0.0371),
        "wcscales": (torch.rand(N, generator=draw) + 0.5).half(),
        "smooth": (torch.rand(K, generator=draw) + 0.5).half(),
        "lora_down": torch.randn((K, R), generator=draw).half(),
        "lora_up": torch.randn((N, R), generator=draw).half(),
        "bias": torch.randn(N, generator=draw).half(),
    }
    if precision == "int4":
        del parts["alpha"]
        parts["wscales"] = (torch.rand((K // 64, N), generator=draw) + 0.1).half()
    return parts


def multiply(parts: dict[str, torch.Tensor], x: np.ndarray, family: str) -> np.ndarray:
    """y of unquantized x by a kernel's formula."""
    codes = parts["wgt"].numpy()
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(N, K).astype(np.int64)
    floats = {name: part.double().numpy() for name, part in parts.items() if name != "wgt"}
    if parts["wscales"].dtype == torch.float16:
        values = np.where(nibbles > 7, nibbles - 16, nibbles).astype(float)
    else:
        values = E2M1[nibbles & 7] * np.where(nibbles & 8, -1.0, 1.0)
    weight = values * np.repeat(floats["wscales"].T, K // floats["wscales"].shape[0], axis=1)
    product = (x / floats["smooth"]) @ weight.T * floats.get("alpha", 1.0)
    low_rank = x @ floats["lora_down"] @ floats["lora_up"].T
    if family == "svdquant-kernels":
        return (product + low_rank) * floats["wcscales"] + floats["bias"]
    return product * floats["wcscales"] + low_rank + floats["bias"]


def write_file(folder, parts, metadata=None):
    return FamilyFile(name_parts("a.up", parts), metadata or {}).write(folder)


@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_file_means_what_the_kernel_computes(tmp_path, precision, family):
    parts = make_parts(precision)
    linear = read_all(write_file(tmp_path / "in", parts), family)[1]["a.up"].linear
    x = np.random.default_rng(0).standard_normal((3, K))
    y = (x / read_floats(linear.smooth)) @ dequantize(linear.weight).T
    y = y * read_floats(linear.channel_scale) + read_floats(linear.bias)
    y = y + x @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T
    wanted = multiply(parts, x, family)
    assert np.linalg.norm(y - wanted) <= 1e-12 * np.linalg.norm(wanted)


def test_two_readings_are_refused_with_both_names(tmp_path):
    with pytest.raises(CheckpointError, match=r"svdquant-kernels or svdquant-kernels-product.*--f"):
        read_all(write_file(tmp_path / "in", make_parts()))


@pytest.mark.parametrize(
    "dropped", [("wcscales",), ("lora_up", "lora_down"), ("wcscales", "alpha")]
)
def test_file_with_one_reading_comes_back(tmp_path, dropped):
    parts = {name: part for name, part in make_parts().items() if name not in dropped}
    assert_round_trip(write_file(tmp_path / "in", parts), "svdquant-kernels")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"wgt": make_parts()["wgt"].view(torch.int8)},
        {"wscales": make_parts()["wscales"].view(torch.uint8)},
        {"alpha": torch.tensor([0.0371])},
        {"lora_down": make_parts()["lora_down"].float()},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_marked_file_comes_back_byte_for_byte(tmp_path, changes, family):
    mark = FAMILIES[family].make_side_content({}, None).metadata
    path = write_file(tmp_path / "in", {**make_parts(), **changes}, mark)
    assert_round_trip(path, family)


def test_int4_file_comes_back(tmp_path):
    path = write_file(tmp_path / "in", make_parts("int4"), {"svdquant_wcscales": "all"})
    assert_round_trip(path, "svdquant-kernels")


def test_user_s_choice_writes_back_too(tmp_path):
    path = write_file(tmp_path / "in", make_parts())
    for name in FAMILIES:
        with SafetensorsSource(path) as source:
            found = recognise(source, name)
            layer = read_layer(found.family, source, found.layers["a.up"])
            assert_writes_back(found.family, source, found.layers["a.up"].tensors, layer)


@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_one_level"), ("int4", "int4")])
def test_records_survive_encode_and_decode(pair):
    linear = make_linear(LinearShape(24, 128, 8), pair)
    facts = {"precision": pair[0]}
    assert_survives(SvdquantKernelsProduct(), linear, facts)
    for parts in ({"channel_scale": None}, {"lora_down": None, "lora_up": None}):
        assert_survives(SvdquantKernels(), replace(linear, **parts), facts)
    again = SvdquantKernels().decode(SvdquantKernels().encode(linear, {}), facts)
    assert torch.equal(again.lora_down, linear.lora_down)
    # divided by wcscales and multiplied again: two roundings to float32
    torch.testing.assert_close(again.lora_up, linear.lora_up, rtol=2 * 2.0**-24, atol=0)


def test_global_scale_that_changed_since_is_written(tmp_path):
    parts = {name: part for name, part in make_parts().items() if name != "alpha"}
    path = write_file(tmp_path / "in", parts, {"svdquant_wcscales": "product"})
    layer = read_all(path)[1]["a.up"]
    weight = replace(layer.linear.weight, global_scale=torch.tensor(0.5))
    changed = Layer("a.up", replace(layer.linear, weight=weight), layer.origin)
    assert float(write_layer(SvdquantKernelsProduct(), changed)["alpha"]) == 0.5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_down": None}, "lora_down is missing"),
        ({"wscales": torch.ones(N, K // 16).to(torch.float8_e4m3fn)}, "scales: shape"),
        ({"smooth": torch.zeros(K)}, "smooth: got 0.0, wanted positive"),
        ({"alpha": torch.tensor(float("inf"))}, "global_scale: got 1 NaN or infinite"),
        ({"act": torch.zeros(2, K // 2, dtype=torch.uint8)}, r"a\.up\.act.*is not understood"),
    ],
)
def test_damage_is_named(tmp_path, changes, words):
    parts = {name: part for name, part in {**make_parts(), **changes}.items() if part is not None}
    with pytest.raises(CheckpointError, match=words):
        read_all(write_file(tmp_path / "in", parts, {"svdquant_wcscales": "product"}))


def test_operands_of_no_layer_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"wanted '<layer>\.wgt'"):
        read_all(FamilyFile(make_parts()).write(tmp_path / "in"))


@pytest.mark.parametrize(
    ("shape", "pair", "word"),
    [
        (LinearShape(24, 128), ("mxfp4", "mxfp4"), "mxfp4 weights"),
        (LinearShape(24, 128), ("nvfp4", "nvfp4_dynamic"), "nvfp4_dynamic"),
        (LinearShape(24, 100), ("nvfp4", "nvfp4_one_level"), "in_features 100"),
        (LinearShape(24, 128), ("int4", "uint4_shifted"), "uint4_shifted"),
    ],
)
def test_obstacles_name_what_does_not_fit(shape, pair, word):
    assert word in SvdquantKernels().find_obstacle(make_linear(shape, pair))


def test_channel_scale_of_zero_cannot_carry_a_low_rank_branch():
    linear = make_linear(LinearShape(24, 128, 8))
    channels = linear.channel_scale.clone()
    channels[3] = 0
    linear = replace(linear, channel_scale=channels)
    assert "channel_scale of 0" in SvdquantKernels().find_obstacle(linear)
    assert SvdquantKernelsProduct().find_obstacle(linear) is None
