"""GGUF files written and numbers decoded by the Python package gguf."""

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import Layer, read_layer, write_layer
from halfbyte.checkpoints.gguf import Gguf
from halfbyte.checkpoints.gguf_source import GgufSource
from halfbyte.checkpoints.registry import recognise
from halfbyte.formats.gguf_header import GGUF_TYPES, make_gguf_layout
from halfbyte.formats.safetensors_header import make_spec
from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import low_rank_product
from tests.checkpoints.gguf_files import random_blocks
from tests.random_linears import LinearShape, make_linear

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'halfbyte[peers]'")

pytestmark = pytest.mark.peers


def test_types_and_block_sizes_are_those_of_the_package() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        ours = GGUF_TYPES[kind.name]
        assert (ours.number, ours.block, ours.block_bytes) == (int(kind), block, size)


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "Q4_0", "Q4_1"])
def test_a_file_of_the_package_is_read(tmp_path, kind) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    if kind == "NVFP4":  # the package decodes it only
        tensor, _ = random_blocks(kind, 8, 128)
        data = np.frombuffer(tensor.data, np.uint8).reshape(8, -1)
    else:
        x = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
        data = gguf.quants.quantize(x, quantization)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=quantization)
    writer.add_tensor("output_norm.weight", np.ones(5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufSource(path) as source:
        layer = read_layer(Gguf(), source, recognise(source).layers["blk.0.ffn_up"])
    weight = dequantize(layer.linear.weight)
    if layer.linear.lora_up is not None:
        weight = weight + low_rank_product(layer.linear)
    np.testing.assert_allclose(
        weight, gguf.quants.dequantize(data, quantization), rtol=2.0**-22, atol=2.0**-22
    )


@pytest.mark.parametrize("pair", [("nvfp4_one_level", None), ("mxfp4", None)])
def test_the_package_reads_what_we_write(tmp_path, pair) -> None:
    linear = make_linear(LinearShape(8, 128, 0, parts=False), pair)
    layer = Layer("blk.0.ffn_up", linear)
    tensors = {f"{layer.name}.{part}": value for part, value in write_layer(Gguf(), layer).items()}
    tensors["output_norm.weight"] = torch.ones(5)
    specs = [make_spec(name, value.dtype, value.shape) for name, value in tensors.items()]
    side = Gguf().make_side_content({layer.name: layer}, None).metadata
    layout, prefix = make_gguf_layout(specs, side)
    data = bytearray(prefix.ljust(layout.file_bytes, b"\0"))
    for name, entry in layout.tensors.items():
        data[entry.start : entry.stop] = tensors[name].numpy().tobytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert list(found["output_norm.weight"].data) == [1.0] * 5
    weight = found["blk.0.ffn_up.weight"]
    theirs = gguf.quants.dequantize(weight.data, weight.tensor_type)
    np.testing.assert_allclose(theirs, dequantize(linear.weight), rtol=2.0**-22)
