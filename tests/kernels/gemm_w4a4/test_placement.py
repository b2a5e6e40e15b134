"""place_linear: bytes, padding, factors and the balance of the low-rank operands."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import scale_offset
from halfbyte.kernels.gemm_w4a4.placement import place_linear
from halfbyte.reference import w4a4_linear
from halfbyte.reference.decode import read_bytes
from tests.kernels.gemm_w4a4.placed_arithmetic import (
    decode_placed_weight,
    measure_column_error,
    multiply_as_the_kernel_does,
    multiply_in_torch,
)
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

BLACKWELL_PAIRS = FORMAT_PAIRS[:5]
DTYPES = (torch.float16, torch.bfloat16)
SHAPE = LinearShape(n=48, k=200, rank=24)


def in_dtype(linear: QuantizedLinear, dtype: torch.dtype) -> QuantizedLinear:
    """Return `linear` with its low-rank factors of lively sizes, rounded to `dtype`."""
    assert linear.lora_down is not None
    assert linear.lora_up is not None
    return dataclasses.replace(
        linear,
        lora_down=(linear.lora_down / 4).to(dtype),
        lora_up=(linear.lora_up / 4).to(dtype),
    )


def with_alpha(linear: QuantizedLinear, alpha: float) -> QuantizedLinear:
    """Return `linear` whose global scales multiply to `alpha`, a dynamic one taken as 2^-5.

    2^-5 is what an amax(x / smooth) of 84 gives; that of `make_input` is near it.
    """
    assert linear.activation is not None
    activation = 2.0**-5 if linear.activation.global_scale == "dynamic" else 1.0
    if linear.activation_global_scale is not None:
        activation = float(linear.activation_global_scale)
    weight = dataclasses.replace(
        linear.weight, global_scale=torch.tensor(alpha / activation, dtype=torch.float32)
    )
    return dataclasses.replace(linear, weight=weight)


def check_arithmetic(linear: QuantizedLinear, x: torch.Tensor) -> None:
    """Assert that the kernels' arithmetic is as good as torch's in the same precision."""
    y = multiply_as_the_kernel_does(x, place_linear(linear, x.dtype), linear)
    limit = 2 * measure_column_error(multiply_in_torch(x, linear), x, linear)
    assert measure_column_error(y, x, linear) <= limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", BLACKWELL_PAIRS, ids=pair_id)
def test_placed_operands_give_the_linear(pair: tuple[str, str | None], dtype: torch.dtype) -> None:
    linear = in_dtype(make_linear(SHAPE, pair), dtype)
    check_arithmetic(linear, make_input(64, 200, dtype))


@pytest.mark.parametrize("exponent", [-20, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", BLACKWELL_PAIRS[:4], ids=pair_id)
def test_extreme_alpha(pair: tuple[str, str | None], dtype: torch.dtype, exponent: int) -> None:
    linear = in_dtype(with_alpha(make_linear(SHAPE, pair), 2.0**exponent), dtype)
    x = make_input(64, 200, dtype)
    if dtype == torch.float16 and exponent > 0:  # the true y must fit float16
        assert linear.channel_scale is not None
        linear = dataclasses.replace(linear, channel_scale=linear.channel_scale * 2.0**-18)
    check_arithmetic(linear, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_extreme_alpha_is_carried_by_both_operands(dtype: torch.dtype) -> None:
    plain = in_dtype(make_linear(SHAPE, ("nvfp4", "nvfp4_nunchaku")), dtype)
    small = place_linear(with_alpha(plain, 2.0**-20), dtype)
    large = place_linear(with_alpha(plain, 2.0**20), dtype)
    for placed in (small, large):
        assert np.log2(placed.lora_act_scale) % 1 == 0
        assert placed.lora_up is not None
        assert bool(torch.isfinite(placed.lora_up).all())
    if dtype == torch.float16:
        assert small.lora_act_scale > large.lora_act_scale
        assert small.lora_up is not None
        assert float(small.lora_up.abs().max()) > 2**15  # no more of the range than needed
    else:
        assert small.lora_act_scale == large.lora_act_scale == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("alpha", "reach"), [(1.0, 9), (2.0**-20, 6)])
def test_mixed_magnitudes_over_n(dtype: torch.dtype, alpha: float, reach: int) -> None:
    linear = in_dtype(make_linear(SHAPE, ("nvfp4", "nvfp4_static")), dtype)
    linear = with_alpha(linear, alpha)
    spread = torch.linspace(-reach, reach, SHAPE.n).exp2()
    check_arithmetic(
        dataclasses.replace(linear, channel_scale=spread), make_input(64, 200, dtype) / 32
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [None, 2.0**-20], ids=["as_is", "alpha2^-20"])
@pytest.mark.parametrize("pair", BLACKWELL_PAIRS, ids=pair_id)
def test_a_zero_channel_scale_leaves_low_rank_and_bias(
    pair: tuple[str, str | None], alpha: float | None, dtype: torch.dtype
) -> None:
    linear = in_dtype(make_linear(SHAPE, pair), dtype)
    if alpha is not None and pair[0] == "nvfp4":
        linear = with_alpha(linear, alpha)
    assert linear.channel_scale is not None
    scale = linear.channel_scale.clone()
    scale[3::7] = 0.0
    linear = dataclasses.replace(linear, channel_scale=scale)
    x = make_input(64, 200, dtype)
    placed = place_linear(linear, dtype)
    assert placed.column_scale is not None
    assert bool((placed.column_scale != 0).all())
    assert (decode_placed_weight(placed)[3::7] == 0).all()
    assert linear.lora_down is not None
    assert linear.lora_up is not None
    assert linear.bias is not None
    wanted = x.double() @ linear.lora_down.double().T @ linear.lora_up.double().T + linear.bias
    np.testing.assert_allclose(w4a4_linear(x, linear)[:, 3::7], wanted[:, 3::7].numpy())
    check_arithmetic(linear, x)


def test_a_product_of_factors_that_flushes_counts_as_zero() -> None:
    linear = with_alpha(make_linear(SHAPE), 2.0**-100)
    scale = torch.full((SHAPE.n,), 2.0**100)
    scale[5] = 2.0**-40
    placed = place_linear(dataclasses.replace(linear, channel_scale=scale), torch.bfloat16)
    assert placed.column_scale is not None
    assert placed.column_scale[5].item() == 2.0**-100  # of the two factors alpha stays
    assert (decode_placed_weight(placed)[5] == 0).all()
    assert (decode_placed_weight(placed)[4] != 0).any()
    nothing = place_linear(with_alpha(make_linear(SHAPE), 0.0), torch.float16)
    assert nothing.column_scale is None
    assert (decode_placed_weight(nothing) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_channel_scales_are_factors_like_others(dtype: torch.dtype) -> None:
    linear = in_dtype(make_linear(SHAPE), dtype)
    assert linear.channel_scale is not None
    signs = torch.where(torch.arange(SHAPE.n) % 2 == 0, -1.0, 1.0)
    scale = linear.channel_scale * signs
    check_arithmetic(dataclasses.replace(linear, channel_scale=scale), make_input(64, 200, dtype))


@pytest.mark.parametrize("pair", BLACKWELL_PAIRS, ids=pair_id)
@pytest.mark.parametrize("k", [32, 40, 64, 97, 200])
def test_bytes_are_the_record_s_and_padding_is_zero(pair: tuple[str, str | None], k: int) -> None:
    linear = make_linear(LinearShape(n=37, k=k, rank=5), pair)
    linear.weight.data[:, -(-k // 2) :] = 0x7F  # padding of a record is not to be trusted
    if k % 2:
        linear.weight.data[:, k // 2] |= 0xF0
    placed = place_linear(linear, torch.bfloat16)
    padded = -(-k // 32) * 32
    assert tuple(placed.weight_codes.shape) == (37, padded // 2)
    codes = read_bytes(placed.weight_codes)
    low_high = np.stack([codes & 0xF, codes >> 4], axis=2).reshape(37, padded)
    given = read_bytes(linear.weight.data)
    wanted = np.stack([given & 0xF, given >> 4], axis=2).reshape(37, -1)
    np.testing.assert_array_equal(low_high[:, :k], wanted[:, :k])
    assert not low_high[:, k:].any()
    blocks = linear.weight.scales.shape[1]
    sf = read_bytes(placed.weight_sf)
    scales = read_bytes(linear.weight.scales)
    used = np.zeros(len(sf), dtype=bool)
    for row in range(37):
        for block in range(blocks):
            offset = scale_offset(row, block, (37, blocks), "swizzled_128x4")
            assert sf[offset] == scales[row, block]
            used[offset] = True
    assert not sf[~used].any()
    assert placed.lora_down is not None
    assert placed.lora_up is not None
    assert tuple(placed.lora_down.shape) == (8, padded)
    assert tuple(placed.lora_up.shape) == (37, 8)
    assert not placed.lora_down[5:].any()
    assert not placed.lora_down[:, k:].any()
    assert not placed.lora_up[:, 5:].any()


def test_codes_are_not_copied_where_they_lie_right() -> None:
    linear = make_linear(LinearShape(n=16, k=64, rank=0, parts=False))
    placed = place_linear(linear, torch.float16)
    assert placed.weight_codes.data_ptr() == linear.weight.data.data_ptr()
    assert placed.shared_bytes == 16 * 32
    assert placed.num_bytes == 16 * 32 + 128 * 4 + 16 * 4  # codes, scales, column_scale
    ragged = place_linear(make_linear(LinearShape(n=16, k=72)), torch.float16)
    assert ragged.shared_bytes == 4 * (16 + 72)  # a float32 bias and smooth are read as they are
    half = make_linear(LinearShape(n=16, k=72, dtype=torch.float16))
    assert place_linear(half, torch.float16).shared_bytes == 0


def at_odd_address(part: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory of other strides, at an address of one element more."""
    if part.ndim < 2:
        room = torch.zeros(part.numel() + 1, dtype=part.dtype)
        return room[1:].view(part.shape).copy_(part)
    rows, columns = part.shape
    room = torch.zeros(columns * (rows + 3) + 1, dtype=part.dtype)
    return room[1:].view(columns, rows + 3).t()[:rows].copy_(part)


