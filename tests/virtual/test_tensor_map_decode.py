"""Tensor maps decoded: what was encoded comes back."""

import pytest

from halfbyte.errors import TensorMapError
from halfbyte.virtual.tensor_map import (
    ELEMENT_TYPES,
    Im2colBox,
    TensorBox,
    TensorLayout,
    encode_tensor_map,
)
from halfbyte.virtual.tensor_map_decode import decode_tensor_map

LAYOUTS = [
    (TensorLayout("u8", (256, 96), (512,)), TensorBox((128, 32), (1, 1), swizzle=128)),
    (TensorLayout("f32", (64, 8, 4), (2**36, 2**38)), TensorBox((8, 2, 4), (1, 2, 1))),
    (TensorLayout("b4x16", (256, 256), (128,)), TensorBox((256, 128), (1, 1), swizzle=128)),
    (TensorLayout("b4x16_p64", (256, 256), (128,)), TensorBox((128, 64), (1, 1), swizzle=128)),
    (TensorLayout("u16", (256, 4, 3, 1), (512, 2048, 6144)), TensorBox((256, 4, 1, 1), (1,) * 4)),
    (TensorLayout("bf16", (64, 9), (128,)), TensorBox((32, 9), (1, 1), swizzle=64, fill="nan")),
    (
        TensorLayout("tf32", (32, 32, 2, 2, 2), (128, 4096, 8192, 16384)),
        TensorBox((32, 8, 1, 1, 1), (1,) * 5, swizzle=128, atom="32"),
    ),
    (TensorLayout("u8", (16, 8, 4), (64, 512)), TensorBox((16, 8, 2), (1,) * 3, interleave=16)),
]


@pytest.mark.parametrize(("layout", "box"), LAYOUTS, ids=lambda value: getattr(value, "dtype", ""))
def test_decoding_returns_what_was_encoded(layout: TensorLayout, box: TensorBox) -> None:
    decoded = decode_tensor_map(encode_tensor_map(0x7000_1220, layout, box))
    assert decoded.address == 0x7000_1220
    assert decoded.layout == layout
    assert decoded.box == box


@pytest.mark.parametrize("dtype", sorted(ELEMENT_TYPES))
def test_every_element_type_comes_back_with_its_name(dtype: str) -> None:
    layout = TensorLayout(dtype, (128, 16), (1024,))
    encoded = encode_tensor_map(0x100, layout, TensorBox((128, 16), (1, 1)))
    assert decode_tensor_map(encoded).layout.dtype == dtype


def test_bytes_of_a_box_count_packed_rows_and_padded_ones() -> None:
    box = TensorBox((128, 64), (1, 1))
    packed = encode_tensor_map(0x100, TensorLayout("b4x16", (256, 64), (128,)), box)
    padded = encode_tensor_map(0x100, TensorLayout("b4x16_p64", (256, 64), (128,)), box)
    assert decode_tensor_map(packed).box_bytes == 64 * 64
    assert decode_tensor_map(padded).box_bytes == 128 * 64


def test_bytes_that_are_no_tensor_map_are_refused() -> None:
    with pytest.raises(TensorMapError, match="12 bytes"):
        decode_tensor_map(bytes(12))
    with pytest.raises(TensorMapError, match="not that of a tensor map"):
        decode_tensor_map(bytes(128))
    column = Im2colBox((0,), (0,), channels=16, pixels=8)
    layout = TensorLayout("u8", (16, 8, 4), (16, 128))
    with pytest.raises(TensorMapError, match="im2col"):
        decode_tensor_map(encode_tensor_map(0x100, layout, TensorBox(im2col=column)))
