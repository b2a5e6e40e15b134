"""Orders of block scales in memory: row-major and the layouts that hardware and files want.

`scales` is always the logical [rows, columns] matrix ("linear"); `sf` is the same data in another
layout, with padding that is always zero. Only bytes move.

linear: [rows, columns] row-major.
swizzled_128x4: rows padded to 128, columns to 4; tiles of 128 x 4 row-major, inside a tile
    offset (row % 32) * 16 + (row // 32 % 4) * 4 + column % 4 (PTX ISA, tcgen05 scale factor
    layout; cuBLAS "1D block scaling factors layout").
tiled_8x4: rows padded to 8, columns to 4; tiles of 8 x 4 row-major, inside a tile row-major
    (TensorRT-LLM's and flashinfer's layout for few rows).
transposed: [columns, rows] row-major (nunchaku's activations and the [K/16, rows] of its files).
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from halfbyte.errors import FormatError

ScaleLayout = Literal["linear", "swizzled_128x4", "tiled_8x4", "transposed"]
SCALE_LAYOUTS: tuple[str, ...] = get_args(ScaleLayout)

_QUARTER = 32  # rows of one quarter of a 128-row tile; the four quarters interleave


@dataclass(frozen=True)
class _Tile:
    rows: int
    columns: int


_TILES = {"swizzled_128x4": _Tile(128, 4), "tiled_8x4": _Tile(8, 4)}


def padded_scale_shape(rows: int, columns: int, layout: str) -> tuple[int, int]:
    """Return the (rows, columns) that `pack_scales` stores for this many logical ones."""
    _check_layout(layout)
    if layout == "transposed":
        return columns, rows
    tile = _TILES.get(layout, _Tile(1, 1))
    return -(-rows // tile.rows) * tile.rows, -(-columns // tile.columns) * tile.columns


def scale_offset(row: int, column: int, shape: tuple[int, int], layout: str) -> int:
    """Return where scale (row, column) lies in `sf`, counted in scales from its start.

    Args:
        row: logical row.
        column: logical column.
        shape: the logical (rows, columns) of the matrix.
        layout: one of `SCALE_LAYOUTS`.
    """
    _check_layout(layout)
    rows, columns = shape
    if layout == "linear":
        return row * columns + column
    if layout == "transposed":
        return column * rows + row
    tile = _TILES[layout]
    tiles_a_row = -(-columns // tile.columns)
    start = (row // tile.rows * tiles_a_row + column // tile.columns) * tile.rows * tile.columns
    row, column = row % tile.rows, column % tile.columns
    if layout == "tiled_8x4":
        return start + row * tile.columns + column
    quarters = tile.rows // _QUARTER
    return start + (row % _QUARTER * quarters + row // _QUARTER) * tile.columns + column


def pack_scales(scales: torch.Tensor, layout: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `sf`: `padded_scale_shape(...)`, contiguous, dtype of `scales`; all of it written.

    The shape of a tiled layout is the padded one; its elements lie in tile order, so it must not
    be indexed by row and column (`scale_offset` says where a scale is).

    Args:
        scales: [rows, columns], any dtype and strides.
        layout: one of `SCALE_LAYOUTS`.
        out: a contiguous buffer of the same shape and dtype to write; its old contents vanish.

    Raises:
        FormatError: an unknown layout, `scales` that is no matrix, an `out` that does not fit.
    """
    if scales.ndim != 2:
        raise FormatError(f"scales: shape {tuple(scales.shape)}, wanted [rows, columns]")
    rows, columns = scales.shape
    shape = padded_scale_shape(rows, columns, layout)
    if out is None:
        out = torch.empty(shape, dtype=scales.dtype, device=scales.device)
    elif tuple(out.shape) != shape or out.dtype != scales.dtype or not out.is_contiguous():
        raise FormatError(
            f"out: {out.dtype} {tuple(out.shape)}, wanted contiguous {scales.dtype} {shape}"
        )
    if layout == "transposed":
        return out.copy_(scales.t())
    if layout == "linear":
        return out.copy_(scales)
    padded = torch.zeros(shape, dtype=_bits_dtype(scales), device=scales.device)
    padded[:rows, :columns] = scales.view(padded.dtype)
    out.view(padded.dtype).copy_(_to_tiles(padded, layout).reshape(shape))
    return out


def unpack_scales(sf: torch.Tensor, layout: str, rows: int, columns: int) -> torch.Tensor:
    """Return the logical [rows, columns] scales, contiguous; the inverse of `pack_scales`.

    Args:
        sf: any shape with the elements of `padded_scale_shape(rows, columns, layout)`, contiguous.
        layout: one of `SCALE_LAYOUTS`.
        rows: logical rows.
        columns: logical columns.

    Raises:
        FormatError: an unknown layout, or another number of elements.
    """
    shape = padded_scale_shape(rows, columns, layout)
    if sf.numel() != shape[0] * shape[1]:
        raise FormatError(
            f"sf: {sf.numel()} scales in shape {tuple(sf.shape)}, wanted {shape[0] * shape[1]} for "
            f"{rows} x {columns} as {layout} (padded to {shape[0]} x {shape[1]})"
        )
    matrix = sf.reshape(shape)
    if layout == "transposed":
        return matrix.t().contiguous()
    if layout == "linear":
        return matrix.clone()
    bits = _from_tiles(matrix.view(_bits_dtype(sf)), layout)
    return bits[:rows, :columns].contiguous().view(sf.dtype)


def _to_tiles(padded: torch.Tensor, layout: str) -> torch.Tensor:
    # Returns [row tiles, column tiles, (32, 4,) or (8,) 4 columns] in memory order.
    tile = _TILES[layout]
    grid = padded.shape[0] // tile.rows, padded.shape[1] // tile.columns
    if layout == "tiled_8x4":
        return padded.reshape(grid[0], tile.rows, grid[1], tile.columns).permute(0, 2, 1, 3)
    quarters = padded.reshape(grid[0], tile.rows // _QUARTER, _QUARTER, grid[1], tile.columns)
    return quarters.permute(0, 3, 2, 1, 4)


def _from_tiles(tiles: torch.Tensor, layout: str) -> torch.Tensor:
    tile = _TILES[layout]
    shape = tiles.shape
    grid = shape[0] // tile.rows, shape[1] // tile.columns
    if layout == "tiled_8x4":
        split = tiles.reshape(grid[0], grid[1], tile.rows, tile.columns)
        return split.permute(0, 2, 1, 3).reshape(shape)
    quarters = tiles.reshape(grid[0], grid[1], _QUARTER, tile.rows // _QUARTER, tile.columns)
    return quarters.permute(0, 3, 2, 1, 4).reshape(shape)


def _bits_dtype(scales: torch.Tensor) -> torch.dtype:
    # Plain integers of the same width: slicing and zeroing work for every dtype, NaN stays put.
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return widths[scales.element_size()]


def _check_layout(layout: str) -> None:
    if layout not in SCALE_LAYOUTS:
        known = ", ".join(SCALE_LAYOUTS)
        raise FormatError(f"scale layout {layout!r} is unknown; use one of: {known}")