@pytest.mark.parametrize("pair", BLACKWELL_PAIRS, ids=pair_id)
def test_strides_and_addresses_of_the_record_change_nothing(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=24, k=64, rank=8), pair)
    weight = dataclasses.replace(
        linear.weight,
        data=at_odd_address(linear.weight.data),
        scales=at_odd_address(linear.weight.scales.view(torch.uint8)).view(
            linear.weight.scales.dtype
        ),
    )
    names = ("channel_scale", "smooth", "lora_down", "lora_up", "bias")
    odd = {name: at_odd_address(getattr(linear, name)) for name in names}
    placed = place_linear(dataclasses.replace(linear, weight=weight, **odd), torch.bfloat16)
    wanted = place_linear(linear, torch.bfloat16)
    for field in dataclasses.fields(placed):
        ours, other = getattr(placed, field.name), getattr(wanted, field.name)
        if not isinstance(ours, torch.Tensor):
            assert ours == other or field.name == "shared_bytes"
            continue
        assert torch.equal(ours, other), field.name
        assert ours.is_contiguous()
        assert ours.data_ptr() % 16 == 0 or ours.numel() == 1
    assert placed.shared_bytes == (4 if placed.activation_global_scale is not None else 0)


def test_parts_that_are_not_there_stay_absent() -> None:
    linear = make_linear(LinearShape(n=16, k=64, rank=0, parts=False), ("mxfp4", "mxfp4"))
    placed = place_linear(linear, torch.float16)
    assert placed.column_scale is placed.bias is placed.smooth is None
    assert placed.lora_down is placed.lora_up is None
    assert (placed.rank, placed.lora_act_scale) == (0, 1.0)
    assert placed.activation_global_scale is None
    static = place_linear(make_linear(SHAPE, ("nvfp4", "nvfp4_static")), torch.float16)
    assert static.activation_global_scale is not None
    assert tuple(static.activation_global_scale.shape) == (1,)


