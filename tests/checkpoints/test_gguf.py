import numpy as np
import pytest
import torch

from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.checkpoints.family import Layer, read_layer, write_layer
from halfbyte.checkpoints.gguf import Gguf
from halfbyte.checkpoints.gguf_source import GgufSource
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import MetaSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.gguf_header import make_gguf_layout
from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file
from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import (
    assert_survives,
    assert_writes_back,
    low_rank_product,
)
from tests.checkpoints.gguf_files import (
    GgufBytes,
    GgufTensor,
    array_pair,
    number_pair,
    plain,
    random_blocks,
    string_pair,
)
from tests.random_linears import LinearShape, make_linear

PAIRS = [
    string_pair("general.architecture", "llama"),
    number_pair("llama.block_count", 2),
    array_pair("tokenizer.ggml.tokens", ["<s>", "\u00e4", ""]),
]
KINDS = ["NVFP4", "MXFP4", "Q4_0", "Q4_1"]


def make_file(kind: str, *, scaled: bool = False) -> tuple[GgufBytes, np.ndarray]:
    weight, numbers = random_blocks(kind, 12, 128)
    tensors = {"output_norm.weight": plain(torch.ones(5)), "blk.0.ffn_up.weight": weight}
    tensors["blk.0.ffn_up.bias"] = plain(torch.linspace(-1, 1, 12))
    if scaled:
        tensors["blk.0.ffn_up.scale"] = plain(torch.tensor([0.0021]))
        tensors["blk.0.ffn_up.input_scale"] = plain(torch.tensor([0.0043]))
        numbers = numbers * np.float64(np.float32(0.0021))
    return GgufBytes(tensors, PAIRS), numbers


def write(path, file: GgufBytes):
    path.write_bytes(file.encode())
    return path


def weight_of(linear) -> np.ndarray:
    weight = dequantize(linear.weight)
    return weight if linear.lora_up is None else weight + low_rank_product(linear)


@pytest.mark.parametrize("kind", [*KINDS, "scaled NVFP4"])
def test_numbers_and_round_trip(tmp_path, kind):
    file, numbers = make_file(kind.removeprefix("scaled "), scaled="scaled" in kind)
    path = write(tmp_path / "x.gguf", file)
    with GgufSource(path) as source:
        found = recognise(source)
        assert found.family.name == "gguf"
        assert found.passthrough == ("output_norm.weight",)
        layers = {}
        for name, plan in found.layers.items():
            layers[name] = read_layer(found.family, source, plan)
            assert_writes_back(found.family, source, plan.tensors, layers[name])
            planned = write_layer(found.family, read_layer(found.family, MetaSource(source), plan))
            written = write_layer(found.family, layers[name])
            assert {n: (t.dtype, t.shape) for n, t in planned.items()} == {
                n: (t.dtype, t.shape) for n, t in written.items()
            }
        linear = layers["blk.0.ffn_up"].linear
        np.testing.assert_array_equal(weight_of(linear), numbers)
        assert (linear.activation is not None) == ("scaled" in kind)

        side = found.family.make_side_content(layers, source).metadata
        layout, prefix = make_gguf_layout(source.specs.values(), side)
        data = bytearray(prefix.ljust(layout.file_bytes, b"\0"))
        for name, entry in layout.tensors.items():
            data[entry.start : entry.stop] = b"".join(
                piece.numpy().tobytes() for piece in source.iter_bytes(name)
            )
        assert bytes(data) == path.read_bytes()
        assert source.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4"])
def test_a_file_comes_back_whole_from_our_own_format(tmp_path, kind):
    path = write(tmp_path / "x.gguf", make_file(kind, scaled=kind == "NVFP4")[0])
    ours, again = tmp_path / "x.safetensors", tmp_path / "again.gguf"
    convert_checkpoint(ConvertRequest(path, ours, "halfbyte", verify=True))
    convert_checkpoint(ConvertRequest(ours, again, "gguf", verify=True))
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_signed_scales_live_in_our_own_file(tmp_path, kind):
    file, numbers = make_file(kind)
    with GgufSource(write(tmp_path / "x.gguf", file)) as source:
        plan = recognise(source).layers["blk.0.ffn_up"]
        layer = read_layer(Gguf(), source, plan)
    write_halfbyte_file(tmp_path / "x.safetensors", {layer.name: layer.linear})
    again = read_halfbyte_file(tmp_path / "x.safetensors").linears[layer.name]
    np.testing.assert_array_equal(weight_of(again), numbers)


@pytest.mark.parametrize(
    "pair",
    [("nvfp4", "nvfp4_static"), ("nvfp4", None), ("nvfp4_one_level", None), ("mxfp4", None)],
)
def test_records_survive(pair):
    linear = make_linear(LinearShape(12, 128, 0, parts=False), pair)
    assert_survives(Gguf(), linear, Gguf().make_facts("a", linear))


def test_types_are_written_for_layers_of_other_families():
    linear = make_linear(LinearShape(12, 128, 0, parts=False), ("mxfp4", None))
    parts = write_layer(Gguf(), Layer("a", linear))
    side = Gguf().make_side_content({"a": Layer("a", linear)}, None).metadata
    from halfbyte.formats.safetensors_header import make_spec

    spec = make_spec("a.weight", parts["weight"].dtype, parts["weight"].shape)
    layout, prefix = make_gguf_layout([spec], side)
    assert prefix.startswith(b"GGUF\x03\0\0\0")
    assert layout.tensors["a.weight"].start % 32 == 0


