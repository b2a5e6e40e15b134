"""The E8M0 scale: its bytes against ml_dtypes, its roundings against numbers derived by hand."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.e8m0 import E8M0_NAN, E8M0_ROUNDINGS, choose_e8m0, decode_e8m0
from halfbyte.formats.elements import ELEMENTS
from halfbyte.formats.quantize import dequantize, quantize

MX_ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")


def test_every_byte_decodes_as_ml_dtypes_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    wanted = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = decode_e8m0(torch.from_numpy(codes)).numpy()
    assert np.isnan(got[E8M0_NAN])
    assert np.isnan(wanted[E8M0_NAN])
    assert np.array_equal(got[:E8M0_NAN].view(np.uint32), wanted[:E8M0_NAN].view(np.uint32))


def test_byte_zero_is_a_subnormal_and_byte_255_is_nan() -> None:
    scales = decode_e8m0(torch.tensor([0, 255], dtype=torch.uint8)).tolist()
    assert scales[0] == 2.0**-127 != 0.0
    assert math.isnan(scales[1])


@pytest.mark.parametrize(
    ("rounding", "bytes_", "maxima"),
    [
        ("floor", [125, 126, 126, 127, 127], [1.5, 3.0, 3.0, 6.0, 6.0]),
        ("ceil", [126, 127, 127, 128, 128], [2.0, 3.0, 4.0, 6.0, 8.0]),
        ("even", [126, 126, 127, 127, 128], [2.0, 3.0, 4.0, 6.0, 8.0]),
    ],
)
def test_mxfp4_rounds_its_scale_as_named(
    implementation: str, rounding: str, bytes_: list[int], maxima: list[float]
) -> None:
    x = torch.full((5, 32), 0.001)
    x[:, 7] = torch.tensor([1.75, 3.0001, 3.5, 6.5, 7.0])
    quantized = quantize(x, "mxfp4", e8m0_rounding=rounding)
    assert quantized.scales.view(torch.uint8).flatten().tolist() == bytes_
    assert dequantize(quantized)[:, 7].tolist() == maxima


@pytest.mark.parametrize(("rounding", "scale", "wanted"), [("floor", 2, 896), ("ceil", 4, 960)])
def test_mxfp8_floor_saturates_where_ceil_does_not(
    rounding: str, scale: float, wanted: float
) -> None:
    x = torch.ones(1, 32)
    x[0, :2] = torch.tensor([959.5632, 957.0])
    quantized = quantize(x, "mxfp8_e4m3", e8m0_rounding=rounding)
    assert decode_e8m0(quantized.scales).item() == scale
    assert dequantize(quantized)[0, 1].item() == wanted


def exact_exponent(amax: float, name: str, rounding: str) -> int:
    """The definition in exact arithmetic, by frexp: amax = m * 2**e with 0.5 <= m < 1."""
    element = ELEMENTS[name]
    if rounding == "rceil":
        mantissa, exponent = math.frexp(float(np.float32(amax) / np.float32(element.max_value)))
        return exponent - 1 if mantissa == 0.5 else exponent
    mantissa, exponent = math.frexp(amax)
    if rounding == "ceil":
        exponent += 0 if mantissa == 0.5 else 1
    if rounding == "even":
        step = 2.0 ** -(element.mantissa_bits + 1)
        exponent += 1 if math.floor(mantissa / step + 0.5) * step >= 1 else 0
    return exponent - 1 - element.max_exponent


@given(
    amax=st.floats(2.0**-100, 2.0**100, width=32),
    name=st.sampled_from(MX_ELEMENTS),
    rounding=st.sampled_from(E8M0_ROUNDINGS),
)
def test_roundings_equal_their_definition(amax: float, name: str, rounding: str) -> None:
    byte = int(choose_e8m0(torch.tensor([amax]), name, rounding))
    assert byte - 127 == exact_exponent(amax, name, rounding)


@pytest.mark.parametrize("rounding", E8M0_ROUNDINGS)
def test_the_ends_of_the_range_are_clamped(rounding: str) -> None:
    amax = torch.tensor([0.0, 2.0**-149, 2.0**-126, 3.4028235e38, float("inf"), float("nan")])
    chosen = choose_e8m0(amax, "e2m1", rounding).tolist()
    assert chosen[:3] == [0, 0, 0]
    assert chosen[3] in (252, 253)  # 2**128 / 8 or / 4
    assert chosen[4:] == [255, 255]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(FormatError, match="'up' is unknown; use one of: floor, ceil, even, rceil"):
        choose_e8m0(torch.ones(1), "e2m1", "up")
    with pytest.raises(FormatError, match=r"amax: dtype torch\.float64"):
        choose_e8m0(torch.ones(1, dtype=torch.float64), "e2m1")
    with pytest.raises(FormatError, match=r"scales: dtype torch\.int32"):
        decode_e8m0(torch.ones(1, dtype=torch.int32))