def test_what_no_exponent_fits_is_refused_with_its_columns_and_the_way_out() -> None:
    linear = in_dtype(make_linear(SHAPE), torch.float32)
    scale = torch.ones(SHAPE.n)
    scale[2], scale[40] = 2.0**-22, 2.0**22
    linear = dataclasses.replace(linear, channel_scale=scale)
    with pytest.raises(FormatError, match=r"do not both fit torch.float16 \(column 2: .*column 40"):
        place_linear(linear, torch.float16)
    with pytest.raises(FormatError, match=r"run the layer in torch.bfloat16, or on the cpu"):
        place_linear(linear, torch.float16)
    place_linear(linear, torch.bfloat16)


def test_a_lora_act_that_would_overflow_at_ordinary_inputs_is_refused() -> None:
    # s = 5 for lora_up; x / g reaches 2688 by definition, times |lora_down| and 2^5 beyond 65504
    linear = in_dtype(make_linear(SHAPE, ("nvfp4", "nvfp4_dynamic")), torch.float16)
    weight = dataclasses.replace(linear.weight, global_scale=torch.tensor(2.0**-20))
    with pytest.raises(FormatError, match=r"lora_act up to 1.07e\+04\); run the layer in"):
        place_linear(dataclasses.replace(linear, weight=weight), torch.float16)


