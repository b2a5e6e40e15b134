"""Element codecs against ml_dtypes, an independent implementation of the same formats."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.elements import (
    ELEMENTS,
    decode_elements,
    decode_scalar,
    encode_elements,
    encode_scalar,
    get_element,
)

FLOATS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
INTEGERS = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}


def all_codes(name: str) -> np.ndarray:
    return np.arange(1 << ELEMENTS[name].bits, dtype=np.uint8)


def encode_by_ml_dtypes(values: np.ndarray, name: str) -> np.ndarray:
    # Its casts do not saturate; NaN passes through np.clip.
    largest = float(ml_dtypes.finfo(FLOATS[name]).max)
    return np.clip(values, -largest, largest).astype(FLOATS[name]).view(np.uint8)


def dense_values(name: str) -> np.ndarray:
    """Every number, every tie, their float32 neighbours, float32 extremes and random bits."""
    numbers = all_codes(name).view(FLOATS[name]).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = (numbers[:-1] + numbers[1:]) / 2
    largest = numbers[-1]
    beyond = largest * np.array([1.01, 1.0625, 1.125, 1.2, 2.0])
    exact = np.concatenate([numbers, ties, beyond, -beyond]).astype(np.float32)
    limits = np.finfo(np.float32)
    extremes = np.array(
        [limits.max, limits.tiny, limits.smallest_subnormal, 1e-30, 0.0, np.inf], np.float32
    )
    random_bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint64)
    random = random_bits.astype(np.uint32).view(np.float32)
    near = np.random.default_rng(1).normal(0, largest / 4, 200_000).astype(np.float32)
    values = np.concatenate(
        [
            exact,
            np.nextafter(exact, np.float32(np.inf)),
            np.nextafter(exact, np.float32(-np.inf)),
            extremes,
            -extremes,
            random[~np.isnan(random)],
            near,
        ]
    )
    return values.astype(np.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_decodes_as_ml_dtypes_says(name: str) -> None:
    codes = all_codes(name)
    wanted = codes.view(FLOATS[name]).astype(np.float32)
    got = decode_elements(torch.from_numpy(codes), name).numpy()
    is_nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(got), is_nan)
    assert np.array_equal(got[~is_nan].view(np.uint32), wanted[~is_nan].view(np.uint32))


@pytest.mark.parametrize("name", INTEGERS)
def test_every_integer_code_decodes_as_ml_dtypes_says(name: str) -> None:
    codes = all_codes(name)
    wanted = codes.view(INTEGERS[name]).astype(np.float32)
    assert np.array_equal(decode_elements(torch.from_numpy(codes), name).numpy(), wanted)


@pytest.mark.parametrize("name", FLOATS)
def test_encoding_equals_ml_dtypes_at_ties_extremes_and_at_random(name: str) -> None:
    values = dense_values(name)
    got = encode_elements(torch.from_numpy(values), name).numpy()
    wanted = encode_by_ml_dtypes(values, name)
    wrong = np.flatnonzero(got != wanted)
    assert wrong.size == 0, [(values[i], got[i], wanted[i]) for i in wrong[:5]]


@pytest.mark.parametrize("name", FLOATS)
def test_every_number_encodes_to_its_own_code(name: str) -> None:
    codes = torch.from_numpy(all_codes(name))
    numbers = decode_elements(codes, name)
    is_finite = numbers.isfinite()
    assert torch.equal(encode_elements(numbers[is_finite], name), codes[is_finite])


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_round_half_to_even_and_clamp(name: str) -> None:
    element = ELEMENTS[name]
    values = np.arange(-40, 81, dtype=np.float32) / 4
    wanted = np.clip(np.rint(values), element.min_value, element.max_value)
    got = decode_elements(encode_elements(torch.from_numpy(values), name), name)
    assert np.array_equal(got.numpy(), wanted)


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode_elements(ties, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode_elements(-ties, "e2m1").tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_minus_zero_and_a_small_negative_keep_their_sign() -> None:
    codes = encode_elements(torch.tensor([-0.0, -0.2]), "e2m1")
    assert codes.tolist() == [8, 8]
    assert decode_elements(codes, "e2m1").eq(0.0).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_nan_encodes_to_a_nan_code(name: str) -> None:
    code = encode_elements(torch.tensor([float("nan")]), name)
    assert decode_elements(code, name).isnan().all()


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "int4", "uint4"])
def test_nan_is_refused_where_the_element_has_none(name: str) -> None:
    with pytest.raises(FormatError, match=f"1 NaN, but {name} has no NaN"):
        encode_elements(torch.tensor([1.0, float("nan")]), name)


@pytest.mark.parametrize("name", FLOATS)
def test_infinity_saturates_to_the_largest_number(name: str) -> None:
    codes = encode_elements(torch.tensor([float("inf"), float("-inf")]), name)
    largest = ELEMENTS[name].max_value
    assert decode_elements(codes, name).tolist() == [largest, -largest]


@pytest.mark.parametrize("name", ELEMENTS)
def test_scalars_agree_with_tensors(name: str) -> None:
    for value in (0.0, 0.7, 3.5, 100.0):
        code = encode_scalar(value, name)
        assert code == int(encode_elements(torch.tensor([value]), name))
        assert decode_scalar(code, name) == float(
            decode_elements(torch.tensor([code], dtype=torch.uint8), name)
        )


@pytest.mark.parametrize("name", FLOATS)
def test_strided_values_encode_as_their_copy(name: str) -> None:
    values = torch.randn(16, 24).t()[::2]
    assert torch.equal(encode_elements(values, name), encode_elements(values.contiguous(), name))


@given(value=st.floats(width=32, allow_nan=False), name=st.sampled_from(sorted(FLOATS)))
def test_the_nearest_number_is_chosen(value: float, name: str) -> None:
    numbers = all_codes(name).view(FLOATS[name]).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    clamped = float(np.clip(value, numbers.min(), numbers.max()))
    assert abs(decode_scalar(encode_scalar(value, name), name) - clamped) == np.min(
        np.abs(numbers - clamped)
    )


def test_max_exponent_is_that_of_the_largest_power_of_two() -> None:
    exponents = {name: ELEMENTS[name].max_exponent for name in FLOATS}
    assert exponents == {"e2m1": 2, "e2m3": 2, "e3m2": 4, "e4m3": 8, "e5m2": 15}


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(FormatError, match="element 'e9m9' is unknown; use one of: e2m1"):
        get_element("e9m9")
    with pytest.raises(FormatError, match=r"values: dtype torch\.float64, wanted torch\.float32"):
        encode_elements(torch.zeros(2, dtype=torch.float64), "e2m1")
    with pytest.raises(FormatError, match=r"codes: dtype torch\.int64, wanted torch\.uint8"):
        decode_elements(torch.zeros(2, dtype=torch.int64), "e2m1")
    with pytest.raises(FormatError, match="byte 0x42 is no 4-bit e2m1 code; unpack"):
        decode_elements(torch.tensor([0x42], dtype=torch.uint8), "e2m1")
