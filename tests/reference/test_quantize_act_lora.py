"""Activation quantization against numbers derived by hand, and against `formats`."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ACTIVATION_FORMATS, ActivationFormat, get_activation_format
from halfbyte.reference.decode import make_value_table, read_bytes, unpack_codes
from halfbyte.reference.quantize_act_lora import (
    ReferenceActivation,
    dequantize_activation,
    encode_nearest_even,
    quantize_act_lora,
    quantize_rows,
)
from tests.random_linears import LinearShape, make_input, make_linear


def quantize(values: list[float], name: str, width: int = 16) -> ReferenceActivation:
    row = np.zeros((1, width), dtype=np.float32)
    row[0, : len(values)] = values
    return quantize_rows(row, get_activation_format(name))


def test_e2m1_ties_go_to_the_even_code() -> None:
    values = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    assert encode_nearest_even(values, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode_nearest_even(-values, "e2m1").tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_keeps_the_sign_of_zero_and_saturates() -> None:
    values = np.array([-0.0, -0.2, 7.0, -1e30, np.inf], dtype=np.float32)
    assert encode_nearest_even(values, "e2m1").tolist() == [8, 8, 7, 15, 7]


def test_int4_rounds_half_to_even_and_clamps_to_two_s_complement() -> None:
    values = np.array([0.5, 1.5, -0.5, -1.5, 7.4, 9.0, -9.0], dtype=np.float32)
    assert encode_nearest_even(values, "int4").tolist() == [0, 2, 0, 14, 7, 7, 8]
    assert encode_nearest_even(values, "uint4").tolist() == [0, 2, 0, 0, 7, 9, 0]


def test_every_table_value_encodes_to_itself() -> None:
    for element in ("e2m1", "int4", "uint4"):
        table = make_value_table(element).astype(np.float32)
        assert encode_nearest_even(table, element).tolist() == list(range(16))


def test_block_of_1_to_6_has_scale_one() -> None:
    # amax 6 -> s = 1.0 = byte 0x38; values are their own codes
    result = quantize([0.5, 1.0, -1.5, 2.0, 3.0, -4.0, 6.0], "nvfp4_one_level")
    assert result.scale_bytes is not None
    assert result.scale_bytes.tolist() == [[0x38]]
    assert result.codes[0, :7].tolist() == [1, 2, 11, 4, 5, 14, 7]
    assert (result.saturated, result.flushed) == (0, 0)


def test_one_level_flushes_a_uniform_block_of_0_005() -> None:
    # 0.005 / 6 = 0.000833 is below half of E4M3's smallest number, 2^-10 = 0.000977
    result = quantize([0.005] * 16, "nvfp4_one_level")
    assert result.flushed == 1
    assert not dequantize_activation(result).any()


def test_two_level_keeps_a_uniform_block_of_0_005() -> None:
    result = quantize([0.005] * 16, "nvfp4_dynamic")
    assert result.scale_bytes is not None
    assert result.scale_bytes.tolist() == [[0x7E]]  # 448
    assert result.flushed == 0
    np.testing.assert_allclose(dequantize_activation(result), 0.005, rtol=1e-6)


def test_one_level_saturates_at_2688_and_reports_it() -> None:
    result = quantize([5000.0] + [1.0] * 15, "nvfp4_one_level")
    assert result.saturated == 1
    assert dequantize_activation(result)[0].tolist() == [2688.0] + [0.0] * 15
    two_level = quantize([5000.0] + [1.0] * 15, "nvfp4_dynamic")
    np.testing.assert_allclose(
        dequantize_activation(two_level)[0], [5000.0] + [0.0] * 15, rtol=1e-6
    )


def test_unrounded_divisor_differs_from_stored_divisor_where_the_scale_rounds() -> None:
    # amax 6.3 -> s = 1.05; E4M3 neighbours 1.0 and 1.125: stored 1.0 (0x38).
    # 1.28 / 1.0 = 1.28 -> 1.5 (code 3); 1.28 / 1.05 = 1.219 -> 1.0 (code 2).
    stored = quantize([6.3, 1.28], "nvfp4_one_level")
    unrounded = quantize([6.3, 1.28], "nvfp4_nunchaku")
    assert stored.codes[0, :2].tolist() == [7, 3]
    assert unrounded.codes[0, :2].tolist() == [7, 2]
    assert stored.scales.tolist() == unrounded.scales.tolist() == [[1.0]]


def test_all_zero_block_stores_scale_zero_and_codes_zero_even_for_minus_zero() -> None:
    for name in ("nvfp4_nunchaku", "nvfp4_dynamic", "mxfp4"):
        result = quantize([-0.0] * 32, name, width=32)
        assert result.scale_bytes is not None
        assert not result.scale_bytes.any()
        assert not result.codes.any()
        assert (result.saturated, result.flushed) == (0, 0)


def test_int4_scale_is_float16_and_zero_block_has_scale_one() -> None:
    # amax 7 * 0.1 -> s = fp16(0.1) = 0.0999755859375; 0.35 / s = 3.5009 -> 4
    result = quantize([0.7, 0.35, -0.05], "int4", width=128)
    assert result.scales.tolist() == [[0.0999755859375, 1.0]]
    assert result.codes[0, :3].tolist() == [7, 4, 15]  # -0.05 / s = -0.5001 -> -1
    assert not result.codes[0, 64:].any()


def test_int4_scale_saturates_at_the_largest_float16() -> None:
    result = quantize([1e6], "int4", width=64)
    assert result.scales.tolist() == [[65504.0]]
    assert result.saturated == 1
    assert dequantize_activation(result)[0, 0] == 7 * 65504.0


def test_float_scale_that_rounds_to_zero_is_one_and_counted_as_flushed() -> None:
    # 7e-8 / 7 = 1e-8 is below half of float16's smallest number, 2^-25 = 2.98e-8
    result = quantize([7e-8], "int4", width=64)
    assert result.scales.tolist() == [[1.0]]
    assert result.flushed == 1
    assert not result.codes.any()


def test_uint4_ignores_negative_values() -> None:
    result = quantize([15.0, -3.0, 7.5], "uint4_shifted", width=64)
    assert result.scales.tolist() == [[1.0]]
    assert result.codes[0, :3].tolist() == [15, 0, 8]


@pytest.mark.parametrize(
    ("amax", "byte", "dequantized"),
    [(1.75, 125, 1.5), (3.0001, 126, 3.0), (3.5, 126, 3.0), (6.5, 127, 6.0), (7.0, 127, 6.0)],
)
def test_mxfp4_floor_rule(amax: float, byte: int, dequantized: float) -> None:
    result = quantize([amax], "mxfp4", width=32)
    assert result.scale_bytes is not None
    assert result.scale_bytes.tolist() == [[byte]]
    assert dequantize_activation(result)[0, 0] == dequantized


def test_shift_is_added_before_smooth_and_low_rank_sees_raw_x() -> None:
    linear = make_linear(LinearShape(n=2, k=64, rank=3), ("int4", "uint4_shifted"))
    x = torch.full((1, 64), 0.5)
    result = quantize_act_lora(x, linear)
    assert linear.smooth is not None
    assert linear.lora_down is not None
    wanted = (np.float32(0.5) + np.float32(0.171875)) / linear.smooth.numpy()
    step = result.scales.max()
    assert np.abs(dequantize_activation(result)[0] - wanted).max() <= 0.5 * step * 1.001
    assert result.lora_act is not None
    np.testing.assert_allclose(result.lora_act[0], 0.5 * linear.lora_down.double().sum(1).numpy())


def test_columns_are_padded_with_zero_codes() -> None:
    linear = make_linear(LinearShape(n=2, k=20, rank=0))
    result = quantize_act_lora(make_input(3, 20), linear)
    assert result.codes.shape == (3, 32)
    assert not result.codes[:, 20:].any()
    assert dequantize_activation(result).shape == (3, 20)


@pytest.mark.parametrize("name", ["nvfp4_nunchaku", "nvfp4_dynamic", "mxfp4", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_gives_its_block_a_nan_scale_and_changes_nothing_else(
    name: str, value: float
) -> None:
    z = make_input(3, 128).numpy()
    plain = quantize_rows(z, get_activation_format(name))
    size = plain.block_format.block_size
    z[2, :size] = 0.0  # what is left of the spoilt block does not matter
    z[2, 5] = value
    spoilt = quantize_rows(z, get_activation_format(name))
    values = dequantize_activation(spoilt)
    assert np.isnan(values[2, :size]).all()
    if name != "nvfp4_dynamic":  # there g follows the largest finite value
        np.testing.assert_array_equal(values[:2], dequantize_activation(plain)[:2])
        np.testing.assert_array_equal(values[2, size:], dequantize_activation(plain)[2, size:])
    if spoilt.scale_bytes is not None:
        assert spoilt.scale_bytes[2, 0] in (0x7F, 0xFF)
    assert not spoilt.codes[2, :size].any()


def test_wrong_width_and_weight_only_are_named_errors() -> None:
    with pytest.raises(FormatError, match=r"\(2, 31\), wanted \[M, 32\]"):
        quantize_act_lora(make_input(2, 31), make_linear(LinearShape(n=2, k=32)))
    with pytest.raises(FormatError, match="weight-only"):
        quantize_act_lora(make_input(2, 32), make_linear(LinearShape(2, 32), ("nvfp4", None)))


def assert_same_bytes_as_formats(z: torch.Tensor, act: ActivationFormat) -> None:
    from halfbyte.formats.quantize import quantize_activation

    static = torch.tensor(0.0021) if act.global_scale == "static" else None
    ours = quantize_rows(z.numpy(), act, None if static is None else np.float32(static.item()))
    theirs, counts = quantize_activation(z, act, static)
    np.testing.assert_array_equal(unpack_codes(read_bytes(theirs.data), 4), ours.codes)
    if ours.scale_bytes is not None:
        np.testing.assert_array_equal(read_bytes(theirs.scales), ours.scale_bytes)
    else:
        np.testing.assert_array_equal(theirs.scales.double().numpy(), ours.scales)
    if theirs.global_scale is not None:
        assert theirs.global_scale.item() == ours.global_scale
    assert (counts.saturated, counts.flushed) == (ours.saturated, ours.flushed)


@pytest.mark.parametrize("name", ACTIVATION_FORMATS)
@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e3, 1e-5, 1e-9, 1e-40, 1e30])
def test_formats_quantize_activation_gives_the_same_bytes(name: str, magnitude: float) -> None:
    z = make_input(17, 200, seed=int(abs(math.log10(magnitude)))) * magnitude
    z[2, :16] = -0.0
    z[3] = 0.0
    assert_same_bytes_as_formats(z, get_activation_format(name))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(ACTIVATION_FORMATS)))
def test_formats_and_reference_agree_on_drawn_blocks(data: st.DataObject, name: str) -> None:
    # multiples of 1/64 make ties frequent
    columns = data.draw(st.integers(1, 70))
    numerators = data.draw(st.lists(st.integers(-512, 512), min_size=columns, max_size=columns))
    z = torch.tensor([numerators], dtype=torch.float32) / 64
    assert_same_bytes_as_formats(z, get_activation_format(name))
