"""The float64 stand-in for torch._scaled_mm, from formats worked out by hand."""

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.scale_layout import unpack_scales
from halfbyte.virtual.driver.session import cuda
from halfbyte.virtual.driver.torch_cuda.scaled_grouped_mm import scaled_grouped_mm
from halfbyte.virtual.driver.torch_cuda.scaled_mm import BLOCK_SCALE_LAYOUT, decode, scaled_mm


def test_fp4_codes_are_low_nibble_first() -> None:
    packed = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert decode(packed).tolist() == [[0.5, 1.0, 6.0, -6.0]]


def test_e8m0_is_a_power_of_two_and_255_is_nan() -> None:
    codes = torch.tensor([127, 130, 124, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert decode(codes)[:3].tolist() == [1.0, 8.0, 0.125]
    assert decode(codes)[3].isnan()


def test_scale_tiles_hold_row_and_block_where_cublas_wants_them() -> None:
    """Byte (row % 32) * 16 + (row // 32 % 4) * 4 + block % 4 of tile (row // 128, block // 4)."""
    rows, blocks = 200, 6
    flat = torch.zeros(2 * 2 * 512, dtype=torch.float64)
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * 2 + block // 4
            flat[tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + block % 4] = row * 8 + block
    wanted = torch.arange(rows)[:, None] * 8 + torch.arange(blocks)
    found = unpack_scales(flat, BLOCK_SCALE_LAYOUT, rows, blocks)
    assert torch.equal(found, wanted.double())
    with pytest.raises(FormatError, match="wanted 2048"):
        unpack_scales(flat[1:], BLOCK_SCALE_LAYOUT, rows, blocks)


def test_mxfp8_multiplies_each_block_by_its_own_scale() -> None:
    ones = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scales = torch.full((512,), 127, dtype=torch.uint8)
    scales[1] = 129  # row 0, block 1: 4
    left, right = scales.view(torch.float8_e8m0fnu), torch.full((512,), 127, dtype=torch.uint8)
    product = scaled_mm(
        ones, ones.t(), left, right.view(torch.float8_e8m0fnu), out_dtype=torch.float32
    )
    assert product.tolist() == [[32 + 4 * 32] * 2, [64.0] * 2]


def test_a_use_on_the_device_is_counted_as_substituted(session: cuda) -> None:
    a = torch.ones(16, 32, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    result = torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    assert result.is_cuda
    assert result.tolist() == [[32.0] * 16] * 16
    assert session.log.substitutions == {"torch._scaled_mm": 1}


def test_each_group_takes_its_own_rows_matrix_and_scale_tiles() -> None:
    """Groups of 2 and 1 rows; ones times ones over k = 32 is 32, times the group's scales."""
    a = torch.ones(3, 32).to(torch.float8_e4m3fn)
    b = torch.ones(2, 32, 16).to(torch.float8_e4m3fn)
    scale_a = torch.full((2 * 512,), 127, dtype=torch.uint8)
    scale_a[16] = 128  # group 0, row 1: 2
    scale_a[512] = 130  # group 1, row 0: 8
    scale_b = torch.full((2, 512), 127, dtype=torch.uint8)
    scale_b[1] = 126  # every row of the second matrix: 0.5
    product = scaled_grouped_mm(
        a,
        b,
        [scale_a.view(torch.float8_e8m0fnu)],
        [3],
        [1],
        [scale_b.view(torch.float8_e8m0fnu)],
        [3],
        [1],
        torch.tensor([2, 3]),
        None,
        torch.float32,
    )
    assert product[:, 0].tolist() == [32.0, 64.0, 32 * 8 * 0.5]
    assert product.shape == (3, 16)


def test_groups_along_k_give_one_product_each() -> None:
    a = torch.ones(2, 96).to(torch.float8_e4m3fn)
    ones = torch.full((2 * 512,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    offsets = torch.tensor([32, 96])
    product = scaled_grouped_mm(
        a, a.t(), [ones], [3], [1], [ones], [3], [1], offsets, None, torch.float32
    )
    assert product.tolist() == [[[32.0] * 2] * 2, [[64.0] * 2] * 2]
