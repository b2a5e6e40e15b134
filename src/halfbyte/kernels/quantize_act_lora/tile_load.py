"""Tiles of x, lora_down and smooth on their way to shared memory.

A tile of a matrix is rows of 64 16-bit numbers, 128 bytes each. The eight 16-byte pieces of row r
lie in the order piece ^ (r % 8), so that eight lanes reading one piece of eight rows, or the pieces
of two rows, meet no bank twice.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import max_s32, min_s32
from halfbyte.device.memory_access import cp_async_16, ld_global_b16, st_shared_v4
from halfbyte.kernels.quantize_act_lora.config import ACCESS_BYTES, K_TILE, QuantizeConfig

PIECES = 8  # 16-byte pieces of a tile row
PIECE_ELEMENTS = ACCESS_BYTES // 2
ROW_BYTES = 2 * K_TILE


@dataclass(frozen=True)
class Matrix:
    """A row-major matrix of 16-bit numbers in global memory.

    Attributes:
        address: of its first element.
        rows, columns: its size.
        pitch: elements from one row to the next.
    """

    address: Int64
    rows: Int32
    columns: Int32
    pitch: Int64


@dataclass(frozen=True)
class Sources:
    """What a CTA loads: x [M, K], lora_down [R, K] or None, and the address of smooth or None."""

    x: Matrix
    lora_down: Matrix | None
    smooth: Int64 | None


@dataclass(frozen=True)
class Corner:
    """Where the tiles of a CTA start: row of x, row of lora_down, and its thread's number."""

    row: Int32
    rank: Int32
    thread: Int32


def locate_piece(row: Int32, piece: Int32) -> Int32:
    """Return the byte offset of a 16-byte piece inside a tile."""
    return row * ROW_BYTES + ((piece ^ (row & 7)) * ACCESS_BYTES)


def load_stage(
    sources: Sources, corner: Corner, k: Int32, slot: Int32, config: QuantizeConfig
) -> None:
    """Start loading columns k to k + 63 into the stage at shared address `slot`."""
    copy = copy_piece if config.x_is_aligned else gather_piece
    for item in _share_pieces(corner.thread, config.rows, config.threads):
        copy(sources.x, corner.row, k, slot, item)
    if sources.lora_down is not None:
        tile = slot + config.x_bytes
        for item in _share_pieces(corner.thread, config.rank_tile, config.threads):
            copy_piece_below(sources.lora_down, corner.rank, k, tile, item, config.rank_tile)
    if sources.smooth is not None:
        tile = slot + config.x_bytes + config.lora_down_bytes
        copy_smooth(sources.smooth, sources.x.columns, k, tile, corner.thread)


def _share_pieces(thread: Int32, rows: int, threads: int) -> list[Any]:
    """Return this thread's pieces of a tile; eight neighbouring threads take one row."""
    return [thread + first for first in range(0, rows * PIECES, threads)]


@cute.jit
def copy_piece_below(
    matrix: Matrix,
    row: Int32,
    k: Int32,
    tile: Int32,
    item: Int32,
    rows: cutlass.Constexpr,
) -> None:
    """Copy a piece of a tile that may have fewer pieces than there are threads."""
    if item < rows * PIECES:
        copy_piece(matrix, row, k, tile, item)


def copy_piece(matrix: Matrix, row: Int32, k: Int32, tile: Int32, item: Int32) -> None:
    """Start the asynchronous copy of piece `item` of the tile that starts at (row, k).

    What lies outside of the matrix becomes zero. Rows start at multiples of 16 bytes.
    """
    local, piece = item // PIECES, item % PIECES
    column = k + piece * PIECE_ELEMENTS
    inside = _count_inside(matrix, row + local, column)
    source = matrix.address
    source += (Int64(row + local) * matrix.pitch + Int64(column)) * Int64(2)
    # A copy of nothing still names an address: that of the matrix.
    source = cutlass.select_(inside > Int32(0), source, matrix.address)
    cp_async_16(tile + locate_piece(local, piece), source, inside * Int32(2))


@cute.jit
def gather_piece(matrix: Matrix, row: Int32, k: Int32, tile: Int32, item: Int32) -> None:
    """Copy a piece as `copy_piece` does, element by element: rows may start anywhere."""
    local = item // PIECES
    piece = item % PIECES
    column = k + piece * PIECE_ELEMENTS
    inside = _count_inside(matrix, row + local, column)
    source = matrix.address + (Int64(row + local) * matrix.pitch + Int64(column)) * Int64(2)
    words = cute.make_rmem_tensor((PIECE_ELEMENTS // 2,), Uint32)
    words.fill(0)
    for index in cutlass.range_constexpr(PIECE_ELEMENTS):
        if index < inside:
            bits = Uint32(ld_global_b16(source + 2 * index))
            words[index // 2] = words[index // 2] | (bits << Uint32(16 * (index % 2)))
    st_shared_v4(tile + locate_piece(local, piece), (words[0], words[1], words[2], words[3]))


def _count_inside(matrix: Matrix, row: Int32, column: Int32) -> Int32:
    """Return how many of the eight elements at (row, column) belong to the matrix."""
    left = max_s32(min_s32(matrix.columns - column, Int32(PIECE_ELEMENTS)), Int32(0))
    return cutlass.select_(row < matrix.rows, left, Int32(0))


@cute.jit
def copy_smooth(smooth: Int64, columns: Int32, k: Int32, tile: Int32, thread: Int32) -> None:
    """Start the copy of smooth [k : k + 64]; what lies beyond K becomes zero."""
    if thread < K_TILE // 4:
        column = k + 4 * thread
        inside = max_s32(min_s32(columns - column, Int32(4)), Int32(0))
        source = cutlass.select_(inside > Int32(0), smooth + Int64(column) * 4, smooth)
        cp_async_16(tile + ACCESS_BYTES * thread, source, inside * 4)
