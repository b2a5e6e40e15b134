"""Scale layouts: offsets pinned by hand, round trips, and padding that is always zero."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats.scale_layout import (
    SCALE_LAYOUTS,
    pack_scales,
    padded_scale_shape,
    scale_offset,
    unpack_scales,
)

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float16, torch.float32)


def make_scales(rows: int, columns: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    width = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(0, 256, (rows * columns * width,), dtype=torch.uint8)
    return bits.view(dtype).reshape(rows, columns)


def bits_of(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().view(torch.uint8).tolist()


def test_swizzled_offsets_are_those_of_the_hardware() -> None:
    places = [(0, 0), (1, 0), (32, 0), (0, 4), (33, 5), (128, 0)]
    offsets = [scale_offset(m, k, (256, 16), "swizzled_128x4") for m, k in places]
    assert offsets == [0, 16, 4, 512, 533, 2048]  # K = 256: 16 scale columns


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(100, 16), (129, 231), (1, 1), (8, 4), (0, 4), (5, 0)])
def test_every_scale_lies_at_its_offset(layout: str, shape: tuple[int, int]) -> None:
    scales = make_scales(*shape)
    sf = pack_scales(scales, layout)
    assert tuple(sf.shape) == padded_scale_shape(*shape, layout)
    flat = sf.flatten()
    for row in range(shape[0]):
        for column in range(0, shape[1], 3):
            assert flat[scale_offset(row, column, shape, layout)] == scales[row, column]


def test_100_rows_are_stored_as_128() -> None:
    assert padded_scale_shape(100, 16, "swizzled_128x4") == (128, 16)
    assert padded_scale_shape(100, 231, "swizzled_128x4") == (128, 232)
    assert padded_scale_shape(100, 231, "tiled_8x4") == (104, 232)
    assert padded_scale_shape(100, 231, "transposed") == (231, 100)


@given(
    rows=st.integers(0, 300),
    columns=st.integers(0, 20),
    layout=st.sampled_from(SCALE_LAYOUTS),
    dtype=st.sampled_from(DTYPES),
)
def test_unpacking_undoes_packing(rows: int, columns: int, layout: str, dtype: torch.dtype) -> None:
    scales = make_scales(rows, columns, dtype)
    restored = unpack_scales(pack_scales(scales, layout), layout, rows, columns)
    assert restored.dtype == dtype
    assert restored.shape == scales.shape
    assert bits_of(restored) == bits_of(scales)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("poison", [0x00, 0x7F, 0xFF])
def test_padding_is_zero_whatever_the_buffer_held(layout: str, poison: int) -> None:
    scales = make_scales(100, 231)  # K = 3696: 231 scales, padded to 232
    out = torch.full(padded_scale_shape(100, 231, layout), poison, dtype=torch.uint8)
    sf = pack_scales(scales, layout, out)
    assert sf.data_ptr() == out.data_ptr()
    is_padding = torch.ones(sf.numel(), dtype=torch.bool)
    places = [scale_offset(r, c, (100, 231), layout) for r in range(100) for c in range(231)]
    is_padding[places] = False
    assert (sf.flatten()[is_padding] == 0).all()
    assert torch.equal(unpack_scales(sf, layout, 100, 231), scales)


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
def test_strided_scales_pack_as_their_copy(layout: str) -> None:
    scales = make_scales(40, 70).t()[:, ::2]
    assert torch.equal(pack_scales(scales, layout), pack_scales(scales.contiguous(), layout))


def test_wrong_arguments_are_named() -> None:
    scales = make_scales(100, 4)
    with pytest.raises(FormatError, match="scale layout 'zigzag' is unknown; use one of: linear"):
        pack_scales(scales, "zigzag")
    with pytest.raises(FormatError, match=r"scales: shape \(400,\), wanted \[rows, columns\]"):
        pack_scales(scales.flatten(), "linear")
    with pytest.raises(FormatError, match=r"wanted contiguous torch\.uint8 \(128, 4\)"):
        pack_scales(scales, "swizzled_128x4", torch.empty(100, 4, dtype=torch.uint8))
    with pytest.raises(FormatError, match=r"sf: 400 scales in shape \(100, 4\), wanted 512"):
        unpack_scales(scales, "swizzled_128x4", 100, 4)
