"""The decode tables against hand-derived numbers and against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.reference.decode import (
    decode_code_values,
    dequantize,
    make_value_table,
    read_floats,
    unpack_codes,
)

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int4": ml_dtypes.int4,
    "uint4": ml_dtypes.uint4,
}


@pytest.mark.parametrize("element", ML_DTYPES)
def test_value_table_equals_ml_dtypes_for_every_code(element: str) -> None:
    table = make_value_table(element)
    codes = np.arange(len(table), dtype=np.uint8)
    peer = codes.view(ML_DTYPES[element]).astype(np.float64)
    np.testing.assert_array_equal(table, peer)
    np.testing.assert_array_equal(
        np.signbit(table[~np.isnan(table)]), np.signbit(peer[~np.isnan(peer)])
    )


def test_e2m1_table_is_the_published_one() -> None:
    table = make_value_table("e2m1")
    assert table[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert np.signbit(table[8])
    assert table[8] == 0.0
    assert table[15] == -6.0


def test_e4m3_and_e8m0_landmarks() -> None:
    e4m3 = make_value_table("e4m3")
    assert (e4m3[0x38], e4m3[0x7E], e4m3[0x01]) == (1.0, 448.0, 2.0**-9)
    assert np.isnan(e4m3[0x7F])
    e8m0 = make_value_table("e8m0")
    assert e8m0[0] == 2.0**-127  # not zero
    assert e8m0[127] == 1.0
    assert np.isnan(e8m0[255])  # not infinity


def test_low_nibble_is_the_even_column() -> None:
    # codes of [1.0, 2.0] are 2 and 4: low nibble first gives 0x42
    codes = unpack_codes(np.array([[0x42]], dtype=np.uint8), 4)
    assert codes.tolist() == [[2, 4]]


def test_six_bit_codes_are_a_little_endian_bit_stream() -> None:
    # codes 1, 2, 3, 4: 1 | 2<<6 | 3<<12 | 4<<18 = 0x103081
    codes = unpack_codes(np.array([[0x81, 0x30, 0x10]], dtype=np.uint8), 6)
    assert codes.tolist() == [[1, 2, 3, 4]]


def test_linear_byte_string_unpacks_to_the_codes_it_was_made_of() -> None:
    data = np.frombuffer(bytes.fromhex("103254761032547698badcfe98badcfe"), dtype=np.uint8)
    wanted = [*range(8), *range(8), *range(8, 16), *range(8, 16)]
    assert unpack_codes(data[None], 4)[0].tolist() == wanted


def test_dequantize_multiplies_code_block_scale_and_global_scale() -> None:
    data = torch.full((1, 8), 0x99, dtype=torch.uint8)  # sixteen codes 9 = -0.5
    data[0, 0] = 0x74  # codes 4 and 7: 2.0 and 6.0
    scales = torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn)  # 2.0
    tensor = BlockScaledTensor(get_format("nvfp4"), data, scales, torch.tensor(0.25), 3)
    assert dequantize(tensor).tolist() == [[1.0, 3.0, -0.25]]  # padding columns are cut
    assert decode_code_values(tensor).shape == (1, 16)


def test_e8m0_scale_byte_zero_is_a_tiny_scale_and_255_is_nan() -> None:
    data = torch.full((1, 32), 0x38, dtype=torch.uint8)  # E4M3 1.0
    for byte, wanted in ((0, 2.0**-127), (255, float("nan"))):
        scales = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensor = BlockScaledTensor(get_format("mxfp8_e4m3"), data, scales, None, 32)
        np.testing.assert_array_equal(dequantize(tensor), np.full((1, 32), wanted))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_read_floats_is_exact(dtype: torch.dtype) -> None:
    values = torch.tensor([[1.5, -0.0, 3.0e-5], [65504.0, -2.25, 1.0e-7]]).to(dtype)
    np.testing.assert_array_equal(read_floats(values), values.double().numpy())


def test_read_floats_refuses_a_byte_float() -> None:
    with pytest.raises(FormatError, match="float8_e4m3fn"):
        read_floats(torch.zeros(2, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
def test_dequantize_of_an_empty_tensor_is_empty(shape: tuple[int, int]) -> None:
    rows, columns = shape
    data = torch.empty((rows, columns // 2), dtype=torch.uint8)
    scales = torch.empty((rows, columns // 16), dtype=torch.float8_e4m3fn)
    tensor = BlockScaledTensor(get_format("nvfp4_one_level"), data, scales, None, columns)
    assert dequantize(tensor).shape == shape
