"""Our own file: byte-equal round trips, and a named error for each way to be wrong."""

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.block_format import FORMATS, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.halfbyte_file import (
    LAYERS_KEY,
    VERSION_KEY,
    HalfbyteFile,
    read_halfbyte_file,
    write_halfbyte_file,
)
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_reader import SafetensorsFile
from halfbyte.formats.safetensors_writer import write_safetensors
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_linear, pair_id

SHAPE = LinearShape(n=24, k=84, rank=5)  # K is no whole number of blocks in any format


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def assert_same_linear(left: QuantizedLinear, right: QuantizedLinear) -> None:
    assert left.activation == right.activation
    assert left.weight.format == right.weight.format
    assert left.weight.columns == right.weight.columns
    pairs = [
        (getattr(left.weight, name), getattr(right.weight, name))
        for name in ("data", "scales", "global_scale")
    ]
    pairs += [
        (getattr(left, field.name), getattr(right, field.name))
        for field in fields(left)
        if field.name not in ("weight", "activation")
    ]
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert bits(one) == bits(other)


def make_file(path: Path, **changes: Any) -> Path:
    linear = make_linear(SHAPE, ("nvfp4", "nvfp4_static"))
    write_halfbyte_file(
        path,
        {"model.q": replace(linear, **changes), "model.k": make_linear(SHAPE, ("int4", None))},
        {"norm.weight": torch.arange(6).bfloat16(), "count": torch.tensor(3)},
        {"note": "é"},
    )
    return path


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_save_load_save_is_byte_equal(pair: tuple[str, str | None], tmp_path: Path) -> None:
    linears = {
        "b.full": make_linear(SHAPE, pair),
        "a.bare": make_linear(replace(SHAPE, rank=0, parts=False), pair),
        "half": make_linear(replace(SHAPE, dtype=torch.bfloat16), pair),
    }
    others = {"norm": torch.randn(3, 4), "scalar": torch.tensor(2.5), "none": torch.empty(0, 2)}
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_halfbyte_file(first, linears, others, {"z": "1", "a": "2"})
    contents = read_halfbyte_file(first)
    assert set(contents.linears) == set(linears)
    for name, linear in linears.items():
        assert_same_linear(contents.linears[name], linear)
    assert {name: bits(value) for name, value in contents.passthrough.items()} == {
        name: bits(value) for name, value in others.items()
    }
    write_halfbyte_file(second, contents.linears, contents.passthrough, contents.metadata)
    assert second.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_round_trips(name: str, tmp_path: Path) -> None:
    block_format = FORMATS[name]
    rows, columns = 3, block_format.block_size * 2
    scale_dtype = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}.get(
        block_format.scale, torch.bfloat16
    )
    weight = BlockScaledTensor(
        block_format,
        torch.full((rows, block_format.row_bytes(columns)), 0x21, dtype=torch.uint8),
        torch.ones(rows, 2).to(scale_dtype),
        torch.tensor(0.5) if block_format.has_global_scale else None,
        columns,
    )
    write_halfbyte_file(tmp_path / "f.safetensors", {"x": QuantizedLinear(weight)})
    loaded = read_halfbyte_file(tmp_path / "f.safetensors").linears["x"]
    assert_same_linear(loaded, QuantizedLinear(weight))


def test_global_scale_0_37_survives(tmp_path: Path) -> None:
    linear = make_linear(SHAPE, ("nvfp4", None))
    linear = replace(linear, weight=replace(linear.weight, global_scale=torch.tensor(0.37)))
    write_halfbyte_file(tmp_path / "f.safetensors", {"x": linear})
    loaded = read_halfbyte_file(tmp_path / "f.safetensors").linears["x"].weight.global_scale
    assert loaded is not None
    assert bits(loaded) == np.float32(0.37).tobytes()