def test_a_dead_column_does_not_cost_the_layer() -> None:
    linear = in_dtype(with_alpha(make_linear(SHAPE), 2.0**-12), torch.float32)
    assert linear.lora_up is not None
    lora_up = linear.lora_up.clone()
    lora_up[7] = 1e-12  # noise of an SVD beside a row of zeros: float16 would flush it anyway
    placed = place_linear(dataclasses.replace(linear, lora_up=lora_up), torch.float16)
    assert placed.lora_up is not None
    assert float(placed.lora_up[7].abs().max()) < 1e-6


def test_lora_act_cannot_overflow_where_the_bound_leaves_room() -> None:
    linear = in_dtype(make_linear(SHAPE, ("nvfp4", "nvfp4_dynamic")), torch.float16)
    placed = place_linear(linear, torch.float16)
    assert placed.lora_down is not None
    assert linear.smooth is not None
    # the input that the bound is made of: every |x / smooth| at the amax that alpha maps to 2688
    signs = torch.sign(placed.lora_down[0, :200].float())
    lora_act = (signs * linear.smooth * 2688) @ placed.lora_down[:, :200].float().T
    assert bool(torch.isfinite((lora_act * placed.lora_act_scale).half()).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["channel_scale", "smooth", "lora_down", "lora_up", "bias"])
def test_values_that_are_not_finite_are_named(part: str, value: float) -> None:
    linear = make_linear(SHAPE)
    getattr(linear, part).flatten()[5] = value
    with pytest.raises(FormatError, match=rf"{part}\[.*5\] is {value}, wanted finite"):
        place_linear(linear, torch.bfloat16)


def test_a_global_scale_that_is_not_finite_is_named() -> None:
    with pytest.raises(FormatError, match="weight_global_scale is nan"):
        place_linear(with_alpha(make_linear(SHAPE), float("nan")), torch.float16)
    linear = make_linear(SHAPE, ("nvfp4", "nvfp4_static"))
    linear = dataclasses.replace(linear, activation_global_scale=torch.tensor(float("inf")))
    with pytest.raises(FormatError, match="activation_global_scale is inf"):
        place_linear(linear, torch.float16)


def test_a_factor_beyond_float32_is_named() -> None:
    linear = with_alpha(make_linear(SHAPE), 1e30)
    scale = torch.ones(SHAPE.n)
    scale[9] = 1e20
    with pytest.raises(FormatError, match=r"channel_scale\[9\] = 1e\+20 times .* leaves float32"):
        place_linear(dataclasses.replace(linear, channel_scale=scale), torch.bfloat16)


@pytest.mark.parametrize(("byte", "pair"), [(0x7F, 0), (0x80, 0), (0xFF, 4)])
def test_block_scales_that_tensor_cores_read_otherwise_are_named(byte: int, pair: int) -> None:
    linear = make_linear(SHAPE, FORMAT_PAIRS[pair])
    linear.weight.scales.view(torch.uint8)[4, 2] = byte
    with pytest.raises(FormatError, match=rf"weight_scales\[4, 2\] is {byte}: a NaN or negative"):
        place_linear(linear, torch.float16)


def test_lora_down_beyond_the_dtype_is_named() -> None:
    linear = make_linear(SHAPE)
    assert linear.lora_down is not None
    linear.lora_down[0, 0] = 1e6
    with pytest.raises(FormatError, match=r"lora_down: torch.float32 up to 1e\+06 does not fit"):
        place_linear(linear, torch.float16)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("int4", "int4"), "format 'int4': .*no INT4 kind; the cpu backend runs it"),
        (("int4", "uint4_shifted"), "format 'int4'"),
        (("nvfp4", None), "weight-only nvfp4 .*the cpu backend runs it"),
        (("mxfp4", "nvfp4_nunchaku"), "weight 'mxfp4' with activation 'nvfp4_nunchaku'"),
        (("nvfp4", "int4"), "format 'int4'"),
    ],
)
def test_formats_without_an_mma_are_named(pair: tuple[str, str | None], message: str) -> None:
    with pytest.raises(UnsupportedHardwareError, match=message):
        place_linear(make_linear(SHAPE, pair), torch.float16)


def test_float32_operands_are_refused() -> None:
    with pytest.raises(FormatError, match=r"dtype torch.float32: the low-rank operands are"):
        place_linear(make_linear(SHAPE), torch.float32)


@pytest.mark.parametrize("size", [(0, 64), (16, 0)])
def test_empty_linears_are_placed(size: tuple[int, int]) -> None:
    placed = place_linear(make_linear(LinearShape(*size, rank=4)), torch.float16)
    assert placed.out_features == size[0]
    assert placed.columns == size[1]
