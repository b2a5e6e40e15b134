"""AWQ layers of nunchaku files, against a packer and a reader written from the kernel's code.

`pack_like_the_exporter` follows deepcompressor's arithmetic on whole int32 codes;
`read_like_the_kernel` walks over tiles and words as the threads of the GEMV kernel do.
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints import nunchaku_awq as awq
from halfbyte.checkpoints.family import Layer, write_layer
from halfbyte.checkpoints.nunchaku import Nunchaku, make_quantization_config
from halfbyte.errors import CheckpointError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    assert_survives,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear, make_weight

METADATA = {"quantization_config": json.dumps(make_quantization_config("int4", 16))}
LAYERS = {
    "proj": 1,
    "single_transformer_blocks.3.norm.linear": 3,
    "transformer_blocks.0.norm1.linear": 6,
    "transformer_blocks.0.norm1_context.linear": 6,
    "transformer_blocks.0.img_mod.1": 6,
}


@dataclass(frozen=True)
class AwqModel:
    """What a layer means: codes, scales, zeros [N, ...] in the model's order, and its bias."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bias: torch.Tensor

    @property
    def weight(self) -> np.ndarray:
        codes = self.codes.double().numpy().reshape(*self.scales.shape, 64)
        scales, zeros = read_floats(self.scales)[..., None], read_floats(self.zeros)[..., None]
        return (codes * scales + zeros).reshape(self.codes.shape)


