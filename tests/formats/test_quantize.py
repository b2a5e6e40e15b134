"""The quantizer as a whole: bytes against an independent one, shapes, strides, counts, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ACTIVATION_FORMATS, get_activation_format
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_format import FORMATS
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.elements import get_element
from halfbyte.formats.packing import unpack_codes
from halfbyte.formats.quantize import (
    decode_codes,
    decode_scales,
    dequantize,
    quantize,
    quantize_activation,
    quantize_with_counts,
)
from tests.formats import numpy_quantizer

MX = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Gaussian values with a few outliers and blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    exponents = torch.randint(-6, 7, (rows, 1), generator=generator)
    is_outlier = torch.rand(rows, columns, generator=generator) < 0.01
    return torch.ldexp(values, exponents) * (1 + 30 * is_outlier)


def unpack(t: BlockScaledTensor) -> np.ndarray:
    return unpack_codes(t.data, t.format.element_bits).numpy()


def assert_same(first: BlockScaledTensor, second: BlockScaledTensor) -> None:
    assert torch.equal(first.data, second.data)
    assert torch.equal(first.scales.view(torch.uint8), second.scales.view(torch.uint8))
    assert first.global_scale == second.global_scale
    assert first.columns == second.columns


def assert_bytes(t: BlockScaledTensor, codes: np.ndarray, scales: np.ndarray) -> None:
    assert np.array_equal(t.scales.view(torch.uint8).numpy(), scales.view(np.uint8))
    assert np.array_equal(unpack(t), codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_one_level"])
def test_nvfp4_equals_an_independent_quantizer(
    implementation: str, name: str, dtype: torch.dtype
) -> None:
    x = make_values(60, 192).to(dtype)
    values = x.float().numpy()
    g = numpy_quantizer.global_scale(values) if name == "nvfp4" else np.float32(1)
    t = quantize(x, name)
    assert_bytes(t, *numpy_quantizer.nvfp4(values, g))
    assert t.global_scale is None or float(t.global_scale) == float(g)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX)
def test_mx_equals_an_independent_quantizer(
    implementation: str, name: str, dtype: torch.dtype
) -> None:
    x = make_values(60, 192).to(dtype)
    assert_bytes(quantize(x, name), *numpy_quantizer.mx(x.float().numpy(), name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_integers_equal_an_independent_quantizer(
    implementation: str, name: str, dtype: torch.dtype
) -> None:
    x = make_values(60, 192).to(dtype)
    wanted = numpy_quantizer.integer(x.float().numpy(), 7 if name == "int4" else 15, name == "int4")
    assert_bytes(quantize(x, name), *wanted)


@pytest.mark.parametrize("scale_dtype", DTYPES)
def test_int4_scales_have_the_asked_dtype(implementation: str, scale_dtype: torch.dtype) -> None:
    x = make_values(8, 128)
    t = quantize(x, "int4", scale_dtype=scale_dtype)
    wanted = (x.reshape(8, 2, 64).abs().amax(-1) / 7).to(scale_dtype)
    assert t.scales.dtype == scale_dtype
    assert torch.equal(t.scales, wanted)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
def test_activations_equal_an_independent_quantizer(implementation: str, name: str) -> None:
    act = get_activation_format(name)
    z = make_values(60, 192)
    values = z.numpy()
    static = torch.tensor(0.01) if act.global_scale == "static" else None
    t, counts = quantize_activation(z, act, static)
    assert counts.blocks == t.scales.numel()
    if act.block_format.scale == "e4m3":
        g = np.float32(0.01) if static is not None else np.float32(1)
        if act.global_scale == "dynamic":
            g = numpy_quantizer.global_scale(values)
        wanted = numpy_quantizer.nvfp4(values, g, act.payload_divisor == "unrounded")
    elif act.block_format.scale == "e8m0":
        wanted = numpy_quantizer.mx(values, "mxfp4")
    else:
        is_signed = act.block_format.element == "int4"
        wanted = numpy_quantizer.integer(values, 7 if is_signed else 15, is_signed)
    assert_bytes(t, *wanted)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_values_are_code_times_scales(name: str) -> None:
    t = quantize(make_values(10, 100), name)
    scales = decode_scales(t).repeat_interleave(t.format.block_size, 1)[:, :100]
    assert torch.equal(dequantize(t), decode_codes(t) * scales)
    assert torch.equal(dequantize(t, torch.bfloat16), dequantize(t).to(torch.bfloat16))


@pytest.mark.parametrize("search", ["absmax", "optimal"])
@pytest.mark.parametrize("name", FORMATS)
def test_strided_inputs_give_the_bytes_of_their_copy(
    implementation: str, name: str, search: str
) -> None:
    big = make_values(40, 300)
    for x in (big[:, :150], big.t(), big[::3, 1:], big[:, ::2], big[:1].expand(5, -1)):
        assert_same(
            quantize(x, name, scale_search=search),
            quantize(x.contiguous(), name, scale_search=search),
        )


@pytest.mark.parametrize("columns", [1, 15, 17, 3420 // 20, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_a_ragged_row_is_padded_with_zeros(implementation: str, name: str, columns: int) -> None:
    x = make_values(7, columns)
    t = quantize(x, name)
    padded = torch.nn.functional.pad(x, (0, t.format.padded_columns(columns) - columns))
    whole = quantize(padded, name)
    assert torch.equal(t.data, whole.data)
    assert (unpack(t)[:, columns:] == 0).all()
    assert dequantize(t).shape == x.shape


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0)])
@pytest.mark.parametrize("search", ["absmax", "optimal"])
@pytest.mark.parametrize("name", FORMATS)
def test_empty_tensors_give_empty_results(
    implementation: str, name: str, search: str, shape: tuple[int, int]
) -> None:
    t, counts = quantize_with_counts(torch.empty(shape), name, scale_search=search)
    assert t.shape == shape
    assert counts == BlockCounts(0, 0, 0, 0)
    assert dequantize(t).shape == decode_codes(t).shape == shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_inf_are_refused_with_their_number(
    implementation: str, name: str, bad: float
) -> None:
    x = make_values(4, 128)
    x[1, 3] = x[2, 70] = bad
    num_nan = 2 if bad != bad else 0
    with pytest.raises(FormatError, match=f"x contains NaN/Inf: {num_nan} NaN and {2 - num_nan}"):
        quantize(x, name)
    with pytest.raises(FormatError, match="x contains NaN/Inf"):
        quantize(x, name, scale_search="optimal")


def test_the_activation_is_named_when_it_holds_nan(implementation: str) -> None:
    z = torch.full((2, 64), float("nan"))
    with pytest.raises(FormatError, match="z contains NaN/Inf: 128 NaN"):
        quantize_activation(z, get_activation_format("int4"))


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(FormatError, match="format 'fp4' is unknown; use one of: nvfp4"):
        quantize(x, "fp4")
    with pytest.raises(FormatError, match=r"x: dtype torch\.float64, wanted float32"):
        quantize(x.double(), "nvfp4")
    with pytest.raises(FormatError, match=r"x: shape \(2, 8, 8\), wanted \[rows, columns\]"):
        quantize(x.reshape(2, 8, 8), "nvfp4")
    with pytest.raises(FormatError, match="scale_search 'best' is unknown"):
        quantize(x, "nvfp4", scale_search="best")
    with pytest.raises(FormatError, match="'torchao' describes NVFP4 alone; for int4 use"):
        quantize(x, "int4", mode="torchao")
    with pytest.raises(FormatError, match="'optimal' is halfbyte's own, but mode is 'torchao'"):
        quantize(x, "nvfp4", mode="torchao", scale_search="optimal")
    with pytest.raises(FormatError, match="mode 'tao' is unknown; use one of: halfbyte"):
        quantize(x, "nvfp4", mode="tao")
    with pytest.raises(FormatError, match="e8m0_rounding 'up' is unknown"):
        quantize(x, "mxfp4", e8m0_rounding="up")
    with pytest.raises(FormatError, match=r"scale_dtype torch\.float64"):
        quantize(x, "int4", scale_dtype=torch.float64)


def test_global_scales_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 64)
    with pytest.raises(FormatError, match="int4 has no global_scale"):
        quantize(x, "int4", global_scale=torch.tensor(1.0))
    with pytest.raises(FormatError, match=r"global_scale: torch\.float32 \(1,\), wanted a float32"):
        quantize(x, "nvfp4", global_scale=torch.ones(1))
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(FormatError, match="wanted positive and finite"):
            quantize(x, "nvfp4", global_scale=torch.tensor(bad))
    with pytest.raises(FormatError, match="'nvfp4_static' needs global_scale"):
        quantize_activation(x, get_activation_format("nvfp4_static"))
    with pytest.raises(FormatError, match="'int4' takes no global_scale"):
        quantize_activation(x, get_activation_format("int4"), torch.tensor(1.0))


def test_the_global_scale_in_the_result_is_not_the_callers_tensor() -> None:
    g = torch.tensor(0.5)
    t = quantize(torch.ones(1, 16), "nvfp4", global_scale=g)
    g.fill_(3.0)
    assert float(t.global_scale) == 0.5


def test_gradients_do_not_flow() -> None:
    t = quantize(torch.ones(1, 16, requires_grad=True), "nvfp4")
    assert not dequantize(t).requires_grad


def test_counts_add_up() -> None:
    assert BlockCounts(4, 1, 2, 1) + BlockCounts(2, 0, 1, 0) == BlockCounts(6, 1, 3, 1)


def test_counts_name_what_happened_to_each_block(implementation: str) -> None:
    x = torch.zeros(1, 6 * 16)
    x[0, 0] = 6.0
    x[0, 16] = 3000.0  # 500 > 448
    x[0, 32] = 1e-3  # a scale of 1.7e-4, below half of 2**-9
    x[0, 48] = 2688.0  # exactly 448
    x[0, 64] = 6 * 2.0**-9
    _, counts = quantize_with_counts(x, "nvfp4_one_level")
    assert counts == BlockCounts(blocks=6, saturated=1, flushed=1, zero=1)
    y = torch.zeros(1, 5 * 64)
    y[0, 0], y[0, 64], y[0, 128], y[0, 192] = 7.0, 7 * 65505.0, 7 * 2.0**-26, 7 * 65504.0
    t, counts = quantize_with_counts(y, "int4")
    assert counts == BlockCounts(blocks=5, saturated=1, flushed=1, zero=1)
    assert t.scales.tolist() == [[1.0, 65504.0, 1.0, 65504.0, 1.0]]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 150),
    name=st.sampled_from(sorted(FORMATS)),
    seed=st.integers(0, 1000),
)
def test_no_value_moves_further_than_half_a_step(
    rows: int, columns: int, name: str, seed: int
) -> None:
    x = make_values(rows, columns, seed)
    t = quantize(x, name, e8m0_rounding="rceil")
    block = t.format.block_size
    scale = decode_scales(t).double().repeat_interleave(block, 1)[:, :columns]
    # Half the widest gap between neighbours of each element; or, where the block scale was rounded
    # down (to zero in the worst case), what lies beyond the element's largest number.
    gaps = {"e2m1": 2.0, "e2m3": 0.5, "e3m2": 4.0, "e4m3": 32.0, "e5m2": 8192.0}
    half_step = gaps.get(t.format.element, 1.0) / 2
    largest = get_element(t.format.element).max_value
    x = x.double().clamp(min=0.0) if t.format.element == "uint4" else x.double()
    error = (dequantize(t).double() - x).abs()
    beyond = x.abs() - largest * scale
    assert (error <= torch.maximum(half_step * scale, beyond) * (1 + 1e-6)).all()


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["nvfp4", "nvfp4_one_level", *MX, "int4", "uint4"]),
    seed=st.integers(0, 1000),
)
def test_quantizing_a_dequantized_tensor_changes_nothing(name: str, seed: int) -> None:
    x = make_values(3, 128, seed)
    first = quantize(x, name)
    again = quantize(dequantize(first), name, global_scale=first.global_scale)
    same_scale = first.scales.view(torch.uint8) == again.scales.view(torch.uint8)
    same_scale = same_scale.unflatten(1, (first.scales.shape[1], -1)).all(-1)
    assert same_scale.float().mean() > 0.9  # a saturated or a tiny scale may move once
    wide = same_scale.repeat_interleave(first.format.block_size, 1)
    assert np.array_equal(unpack(first)[wide.numpy()], unpack(again)[wide.numpy()])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(["nvfp4_one_level", "int4"]))
def test_counts_equal_a_count_of_the_result(seed: int, name: str) -> None:
    exponents = torch.randint(-30, 20, (8, 1), generator=torch.Generator().manual_seed(seed))
    x = torch.ldexp(make_values(8, 128, seed), exponents)
    x[0] = 0.0
    t, counts = quantize_with_counts(x, name)
    amax = x.unflatten(1, (-1, t.format.block_size)).abs().amax(-1)
    largest, least = (448, 2.0**-10) if name == "nvfp4_one_level" else (65504, 2.0**-25)
    wanted = amax.double() / (6 if name == "nvfp4_one_level" else 7)
    assert counts == BlockCounts(
        blocks=amax.numel(),
        saturated=int((wanted > largest).sum()),
        flushed=int(((wanted <= least) & (amax > 0)).sum()),
        zero=int((amax == 0).sum()),
    )
    is_gone = dequantize(t).unflatten(1, (-1, t.format.block_size)).eq(0).all(-1)
    assert int(is_gone.sum()) >= counts.zero + counts.flushed


def test_large_tensors_are_cut_into_chunks_without_a_seam() -> None:
    x = make_values(700, 1000)
    t = quantize(x, "mxfp6_e2m3")  # no compiled loop: several chunks
    for rows in (slice(0, 1), slice(520, 530), slice(699, 700)):
        assert torch.equal(quantize(x[rows], "mxfp6_e2m3").data, t.data[rows])
        assert torch.equal(dequantize(t)[rows], dequantize(quantize(x[rows], "mxfp6_e2m3")))
