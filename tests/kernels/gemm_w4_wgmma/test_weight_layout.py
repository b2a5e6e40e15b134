"""Packed weights: every code and scale in its place, folded bit by bit as the reference folds."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES
from halfbyte.formats.packing import pack_nibbles
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import (
    pack_act,
    pack_lora_up,
    pack_weight,
    unpack_act,
)
from halfbyte.reference.decode import decode_code_values, make_value_table, read_floats
from halfbyte.reference.gemm_w4_wgmma import (
    decode_act,
    decode_lora_blocks,
    decode_weight_blocks,
    fold_weight,
)

FORMATS = ("nvfp4", "nvfp4_one_level", "mxfp4", "int4")
PAIRS = (*((name, mode) for mode in ("fp8", "exact") for name in FORMATS), ("int4", "int8"))
SHAPES = ((128, 128), (130, 200), (1, 16), (260, 391), (5, 0))


def make_weight(name: str, shape: tuple[int, int], *, spread: float = 1.0) -> BlockScaledTensor:
    """Return random codes, all of them, under random scales of `spread` octaves a channel."""
    block_format = get_format(name)
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    rows, columns = shape
    padded = block_format.padded_columns(columns)
    codes = torch.randint(0, 16, (rows, padded), generator=generator, dtype=torch.uint8)
    if name == "int4":
        codes[codes == 8] = 7
    codes[:, columns:] = 0
    exponents = torch.rand((rows, block_format.num_blocks(columns)), generator=generator) * spread
    levels = torch.rand((rows, 1), generator=generator) * 2 - exponents
    if block_format.scale == "e8m0":
        scales = (levels.round() + 127).to(torch.uint8)
    elif block_format.scale == "e4m3":
        scales = (levels.exp2() * 64).to(torch.float8_e4m3fn)
    else:
        scales = levels.exp2().half()
    if block_format.scale in BYTE_SCALE_DTYPES:
        scales = scales.view(BYTE_SCALE_DTYPES[block_format.scale])
    global_scale = torch.tensor(0.003) if block_format.has_global_scale else None
    return BlockScaledTensor(block_format, pack_nibbles(codes), scales, global_scale, columns)


def decode(weight: BlockScaledTensor, mode: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (decoded weights [N_pad, K_pad], normalizer [N], blocks with another scale)."""
    packed = pack_weight(weight, mode)
    element = "int4" if weight.format.name == "int4" else "e2m1"
    values = decode_weight_blocks(packed.blocks, mode, element)
    return values, read_floats(packed.normalizer), packed.requantized


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_packed_bytes_are_the_folded_record(pair: tuple[str, str], shape: tuple[int, int]) -> None:
    name, mode = pair
    weight = make_weight(name, shape)
    values, normalizer, requantized = decode(weight, mode)
    wanted, wanted_normalizer = fold_weight(weight, mode)
    rows, columns = shape
    assert values.shape == (-(-rows // 128) * 128, -(-columns // 128) * 128)
    assert np.array_equal(values[:rows, :columns], wanted)
    assert np.array_equal(normalizer, wanted_normalizer)
    assert not values[rows:].any()
    assert not values[:, columns:].any()
    assert requantized == 0


@pytest.mark.parametrize("name", FORMATS)
def test_exact_weights_are_those_of_the_record(name: str) -> None:
    weight = make_weight(name, (130, 200), spread=16.0)
    values, normalizer, requantized = decode(weight, "exact")
    scale = 1.0 if weight.global_scale is None else float(weight.global_scale)
    got = values[:130, :200] * normalizer[:, None] * scale
    assert np.allclose(got, dequantize(weight).double().numpy(), rtol=1e-7, atol=0)
    assert requantized == 0


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_one_level", "mxfp4"])
def test_both_modes_share_their_bytes(name: str) -> None:
    weight = make_weight(name, (256, 384), spread=8.0)
    fp8, exact = pack_weight(weight, "fp8"), pack_weight(weight, "exact")
    assert torch.equal(fp8.blocks, exact.blocks)
    assert torch.equal(fp8.normalizer, exact.normalizer)


@pytest.mark.parametrize("name", FORMATS)
def test_low_blocks_are_requantized_and_counted(name: str) -> None:
    weight = make_weight(name, (128, 640), spread=14.0)
    values, normalizer, requantized = decode(weight, "fp8")
    wanted, wanted_normalizer = fold_weight(weight, "fp8")
    assert np.array_equal(values, wanted)
    assert np.array_equal(normalizer, wanted_normalizer)
    assert 0 < requantized < weight.scales.numel() / 2
    exact, _, unchanged = decode(weight, "exact")
    assert unchanged == 0
    largest = np.abs(exact).max(1, keepdims=True)
    scaled = exact * (np.abs(values).max(1, keepdims=True) / largest)
    assert np.abs(values - scaled).max() <= 1.1 * 32  # half an E4M3 step, beside the fold's own


def test_mxfp4_beyond_e4m3_is_counted_in_exact_mode() -> None:
    weight = make_weight("mxfp4", (128, 640), spread=30.0)
    values, normalizer, requantized = decode(weight, "exact")
    wanted, wanted_normalizer = fold_weight(weight, "exact")
    assert np.array_equal(values, wanted)
    assert np.array_equal(normalizer, wanted_normalizer)
    assert 0 < requantized < weight.scales.numel() / 2


def test_every_scale_of_every_format_folds_as_e4m3_rounds() -> None:
    table = make_value_table("e4m3")
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    weight = BlockScaledTensor(get_format("nvfp4_one_level"), pack_nibbles(codes), scales, None, 16)
    values, normalizer, _ = decode(weight, "fp8")
    numbers = decode_code_values(weight) * table[:127, None] / normalizer[:, None]
    rounded = torch.from_numpy(numbers).float().to(torch.float8_e4m3fn).float().double().numpy()
    assert np.array_equal(values[:127, :16], rounded)


def test_scales_of_zero_blocks_have_no_say() -> None:
    weight = make_weight("mxfp4", (128, 128))
    changed = weight.scales.view(torch.uint8).clone()
    data = weight.data.clone()
    data[:, :16] = 0x80  # plus and minus zero
    changed[:, 0] = 0
    zero = dataclasses.replace(weight, data=data, scales=changed.view(torch.float8_e8m0fnu))
    values, _, requantized = decode(zero, "fp8")
    assert requantized == 0
    assert not values[:, :32].any()
    assert np.array_equal(values[:, 32:], fold_weight(zero, "fp8")[0][:, 32:])
    scales = weight.scales.view(torch.uint8).clone()
    scales[:, 0] = 0
    nvfp4 = make_weight("nvfp4_one_level", (128, 128))
    dead = nvfp4.scales.view(torch.uint8).clone()
    dead[:, 0] = 0
    dead_weight = dataclasses.replace(nvfp4, scales=dead.view(torch.float8_e4m3fn))
    for mode in ("fp8", "exact"):
        assert not decode(dead_weight, mode)[0][:, :16].any()


def test_int4_code_minus_8_is_refused_by_fp8_and_kept_by_integers() -> None:
    weight = make_weight("int4", (128, 128))
    data = weight.data.clone()
    data[5, 3] = 0x81
    weight = dataclasses.replace(weight, data=data)
    with pytest.raises(UnsupportedHardwareError, match=r"weight\[5, 7\].*-8"):
        pack_weight(weight, "fp8")
    values, _, _ = decode(weight, "int8")
    assert np.array_equal(values, fold_weight(weight, "int8")[0])
    assert values[5, 7] == -8 * read_floats(weight.scales)[5, 0]


def test_channels_marked_zero_are_zeros() -> None:
    weight = make_weight("nvfp4", (130, 128))
    is_zero = torch.zeros(130, dtype=torch.bool)
    is_zero[7] = True
    values = decode_weight_blocks(pack_weight(weight, "fp8", is_zero).blocks, "fp8", "e2m1")
    assert not values[7].any()
    others = np.arange(130) != 7
    assert np.array_equal(values[:130][others], decode(weight, "fp8")[0][:130][others])


def test_formats_that_the_layout_lacks_are_named() -> None:
    for name in ("mxfp8_e4m3", "uint4", "int4_block32"):
        with pytest.raises(UnsupportedHardwareError, match=name):
            pack_weight(quantize(torch.randn(4, 64), name), "fp8")


def test_bad_scales_are_named() -> None:
    weight = make_weight("nvfp4", (128, 128))
    scales = weight.scales.view(torch.uint8).clone()
    scales[3, 2] = 0x7F
    bad = dataclasses.replace(weight, scales=scales.view(torch.float8_e4m3fn))
    with pytest.raises(FormatError, match=r"weight_scales\[3, 2\] is nan"):
        pack_weight(bad, "exact")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(128, 32), (130, 40), (300, 128)], ids=str)
def test_lora_fragments(shape: tuple[int, int], dtype: torch.dtype) -> None:
    lora_up = torch.randn(shape).to(dtype)
    blocks = pack_lora_up(lora_up)
    values = decode_lora_blocks(blocks, dtype)
    assert blocks.shape == (-(-shape[0] // 128), -(-shape[1] // 32), 8192)
    assert np.array_equal(values[: shape[0], : shape[1]], read_floats(lora_up))
    assert values.size == blocks.numel() // 2
    assert np.count_nonzero(values) == np.count_nonzero(read_floats(lora_up))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float16], ids=str)
def test_act_order(dtype: torch.dtype) -> None:
    act = torch.randint(-60, 60, (5, 192)).to(dtype)
    packed = pack_act(act)
    assert packed.dtype == dtype
    assert np.array_equal(decode_act(packed), act.double().numpy())
    assert torch.equal(unpack_act(packed).view(torch.int8), act.view(torch.int8))
