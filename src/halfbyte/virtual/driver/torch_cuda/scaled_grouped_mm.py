"""torch.nn.functional.scaled_grouped_mm in float64, for block scales in 128 x 4 tiles.

The groups are rows of A with one matrix of B each (2D x 3D), or slices of K (2D x 2D). The tiles of
one group's scales follow those of the group before it; a second scale is one float32 per group.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.scale_layout import padded_scale_shape, unpack_scales
from halfbyte.virtual.driver.torch_cuda.scaled_mm import BLOCK_SCALE_LAYOUT, decode

Tensor = torch.Tensor
_BLOCKS = {2: 16, 3: 32}  # torch.nn.functional.ScalingType.BlockWise1x16 and 1x32


def scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scales_a: Sequence[Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scales_b: Sequence[Tensor],
    *rest: Any,
) -> Tensor:
    """Return the products of all groups: [rows, n] for 2D x 3D, [groups, m, n] for 2D x 2D.

    Arguments are those of torch._scaled_grouped_mm_v2, `rest` recipe and swizzle of B, offsets,
    bias, dtype.

    Raises:
        FormatError: scales per row or per tensor, or a bias.
    """
    offsets, bias, dtype = rest[2:5]
    block = _BLOCKS.get(recipe_a[0])
    if block is None or bias is not None:
        raise FormatError("scaled_grouped_mm takes block scales 1x16 or 1x32 and no bias here")
    ends = offsets.tolist()
    if b.dim() == 3:
        groups = _list_row_groups(a, b, ends)
    else:
        groups = _list_k_groups(a, b, ends)
    find_a, find_b = _ScaleReader(scales_a[0], block), _ScaleReader(scales_b[0], block)
    products = []
    for index, (left, right) in enumerate(groups):
        product = find_a.dequantize(left) @ find_b.dequantize(right).t()
        for scales in (scales_a, scales_b):
            if len(scales) > 1:
                product = product * scales[1].reshape(-1)[index].double()
        products.append(product)
    join: Callable[[list[Tensor]], Tensor] = torch.cat if b.dim() == 3 else torch.stack
    return join(products).to(dtype or torch.bfloat16)


def _list_row_groups(a: Tensor, b: Tensor, ends: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield float64 values of A [rows, k] and of B transposed [n, k] of each group."""
    rows, matrices = decode(a), b.transpose(-1, -2)
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        yield rows[start:end], decode(matrices[index])


def _list_k_groups(a: Tensor, b: Tensor, ends: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    left, right = decode(a), decode(b.t())
    for start, end in zip([0, *ends], ends, strict=False):
        yield left[:, start:end], right[:, start:end]


class _ScaleReader:
    """Reads the scales of one group after the other."""

    def __init__(self, scales: Tensor, block: int) -> None:
        self._scales = scales.contiguous().reshape(-1)
        self._block = block
        self._position = 0

    def dequantize(self, values: Tensor) -> Tensor:
        rows, k = values.shape
        blocks = -(-k // self._block)
        count = math.prod(padded_scale_shape(rows, blocks, BLOCK_SCALE_LAYOUT))
        tiles = self._scales[self._position : self._position + count]
        self._position += count
        scales = decode(unpack_scales(tiles, BLOCK_SCALE_LAYOUT, rows, blocks))
        return values * scales.repeat_interleave(self._block, 1)[:, :k]