def make_model(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> AwqModel:
    draw = torch.Generator().manual_seed(n + k)
    scales = (torch.rand((n, k // 64), generator=draw) + 0.1).to(dtype)
    return AwqModel(
        codes=torch.randint(0, 16, (n, k), generator=draw, dtype=torch.int32),
        scales=scales,
        zeros=(-7.0 * scales.float()).to(dtype),
        bias=(torch.randint(-64, 64, (n,), generator=draw) / 64).to(dtype),
    )


def pack_like_the_exporter(model: AwqModel, splits: int) -> dict[str, torch.Tensor]:
    n, k = model.codes.shape
    order = torch.arange(n).reshape(splits, n // splits).t().reshape(-1)
    codes, bias = model.codes[order], model.bias.clone()
    if splits > 1:
        for chunk in (1, splits - 2) if splits > 3 else (1,):
            size = n // splits
            bias[chunk * size : (chunk + 1) * size] += 1
    runs = codes.reshape(-1, 4, 8)
    words = runs[:, 0] | (runs[:, 1] << 4) | (runs[:, 2] << 8) | (runs[:, 3] << 12)
    tiles = words.reshape(n // 4, 4, k // 64, 16).permute(0, 2, 1, 3).reshape(n // 4, k)
    return {
        "qweight": tiles.to(torch.int16).view(torch.int32),
        "wscales": model.scales[order].t().contiguous(),
        "wzeros": model.zeros[order].t().contiguous(),
        "bias": bias[order],
    }


def read_like_the_kernel(qweight: torch.Tensor) -> np.ndarray:
    """Codes [N, K] by 32-bit words: row by thread, pairs by nibble, as the kernel shuffles them."""
    words = qweight.numpy().view(np.uint32)
    rows, columns = 4 * words.shape[0], 2 * words.shape[1]
    codes = np.zeros((rows, columns), dtype=np.uint8)
    for tile in range(words.shape[0]):
        for thread in range(words.shape[1] // 4):  # each loads four words: 32 codes of one row
            row = 4 * tile + thread // 2 % 4
            start = thread // 8 * 64 + thread % 2 * 32
            for i in range(4):
                word = int(words[tile, 4 * thread + i])
                for nibble in range(4):
                    for half in range(2):
                        code = word >> (16 * half + 4 * nibble) & 15
                        codes[row, start + 8 * nibble + 2 * i + half] = code
    return codes


def write_file(folder, layers: dict[str, dict[str, torch.Tensor]]):
    tensors = {}
    for name, parts in layers.items():
        tensors |= name_parts(name, parts)
    return FamilyFile(tensors, METADATA).write(folder)


def test_codes_are_those_that_the_kernel_reads():
    model = make_model(8, 192)
    qweight = pack_like_the_exporter(model, 1)["qweight"]
    codes = awq.unpack_awq_codes(qweight)
    plain = torch.stack((codes & 15, codes >> 4), -1).reshape(model.codes.shape)
    np.testing.assert_array_equal(plain.numpy(), read_like_the_kernel(qweight))
    np.testing.assert_array_equal(plain.numpy(), model.codes.numpy())
    assert torch.equal(awq.pack_awq_codes(codes), qweight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "splits"), LAYERS.items())
def test_layer_means_what_the_exporter_was_given(tmp_path, name, splits, dtype):
    model = make_model(24, 128, dtype)
    path = write_file(tmp_path / "in", {name: pack_like_the_exporter(model, splits)})
    linear = assert_round_trip(path, "nunchaku")[name].linear
    assert linear.activation is None
    low_rank = read_floats(linear.lora_up) @ read_floats(linear.lora_down)
    np.testing.assert_array_equal(dequantize(linear.weight) + low_rank, model.weight)
    np.testing.assert_array_equal(read_floats(linear.bias), read_floats(model.bias))


def test_bias_whose_one_was_rounded_comes_back(tmp_path):
    model = make_model(24, 64)
    tiny = replace(model, bias=torch.full((24,), 1e-20, dtype=torch.bfloat16))
    parts = pack_like_the_exporter(tiny, 6)
    path = write_file(tmp_path / "in", {"transformer_blocks.0.norm1.linear": parts})
    assert_round_trip(path, "nunchaku")


def test_awq_and_w4a4_layers_of_one_file(tmp_path):
    w4a4 = Nunchaku().encode(make_linear(LinearShape(128, 128), ("int4", "int4")), {})
    awq_parts = pack_like_the_exporter(make_model(24, 64), 6)
    layers = {"a.norm1.linear": awq_parts, "a.qkv_proj": w4a4}
    found, read = read_all(write_file(tmp_path / "in", layers))
    assert not found.passthrough
    side = Nunchaku().make_side_content(read, None)
    assert '"rank": 16' in side.metadata["quantization_config"]


def test_record_without_zero_points_gets_zeros():
    linear = QuantizedLinear(make_weight(24, 128, get_format("uint4")))
    assert Nunchaku().find_obstacle(linear) is None
    parts = Nunchaku().encode(linear, {})
    assert not parts["wzeros"].any()


def as_zero_points(linear: QuantizedLinear) -> QuantizedLinear:
    up = torch.randn(linear.out_features, linear.in_features // 64).to(linear.weight.scales.dtype)
    down = awq.make_block_indicator(up.shape[1], up)
    return replace(linear, lora_down=down, lora_up=up)


def test_records_survive_encode_and_decode_under_every_name():
    linear = as_zero_points(QuantizedLinear(make_weight(24, 128, get_format("uint4"))))
    for name in LAYERS:
        for record in (linear, replace(linear, bias=torch.ones(24))):
            facts = Nunchaku().make_facts(name, record)
            assert_survives(Nunchaku(), record, facts)


def test_layer_from_elsewhere_is_written_in_the_order_its_name_is_read_in(tmp_path):
    name = "transformer_blocks.0.norm1.linear"
    linear = as_zero_points(QuantizedLinear(make_weight(24, 128, get_format("uint4"))))
    path = write_file(tmp_path / "out", {name: write_layer(Nunchaku(), Layer(name, linear))})
    again = read_all(path)[1][name].linear
    np.testing.assert_array_equal(dequantize(again.weight), dequantize(linear.weight))
    np.testing.assert_array_equal(read_floats(again.lora_up), read_floats(linear.lora_up))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wzeros": torch.zeros(3, 24, dtype=torch.bfloat16)}, r"wzeros: shape \[3, 24\]"),
        ({"wscales": torch.ones(24, 2, dtype=torch.bfloat16)}, r"wscales: shape \[24, 2\]"),
        ({"wzeros": torch.full((2, 24), float("nan"), dtype=torch.bfloat16)}, "wzeros: got NaN"),
        ({"wzeros": torch.zeros(2, 24, dtype=torch.float16)}, "wzeros: dtype torch.float16"),
        ({"bias": torch.zeros(23, dtype=torch.bfloat16)}, r"bias: shape \[23\]"),
        ({"wscales": -torch.ones(2, 24, dtype=torch.bfloat16)}, "negative block scales"),
        ({"g_idx": torch.zeros(2, dtype=torch.int32)}, "g_idx.*not understood"),
    ],
)
def test_damage_is_named(tmp_path, change, words):
    parts = {**pack_like_the_exporter(make_model(24, 128), 1), **change}
    with pytest.raises(CheckpointError, match=words):
        read_all(write_file(tmp_path / "in", {"proj": parts}))


def test_rows_that_are_no_whole_chunks_are_named(tmp_path):
    parts = pack_like_the_exporter(make_model(8, 64), 1)
    with pytest.raises(CheckpointError, match="8 rows: a layer of this name has 6 chunks"):
        read_all(write_file(tmp_path / "in", {"transformer_blocks.0.norm1.linear": parts}))


def test_obstacles_name_what_does_not_fit():
    weight = make_weight(24, 128, get_format("uint4"))
    linear = QuantizedLinear(weight)
    low_rank = {"lora_down": torch.randn(2, 128).half(), "lora_up": torch.randn(24, 2).half()}
    for changed, word in (
        (replace(linear, smooth=torch.ones(128)), "smooth"),
        (replace(linear, **low_rank), "low-rank"),
        (QuantizedLinear(make_weight(22, 128, get_format("uint4"))), "22 rows"),
    ):
        assert word in Nunchaku().find_obstacle(changed)


def test_metadata_of_a_file_with_awq_layers_alone_names_a_precision():
    linear = QuantizedLinear(make_weight(24, 128, get_format("uint4")))
    side = Nunchaku().make_side_content({"proj": Layer("proj", linear)}, None)
    assert str(make_quantization_config("int4", 0)["rank"]) in side.metadata["quantization_config"]
