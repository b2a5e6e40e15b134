"""place_linear for Hopper: the arithmetic of placed operands, refusals, bytes."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4_wgmma.placement import place_linear, replace_low_rank
from halfbyte.reference import w4a4_linear
from halfbyte.reference.decode import Float64Array, dequantize, read_floats
from halfbyte.reference.gemm_w4_wgmma import decode_lora_blocks, fold_weight, gemm_w4_wgmma
from halfbyte.reference.wgmma_linear import wgmma_linear
from tests.kernels.gemm_w4_wgmma.operands import make_operands
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

DTYPES = (torch.float16, torch.bfloat16)
SHAPE = LinearShape(n=140, k=200, rank=24)
RUNS = tuple(
    (pair, mode)
    for pair in FORMAT_PAIRS
    for mode in ("fp8", "exact", "int8")
    if not (mode == "int8" and pair[0] != "int4") and (pair, mode) != (("int4", None), "exact")
)


def run_id(run: tuple[tuple[str, str | None], str]) -> str:
    """Return a readable id of one of RUNS."""
    return f"{pair_id(run[0])}-{run[1]}"


def make_lively(pair: tuple[str, str | None], dtype: torch.dtype) -> QuantizedLinear:
    """Return a random linear without code -8, its low-rank factors in `dtype`."""
    linear = make_linear(SHAPE, pair)
    weight = linear.weight
    if pair[0] == "int4":
        data = weight.data.clone()
        data[data & 0x0F == 8] -= 1
        data[data & 0xF0 == 0x80] -= 0x10
        weight = dataclasses.replace(weight, data=data)
    assert linear.lora_down is not None
    assert linear.lora_up is not None
    return dataclasses.replace(
        linear,
        weight=weight,
        lora_down=(linear.lora_down / 4).to(dtype),
        lora_up=(linear.lora_up / 4).to(dtype),
    )


def multiply_unquantized(x: torch.Tensor, linear: QuantizedLinear) -> Float64Array:
    """Return y [M, N] of the linear with x as it is."""
    z = read_floats(x)
    if linear.activation is not None:
        z = z + linear.activation.shift
    if linear.smooth is not None:
        z = z / read_floats(linear.smooth)
    y = z @ dequantize(linear.weight).T
    if linear.channel_scale is not None:
        y = y * read_floats(linear.channel_scale)
    if linear.lora_down is not None and linear.lora_up is not None:
        y = y + read_floats(x) @ read_floats(linear.lora_down).T @ read_floats(linear.lora_up).T
    return y if linear.bias is None else y + read_floats(linear.bias)


def measure_error(y: Float64Array, wanted: Float64Array) -> float:
    """Return the relative Frobenius error."""
    return float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_placed_operands_give_the_linear(
    run: tuple[tuple[str, str | None], str], dtype: torch.dtype
) -> None:
    pair, mode = run
    linear = make_lively(pair, dtype)
    x = make_input(48, SHAPE.k, dtype)
    placed = place_linear(linear, dtype, mode)
    y = gemm_w4_wgmma(make_operands(x, placed, linear))[:, : SHAPE.n]
    step = torch.finfo(dtype).eps
    if mode == "exact":  # lora_act and lora_up' are rounded once each; nothing else is
        limit = step if pair[1] else step + 2.0**-11
        assert measure_error(y, w4a4_linear(x, linear)) < limit
        return
    assert measure_error(y, wgmma_linear(x, linear, mode)) < step
    true = multiply_unquantized(x, linear)
    w4a4 = measure_error(w4a4_linear(x, linear), true) if pair[1] else 0.05
    assert measure_error(y, true) < w4a4


@pytest.mark.parametrize("mode", ["fp8", "exact"])
@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.bfloat16, -20), (torch.bfloat16, 20), (torch.float16, -8), (torch.float16, 8)],
    ids=str,
)
def test_low_rank_survives_extreme_scales(dtype: torch.dtype, exponent: int, mode: str) -> None:
    linear = make_lively(("nvfp4", "nvfp4_one_level"), dtype)
    alpha = 2.0**exponent
    weight = dataclasses.replace(linear.weight, global_scale=torch.tensor(alpha))
    assert linear.lora_up is not None
    lora_up = (linear.lora_up.float() * alpha).to(dtype)
    linear = dataclasses.replace(linear, weight=weight, lora_up=lora_up, bias=None)
    x = make_input(16, SHAPE.k, dtype)
    y = gemm_w4_wgmma(make_operands(x, place_linear(linear, dtype, mode), linear))[:, : SHAPE.n]
    true = multiply_unquantized(x, linear)
    assert measure_error(y, true) <= 1.01 * measure_error(w4a4_linear(x, linear), true)


def test_low_rank_factors_beyond_the_dtype_are_named() -> None:
    linear = make_lively(("nvfp4", "nvfp4_one_level"), torch.float16)
    weight = dataclasses.replace(linear.weight, global_scale=torch.tensor(2.0**-20))
    with pytest.raises(FormatError, match=r"column \d+: lora_up up to"):
        place_linear(dataclasses.replace(linear, weight=weight), torch.float16, "fp8")


def test_fp8_weights_are_the_folded_ones_and_scales_meet_in_one_factor() -> None:
    linear = make_lively(("nvfp4", "nvfp4_static"), torch.bfloat16)
    assert linear.channel_scale is not None
    assert linear.weight.global_scale is not None
    assert linear.activation_global_scale is not None
    _, normalizer = fold_weight(linear.weight, "fp8")
    fp8 = place_linear(linear, torch.bfloat16, "fp8")
    exact = place_linear(linear, torch.bfloat16, "exact")
    factor = read_floats(linear.channel_scale) * float(linear.weight.global_scale) * normalizer
    assert np.allclose(read_floats(fp8.channel_scale)[: SHAPE.n], factor, rtol=1e-7)
    factor *= float(linear.activation_global_scale)
    assert np.allclose(read_floats(exact.channel_scale)[: SHAPE.n], factor, rtol=1e-7)
    assert fp8.activation_global_scale is None
    assert exact.activation_global_scale is not None
    assert torch.equal(fp8.weight_blocks, exact.weight_blocks)


def test_a_zero_channel_is_its_low_rank_and_bias() -> None:
    linear = make_lively(("nvfp4", "nvfp4_dynamic"), torch.bfloat16)
    assert linear.channel_scale is not None
    channel = linear.channel_scale.clone()
    channel[5] = 0.0
    linear = dataclasses.replace(linear, channel_scale=channel)
    x = make_input(8, SHAPE.k, torch.bfloat16)
    for mode in ("fp8", "exact"):
        placed = place_linear(linear, torch.bfloat16, mode)
        y = gemm_w4_wgmma(make_operands(x, placed, linear))
        wanted = w4a4_linear(x, linear)[:, 5]
        assert np.allclose(y[:, 5], wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


def test_replaced_low_rank_equals_placing_it() -> None:
    linear = make_lively(("nvfp4", "nvfp4_one_level"), torch.float16)
    assert linear.lora_down is not None
    assert linear.lora_up is not None
    changed = dataclasses.replace(
        linear, lora_down=linear.lora_down[:9].clone(), lora_up=linear.lora_up[:, :9] * 3
    )
    again = replace_low_rank(place_linear(linear, torch.float16, "fp8"), changed, torch.float16)
    wanted = place_linear(changed, torch.float16, "fp8")
    for field in dataclasses.fields(wanted):
        got, value = getattr(again, field.name), getattr(wanted, field.name)
        assert torch.equal(got, value) if isinstance(value, torch.Tensor) else got == value
    assert again.lora_blocks is not None
    assert decode_lora_blocks(again.lora_blocks, torch.float16)[:, 9:].any() == np.False_


def test_one_copy_takes_less_than_a_third_of_16_bits() -> None:
    n, k = 3072, 3840  # the larger N or K, the smaller the part of the low rank
    blocks = torch.full((n, k // 16), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.full((n, k // 2), 0x22, dtype=torch.uint8)
    linear = QuantizedLinear(
        BlockScaledTensor(get_format("nvfp4_one_level"), codes, blocks, None, k),
        lora_down=torch.zeros(32, k),
        lora_up=torch.zeros(n, 32),
        bias=torch.zeros(n),
    )
    placed = place_linear(linear, torch.bfloat16, "fp8")
    assert placed.num_bytes <= 0.31 * placed.dense_bytes


def test_one_copy_serves_every_number_of_tokens() -> None:
    linear = make_lively(("mxfp4", "mxfp4"), torch.bfloat16)
    both, prefill, decode = (
        place_linear(linear, torch.bfloat16, "fp8", tokens)
        for tokens in ("both", "prefill", "decode")
    )
    assert both.num_bytes == prefill.num_bytes == decode.num_bytes
    assert torch.equal(prefill.weight_blocks, decode.weight_blocks)


@pytest.mark.parametrize(
    ("pair", "mode", "words"),
    [
        (("nvfp4", "nvfp4_static"), "int8", "integer tensor cores"),
        (("int4", None), "exact", "weight-only 'int4'"),
        (("nvfp4", "int4"), "exact", "E2M1 goes with E2M1"),
    ],
    ids=str,
)
def test_what_a_mode_lacks_is_named(pair: tuple[str, str | None], mode: str, words: str) -> None:
    with pytest.raises(UnsupportedHardwareError, match=words):
        place_linear(make_linear(SHAPE, pair), torch.bfloat16, mode)


def test_bad_values_are_named() -> None:
    linear = make_lively(("nvfp4", "nvfp4_one_level"), torch.bfloat16)
    assert linear.smooth is not None
    smooth = linear.smooth.clone()
    smooth[3] = 0.0
    with pytest.raises(FormatError, match=r"smooth\[3\]"):
        place_linear(dataclasses.replace(linear, smooth=smooth), torch.bfloat16, "fp8")
    smooth[3] = 1e-39
    with pytest.raises(FormatError, match="leaves float32"):
        place_linear(dataclasses.replace(linear, smooth=smooth), torch.bfloat16, "fp8")
    with pytest.raises(FormatError, match="float32"):
        place_linear(linear, torch.float32, "fp8")
    with pytest.raises(FormatError, match="mode 'w4a8'"):
        place_linear(linear, torch.bfloat16, "w4a8")
    with pytest.raises(FormatError, match="tokens 'many'"):
        place_linear(linear, torch.bfloat16, "fp8", "many")