def test_what_gguf_lacks_is_named():
    shape = LinearShape(12, 96, 8, parts=False)
    assert "columns" in Gguf().find_obstacle(
        make_linear(LinearShape(12, 96, 0, parts=False), ("nvfp4", None))
    )
    assert "lora_down" in Gguf().find_obstacle(make_linear(shape, ("mxfp4", None)))
    assert "int4" in Gguf().find_obstacle(make_linear(shape, ("int4", None)))
    assert "activation" in Gguf().find_obstacle(make_linear(shape, ("mxfp4", "mxfp4")))


def test_other_block_types_and_stacks_are_refused_by_name(tmp_path):
    stack, _ = random_blocks("MXFP4", 4, 32)
    for tensor, words in (
        (GgufTensor("Q8_0", [2, 32], bytes(68)), "Q8_0"),
        (GgufTensor("MXFP4", [2, 2, 32], stack.data), r"MXFP4 \[2, 2, 17\]"),
    ):
        file = GgufBytes({"blk.0.up.weight": tensor}, PAIRS)
        path = write(tmp_path / "x.gguf", file)
        with GgufSource(path) as source, pytest.raises(CheckpointError, match=words):
            recognise(source)


def test_bad_scales_are_named(tmp_path):
    file, _ = make_file("NVFP4", scaled=True)
    tensors = dict(file.tensors)
    tensors["blk.0.ffn_up.scale"] = plain(torch.tensor([float("nan")]))
    nan = GgufBytes(tensors, PAIRS)
    tensors = {**tensors, "blk.0.ffn_up.scale": plain(torch.ones(2))}
    for bad in (nan, GgufBytes(tensors, PAIRS)):
        with GgufSource(write(tmp_path / "x.gguf", bad)) as source:
            plan = recognise(source).layers["blk.0.ffn_up"]
            with pytest.raises(CheckpointError, match="scale"):
                read_layer(Gguf(), source, plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 1}, "version 1"),
        ({"version": 3 << 24}, "big-endian"),
        ({"tensors": 2**60}, "GGUF header"),
        ({"pairs": 2**60}, "GGUF header"),
        ({"pairs": 0}, "GGUF header"),
        ({"dimensions": 5}, "GGUF header"),
        ({"dimensions": 0}, "GGUF header"),
        ({"type": 4}, "type 4"),
        ({"type": 12}, "GGUF header"),
        ({"offset": 32}, "offset 32"),
        ({"offset": 2**63}, "offset"),
    ],
)
def test_hostile_headers(tmp_path, changes, words):
    file, _ = make_file("NVFP4")
    path = write(tmp_path / "x.gguf", GgufBytes(file.tensors, PAIRS, changes))
    with pytest.raises(CheckpointError, match=words):
        GgufSource(path)


def test_hostile_key_values(tmp_path):
    tensors = make_file("NVFP4")[0].tensors
    key = string_pair("k", "")[:9]
    for pair in (
        number_pair("general.alignment", 0),
        number_pair("general.alignment", 24),
        number_pair("general.alignment", 2**31),
        key + b"\x0d\0\0\0",
        key + b"\x08\0\0\0" + b"\xff" * 8,
        key + b"\x09\0\0\0\x00\0\0\0" + b"\xff" * 8,
        key + b"\x09\0\0\0\x08\0\0\0" + b"\xff" * 7 + b"\x0f",
        key + b"\x09\0\0\0" + b"\x09\0\0\0\x01\0\0\0\0\0\0\0" * 50,
    ):
        path = write(tmp_path / "x.gguf", GgufBytes(tensors, [pair]))
        with pytest.raises(CheckpointError, match="GGUF header"):
            GgufSource(path)
    with pytest.raises(CheckpointError, match="twice"):
        GgufSource(write(tmp_path / "x.gguf", GgufBytes(tensors, [PAIRS[0], PAIRS[0]])))


def test_files_cut_anywhere_and_mutated_headers(tmp_path):
    file, _ = make_file("NVFP4", scaled=True)
    data = file.encode()
    path = tmp_path / "x.gguf"
    for size in (*range(0, 400, 7), len(data) - 40, len(data) - 600):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            GgufSource(path)
    draw = np.random.default_rng(0)
    for _ in range(300):
        mutated = bytearray(data)
        mutated[int(draw.integers(0, 500))] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(mutated)
        try:
            with GgufSource(path) as source:
                for name in source.specs:
                    source.read(name)
        except CheckpointError as error:
            assert "x.gguf" in str(error)  # noqa: PT017


def test_long_headers_are_read_in_whole(tmp_path):
    file, numbers = make_file("MXFP4")
    pairs = [*PAIRS, array_pair("tokens", ["word" * 10] * 60_000)]
    path = write(tmp_path / "x.gguf", GgufBytes(file.tensors, pairs))
    with GgufSource(path) as source:
        layer = read_layer(Gguf(), source, recognise(source).layers["blk.0.ffn_up"])
    np.testing.assert_array_equal(weight_of(layer.linear), numbers)
