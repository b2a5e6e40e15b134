import json

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import Layer
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.checkpoints.torchao import NAMES_KEY, TorchAO
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import FamilyFile, assert_round_trip, assert_survives, read_all
from tests.random_linears import LinearShape, make_linear

BF16 = {"_type": "torch.dtype", "_data": "bfloat16"}
FP4 = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.concatenate([CODES, -CODES])


def describe(kind: str, is_swizzled: bool, kwargs: dict | None, parts: list[str]) -> str:
    data = {"is_swizzled_scales": is_swizzled, "act_quant_kwargs": kwargs, "orig_dtype": BF16}
    if kind == "MXTensor":
        kernel = {"_type": "KernelPreference", "_data": "AUTO"}
        data |= {"elem_dtype": FP4, "block_size": 32, "kernel_preference": kernel}
    else:
        data |= {"block_size": 16, "use_triton_kernel": False}
    return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})


def nvfp4_kwargs(is_dynamic: bool) -> dict:
    data = {"block_size": 16, "use_dynamic_per_tensor_scale": is_dynamic}
    return {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": data}


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Place scales one by one where cuBLAS wants them; torchao calls a tile [32, 16]."""
    rows, columns = scales.shape
    height, width = -(-rows // 128), -(-columns // 4)
    out = torch.zeros(height * width * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128 * width + c // 4) * 512
            out[tile + r % 32 * 16 + r // 32 % 4 * 4 + c % 4] = scales[r, c]
    return out.reshape(height * 32, width * 16)


def make_file(
    n: int, k: int, *, mx=False, swizzled=False, kwargs=None, levels=2, act_scale=None
) -> tuple[FamilyFile, np.ndarray]:
    draw = np.random.default_rng(n)
    block = 32 if mx else 16
    codes = draw.integers(0, 16, (n, k)).astype(np.uint8)
    low, high = (120, 132) if mx else (0x28, 0x48)
    bits = torch.from_numpy(draw.integers(low, high, (n, k // block)).astype(np.uint8))
    dtype = torch.float8_e8m0fnu if mx else torch.float8_e4m3fn
    values = bits.view(dtype).double().numpy().repeat(block, 1)
    parts = {
        "_weight_qdata": torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4),
        "_weight_scale": (swizzle(bits) if swizzled else bits).view(dtype),
        "bias": torch.randn(n).bfloat16(),
    }
    g = 1.0
    if not mx and levels == 2:
        parts["_weight_per_tensor_scale"] = torch.tensor(0.0021)
        g = np.float64(np.float32(0.0021))
    if act_scale is not None:
        parts["_weight_act_per_tensor_scale"] = torch.tensor(act_scale)
    names = [part.removeprefix("_weight_") for part in parts if part != "bias"]
    plain = json.dumps({"_type": "Tensor"})
    metadata = {
        "l.weight": describe("MXTensor" if mx else "NVFP4Tensor", swizzled, kwargs, names),
        "l.bias": plain,
        "norm.weight": plain,
    }
    metadata[NAMES_KEY] = json.dumps(sorted(metadata))
    tensors = {f"l.{part}": value for part, value in parts.items()}
    tensors["norm.weight"] = torch.ones(4)
    return FamilyFile(tensors, metadata), CODES[codes] * values * g


CASES = {
    "weight only": {},
    "one level": {"levels": 1, "kwargs": nvfp4_kwargs(False)},
    "swizzled": {"swizzled": True, "kwargs": nvfp4_kwargs(True)},
    "static": {"swizzled": True, "kwargs": nvfp4_kwargs(False), "act_scale": 0.0043},
    "mx": {"mx": True},
    "mx swizzled": {"mx": True, "swizzled": True},
}
ACTIVATIONS = {
    "one level": "nvfp4_one_level",
    "swizzled": "nvfp4_dynamic",
    "static": "nvfp4_static",
}


@pytest.mark.parametrize("shape", [(40, 96), (256, 128)])
@pytest.mark.parametrize("case", CASES)
def test_round_trip_and_values(tmp_path, case, shape):
    file, weight = make_file(*shape, **CASES[case])
    path = file.write(tmp_path)
    layers = assert_round_trip(path, "torchao")
    linear = layers["l"].linear
    np.testing.assert_array_equal(dequantize(linear.weight), weight)
    wanted = ACTIVATIONS.get(case)
    assert (linear.activation.name if linear.activation else None) == wanted
    with SafetensorsSource(path) as source:
        assert TorchAO().make_side_content(layers, source).metadata == file.metadata


@pytest.mark.parametrize(
    "pair",
    [
        ("nvfp4", "nvfp4_static"),
        ("nvfp4", "nvfp4_dynamic"),
        ("nvfp4_one_level", "nvfp4_one_level"),
        ("nvfp4", None),
        ("mxfp4", "mxfp4"),
        ("mxfp4", None),
    ],
)
def test_records_survive(pair):
    linear = make_linear(LinearShape(40, 96, 0, parts=False), pair)
    assert_survives(TorchAO(), linear, TorchAO().make_facts("l", linear))


def test_what_is_written_is_recognised(tmp_path):
    linear = make_linear(LinearShape(40, 96, 0, parts=False), ("nvfp4", "nvfp4_dynamic"))
    family = TorchAO()
    parts = family.encode(linear, family.make_facts("l", linear))
    tensors = {family.tensor_name("l", part): value for part, value in parts.items()}
    side = family.make_side_content({"l": Layer("l", linear)}, None)
    _, layers = read_all(FamilyFile(tensors, side.metadata).write(tmp_path))
    assert torch.equal(layers["l"].linear.weight.data, linear.weight.data)


@pytest.mark.parametrize(
    ("old", "replacement", "words"),
    [
        ('"_type": "NVFP4Tensor"', '"_type": "Int4Tensor"', "Int4Tensor"),
        ('"block_size": 16', '"block_size": 32', "block_size 32"),
        ('"is_swizzled_scales": false', '"is_swizzled_scales": true', "scale.*wanted"),
        ('"is_swizzled_scales": false', '"is_swizzled_scales": null', "is_swizzled_scales"),
        ('"qdata", ', "", "qdata, scale"),
        ('"act_quant_kwargs": null', '"act_quant_kwargs": {"_type": "X"}', "act_quant_kwargs"),
    ],
)
def test_other_descriptions_are_refused(tmp_path, old, replacement, words):
    file, _ = make_file(40, 96)
    text = file.metadata["l.weight"]
    assert old in text
    metadata = {**file.metadata, "l.weight": text.replace(old, replacement)}
    with pytest.raises(CheckpointError, match=words):
        read_all(FamilyFile(file.tensors, metadata).write(tmp_path))


def test_left_over_part_is_named(tmp_path):
    file, _ = make_file(40, 96)
    file.tensors["l._weight_zero_point"] = torch.zeros(4)
    path = file.write(tmp_path)
    with SafetensorsSource(path) as source, pytest.raises(CheckpointError, match="zero_point"):
        recognise(source)


def test_obstacles():
    shape = LinearShape(32, 64, 8, parts=False)
    assert "lora_down" in TorchAO().find_obstacle(make_linear(shape, ("nvfp4", "nvfp4_static")))
    assert "int4" in TorchAO().find_obstacle(make_linear(shape, ("int4", "int4")))
    assert "mxfp4" in TorchAO().find_obstacle(make_linear(shape, ("mxfp4", "nvfp4_one_level")))