def test_order_of_layers_does_not_change_the_bytes(tmp_path: Path) -> None:
    linears = {name: make_linear(SHAPE, ("int4", "int4")) for name in "cab"}
    write_halfbyte_file(tmp_path / "1", linears)
    write_halfbyte_file(tmp_path / "2", dict(sorted(linears.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_passthrough_is_lazy(tmp_path: Path) -> None:
    path = make_file(tmp_path / "f.safetensors")
    contents = read_halfbyte_file(path)
    os.truncate(path, path.stat().st_size // 8)  # gone after opening: only a late read notices
    assert list(contents.passthrough) == ["count", "norm.weight"]
    with pytest.raises(CheckpointError, match="early"):
        list(contents.passthrough.values())
    with pytest.raises(KeyError):
        contents.passthrough["model.q.weight_codes"]


def load_parts(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with SafetensorsFile(path) as file:
        return {name: file.read_tensor(name) for name in file.tensors}, dict(file.metadata)


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_halfbyte_file(path)
    for word in (str(path), *words):
        assert word in str(caught.value), str(caught.value)


EVERY_PART = [
    "weight_codes",
    "weight_block_scale",
    "weight_global_scale",
    "activation_global_scale",
    "channel_scale",
    "smooth",
    "lora_down",
    "lora_up",
    "bias",
]


@pytest.mark.parametrize("part", EVERY_PART)
def test_missing_tensor_is_named(part: str, tmp_path: Path) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    del tensors[f"model.q.{part}"]
    write_safetensors(tmp_path / "f.safetensors", tensors, metadata)
    refuse(tmp_path / "f.safetensors", f"'model.q.{part}'", "missing")


@pytest.mark.parametrize("name", ["model.k.weight_global_scale", "model.k.weight"])
def test_tensor_that_no_record_lists_is_named(name: str, tmp_path: Path) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    tensors[name] = torch.tensor(1.0)
    write_safetensors(tmp_path / "f.safetensors", tensors, metadata)
    refuse(tmp_path / "f.safetensors", f"'{name}'", "left over")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("format", "nvfp5", "'nvfp5'"),
        ("format", None, "format None"),
        ("format", "int4", "weight_global_scale"),
        ("format", "nvfp4_one_level", "weight_global_scale"),
        ("activation", "fp8", "'fp8'"),
        ("activation", None, "activation_global_scale"),
        ("activation", "nvfp4_dynamic", "activation_global_scale"),
        ("in_features", 85, "shape"),
        ("in_features", 200, "shape"),
        ("in_features", 84.0, "in_features 84.0"),
        ("in_features", True, "in_features True"),
        ("in_features", -1, "in_features -1"),
        ("out_features", 25, "25"),
        ("rank", 4, "rank 5"),
        ("rank", 0, "rank 5"),
        ("nibble_order", "high_first", "'high_first'"),
        ("scale_layout", "swizzled_128x4", "'swizzled_128x4'"),
        ("parts", ["weight_codes"], "weight_block_scale"),
        ("parts", EVERY_PART[::-1], "in order"),
        ("parts", [*EVERY_PART, "zero_point"], "zero_point"),
        ("parts", [*EVERY_PART, "bias"], "in order"),
        ("parts", "weight_codes", "parts"),
        ("colour", "red", "colour"),
    ],
)
def test_record_that_contradicts_the_tensors_is_refused(
    key: str, value: object, word: str, tmp_path: Path
) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    layers = json.loads(metadata[LAYERS_KEY])
    layers["model.q"][key] = value
    metadata[LAYERS_KEY] = json.dumps(layers)
    write_safetensors(tmp_path / "f.safetensors", tensors, metadata)
    refuse(tmp_path / "f.safetensors", "model.q", word)


def test_record_without_a_key_is_refused(tmp_path: Path) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    for key in json.loads(metadata[LAYERS_KEY])["model.q"]:
        layers = json.loads(metadata[LAYERS_KEY])
        del layers["model.q"][key]
        write_safetensors(
            tmp_path / "f.safetensors", tensors, {**metadata, LAYERS_KEY: json.dumps(layers)}
        )
        refuse(tmp_path / "f.safetensors", "model.q", key)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({VERSION_KEY: "2"}, "'2'"),
        ({VERSION_KEY: "1.0"}, "'1.0'"),
        ({VERSION_KEY: None}, VERSION_KEY),
        ({LAYERS_KEY: None}, "JSON"),
        ({LAYERS_KEY: "[]"}, LAYERS_KEY),
        ({LAYERS_KEY: '{"a":{},"a":{}}'}, "twice"),
        ({LAYERS_KEY: '{"a":NaN}'}, "NaN"),
        ({LAYERS_KEY: '{"a":[]}'}, "record"),
    ],
)
def test_bad_metadata_is_refused(change: dict[str, str | None], word: str, tmp_path: Path) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    changed = {key: value for key, value in {**metadata, **change}.items() if value is not None}
    write_safetensors(tmp_path / "f.safetensors", tensors, changed)
    refuse(tmp_path / "f.safetensors", word)


def set_first(value: float) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(-1)[0] = value

    return change


def set_bytes(value: int) -> Callable[[torch.Tensor], None]:
    def change(tensor: torch.Tensor) -> None:
        tensor.view(torch.uint8).view(-1)[-1] = value

    return change


@pytest.mark.parametrize(
    ("part", "change", "word"),
    [
        ("weight_global_scale", set_first(float("nan")), "NaN"),
        ("weight_global_scale", set_first(float("inf")), "infinite"),
        ("weight_global_scale", set_first(0.0), "positive"),
        ("weight_global_scale", set_first(-0.01), "positive"),
        ("activation_global_scale", set_first(0.0), "positive"),
        ("activation_global_scale", set_first(float("nan")), "NaN"),
        ("smooth", set_first(0.0), "positive"),
        ("smooth", set_first(-1.0), "positive"),
        ("smooth", set_first(float("nan")), "NaN"),
        ("channel_scale", set_first(float("inf")), "infinite"),
        ("bias", set_first(float("nan")), "NaN"),
        ("lora_down", set_first(float("nan")), "NaN"),
        ("lora_up", set_first(float("inf")), "infinite"),
        ("weight_block_scale", set_bytes(0x7F), "NaN"),
        ("weight_block_scale", set_bytes(0xFF), "NaN"),
        ("weight_block_scale", set_bytes(0xB8), "negative"),
        ("weight_codes", set_bytes(0x11), "padding"),
    ],
)
def test_value_that_no_quantizer_writes_is_named(
    part: str, change: Callable[[torch.Tensor], None], word: str, tmp_path: Path
) -> None:
    tensors, metadata = load_parts(make_file(tmp_path / "f.safetensors"))
    change(tensors[f"model.q.{part}"])
    write_safetensors(tmp_path / "f.safetensors", tensors, metadata)
    refuse(tmp_path / "f.safetensors", f"model.q.{part}", word)


def test_reciprocal_global_scale_is_caught(tmp_path: Path) -> None:
    # amax 0.75: 0.75 / 2688 = 2.790e-4 multiplies, 3584 = 1 / 2.790e-4 would divide
    linear = make_linear(SHAPE, ("nvfp4", None))
    scales = linear.weight.scales.view(torch.uint8).clone()
    scales[0, 0] = 0x7E  # 448, as the largest block of every two-level tensor has
    weight = replace(
        linear.weight,
        scales=scales.view(torch.float8_e4m3fn),
        global_scale=torch.tensor(0.75 / 2688),
    )
    path = tmp_path / "f.safetensors"
    write_halfbyte_file(path, {"q": replace(linear, weight=weight)})
    tensors, metadata = load_parts(path)
    tensors["q.weight_global_scale"] = torch.tensor(3584.0)
    write_safetensors(path, tensors, metadata)
    refuse(path, "q.weight_global_scale", "reciprocal", "9.63e+06")  # 6 * 448 * 3584


def test_wrong_dtype_is_named(tmp_path: Path) -> None:
    path = make_file(tmp_path / "f.safetensors")
    for part, dtype in (
        ("weight_codes", torch.int8),
        ("weight_block_scale", torch.uint8),
        ("weight_global_scale", torch.float64),
        ("smooth", torch.float64),
        ("lora_up", torch.float16),
    ):
        tensors, metadata = load_parts(path)
        name = f"model.q.{part}"
        source = tensors[name]
        same = source.element_size() == 1
        tensors[name] = source.view(dtype) if same else source.to(dtype)
        write_safetensors(tmp_path / "bad.safetensors", tensors, metadata)
        refuse(tmp_path / "bad.safetensors", "model.q", "dtype")


def test_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    linear = make_linear(SHAPE, ("int4", None))
    assert linear.smooth is not None
    bad = replace(linear, smooth=torch.zeros_like(linear.smooth))
    path = tmp_path / "f.safetensors"
    with pytest.raises(CheckpointError, match="smooth"):
        write_halfbyte_file(path, {"q": bad})
    for name in ("q.weight_codes", "q.weight"):
        with pytest.raises(CheckpointError, match="layer"):
            write_halfbyte_file(path, {"q": linear}, {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match="reserved"):
        write_halfbyte_file(path, {"q": linear}, None, {VERSION_KEY: "1"})
    assert os.listdir(tmp_path) == []


def test_plain_safetensors_file_is_not_ours(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "plain.safetensors", {"a.weight": torch.ones(2, 2)})
    refuse(tmp_path / "plain.safetensors", "without halfbyte_format_version")


def test_sharded_directory_reads_as_one(tmp_path: Path) -> None:
    linears = {name: make_linear(SHAPE, ("nvfp4", None)) for name in ("a", "b")}
    weight_map = {}
    for name, linear in linears.items():
        shard = f"{name}.safetensors"
        write_halfbyte_file(tmp_path / shard, {name: linear})
        with SafetensorsFile(tmp_path / shard) as file:
            weight_map |= dict.fromkeys(file.tensors, shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with HalfbyteFile(tmp_path) as file:
        assert list(file.layers) == ["a", "b"]
        assert_same_linear(file.read_linear("b"), linears["b"])
        with pytest.raises(CheckpointError, match="'c'"):
            file.read_linear("c")
    write_halfbyte_file(tmp_path / "b.safetensors", linears)
    with pytest.raises(CheckpointError, match="two shards"):
        HalfbyteFile(tmp_path)


def test_empty_dimensions_round_trip(tmp_path: Path) -> None:
    block_format = get_format("int4")
    for rows, columns in ((0, 64), (3, 0)):
        weight = BlockScaledTensor(
            block_format,
            torch.zeros(rows, block_format.row_bytes(columns), dtype=torch.uint8),
            torch.ones(rows, block_format.num_blocks(columns), dtype=torch.float16),
            None,
            columns,
        )
        write_halfbyte_file(tmp_path / "f.safetensors", {"x": QuantizedLinear(weight)})
        loaded = read_halfbyte_file(tmp_path / "f.safetensors").linears["x"]
        assert_same_linear(loaded, QuantizedLinear(weight))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


def test_document_is_enough_to_write_a_reader(tmp_path: Path) -> None:
    """Reads a file with json and numpy alone, step by step as docs/formats.md says."""
    linear = make_linear(SHAPE, ("nvfp4", "nvfp4_static"))
    write_halfbyte_file(tmp_path / "f.safetensors", {"model.q": linear})
    raw = (tmp_path / "f.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header["__metadata__"]["halfbyte_format_version"] == "1"
    record = json.loads(header["__metadata__"]["halfbyte_layers"])["model.q"]
    n, k, block = record["out_features"], record["in_features"], 16
    numpy_dtype = {"U8": "u1", "F8_E4M3": "u1", "F32": "<f4"}

    def load(part: str) -> np.ndarray[Any, Any]:
        entry = header[f"model.q.{part}"]
        start, stop = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + stop]
        return np.frombuffer(data, numpy_dtype[entry["dtype"]]).reshape(entry["shape"])

    packed = load("weight_codes")
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(n, -1)
    scales = np.vectorize(decode_e4m3)(load("weight_block_scale"))
    weight = E2M1[codes] * np.repeat(scales, block, 1) * np.float64(load("weight_global_scale"))
    weight = weight[:, :k] * load("channel_scale")[:, None] / load("smooth")
    weight += load("lora_up").astype(np.float64) @ load("lora_down")

    assert linear.weight.global_scale is not None
    assert linear.channel_scale is not None
    assert linear.smooth is not None
    assert linear.lora_up is not None
    assert linear.lora_down is not None
    nibbles = linear.weight.data
    wanted = torch.tensor(E2M1)[torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(1).long()]
    wanted *= linear.weight.scales.double().repeat_interleave(block, 1)
    wanted = wanted[:, :k] * linear.weight.global_scale.double()
    wanted = wanted * linear.channel_scale.double()[:, None] / linear.smooth.double()
    wanted += linear.lora_up.double() @ linear.lora_down.double()
    error = np.linalg.norm(weight - wanted.numpy()) / np.linalg.norm(wanted.numpy())
    assert error < 1e-14
