"""A tile of x in shared memory to codes and block scales in global memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from halfbyte.device.memory_access import (
    ld_shared_v4,
    ld_shared_v4_f32,
    st_global_b8,
    st_global_b16,
    st_global_b32,
    st_global_pair,
)
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    Divisors,
    Quantized,
    make_divisors,
    quantize_values,
    shift_and_smooth,
    unpack_values,
)
from halfbyte.kernels.quantize_act_lora.config import (
    CODE_ALIGNMENT,
    K_TILE,
    WIDTH,
    QuantizeConfig,
)
from halfbyte.kernels.quantize_act_lora.tile_load import Corner, locate_piece

SF_TILE_ROWS = 128  # rows of a tile of swizzled_128x4
SF_TILE_COLUMNS = 4
SF_TILE_BYTES = 512


@dataclass(frozen=True)
class QuantizedOutput:
    """Where codes [M, K_pad / 2] and scales go.

    Attributes:
        codes, scales: addresses.
        code_pitch: bytes from one row of codes to the next.
        rows, columns: logical M and K.
        scale_columns: blocks of a row, padding included.
    """

    codes: Int64
    scales: Int64
    code_pitch: Int64
    rows: Int32
    columns: Int32
    scale_columns: Int32


@cute.jit
def quantize_tile(
    output: QuantizedOutput,
    corner: Corner,
    tile: tuple[Int32, Int32],
    global_scale: Any,
    config: cutlass.Constexpr,
) -> None:
    """Quantize the x of one stage and store codes and scales.

    Four neighbouring threads take the four sixteens of a row, so that eight threads read two whole
    rows of 128 bytes. `tile` is (shared address, column of x).
    """
    slot, k = tile
    part = corner.thread % (K_TILE // WIDTH)
    column = k + part * WIDTH
    smooth = read_smooth(locate_smooth(slot, part, config))
    divisors = make_divisors(smooth, global_scale, is_fast=True)
    rows_at_once = cutlass.const_expr(config.threads // (K_TILE // WIDTH))
    for first_row in cutlass.range_constexpr(0, config.rows, rows_at_once):
        row = corner.thread // (K_TILE // WIDTH) + first_row
        place = Place(slot, part, row, column)
        if cutlass.const_expr(first_row + rows_at_once <= config.rows) or row < config.rows:
            quantize_part(output, corner, place, divisors, config)


@dataclass(frozen=True)
class Place:
    """Where a thread's sixteen elements are.

    Attributes:
        slot: shared address of the stage.
        part: which quarter of the tile's columns.
        row: of the tile.
        column: of x.
    """

    slot: Int32
    part: Int32
    row: Int32
    column: Int32


def locate_smooth(slot: Int32, part: Int32, config: QuantizeConfig) -> Int32 | None:
    """Return the shared address of the sixteen smooth factors of a part, None without smooth."""
    if not config.has_smooth:
        return None
    return slot + config.x_bytes + config.lora_down_bytes + 4 * WIDTH * part


def read_smooth(address: Int32 | None) -> list[Any] | None:
    """Return smooth of sixteen columns, 0 beyond K; None without smooth."""
    if address is None:
        return None
    return [value for four in range(4) for value in ld_shared_v4_f32(address + 16 * four)]


@cute.jit
def quantize_part(
    output: QuantizedOutput,
    corner: Corner,
    place: Place,
    divisors: Divisors,
    config: cutlass.Constexpr,
) -> None:
    """Quantize sixteen elements with reciprocals, again without if that is not exact; store them.

    A warp decides as one, since its lanes exchange maxima.
    """
    quantized = read_and_quantize(output, place, divisors, config)
    low, high, scale = quantized.low, quantized.high, quantized.scale
    if not cute.arch.vote_all_sync(quantized.is_exact):
        low, high, scale = quantize_any(output, place, divisors, config)
    row = corner.row + place.row
    store_codes(output, row, place.column, low, high)
    if cutlass.const_expr(config.is_swizzled):
        store_scale_byte(output, row, place.column, scale, config)
    else:
        store_scale_float16(output, row, place.column, scale, config)


def read_and_quantize(
    output: QuantizedOutput, place: Place, divisors: Divisors, config: QuantizeConfig
) -> Quantized:
    """Return the codes and the scale of sixteen elements in shared memory."""
    words = [
        word
        for piece in range(2)
        for word in ld_shared_v4(place.slot + locate_piece(place.row, 2 * place.part + piece))
    ]
    raw = unpack_values(words, config.dtype)
    values = shift_and_smooth(raw, divisors.smooth, config.activation.shift)
    if config.activation.shift != 0.0:  # the padding of a block is zero, not a shifted zero
        values = [
            cutlass.select_(place.column + index < output.columns, value, Float32(0.0))
            for index, value in enumerate(values)
        ]
    return quantize_values(values, raw, divisors, config)


def quantize_any(
    output: QuantizedOutput, place: Place, fast: Divisors, config: QuantizeConfig
) -> tuple[Uint32, Uint32, Uint32]:
    """Return (low codes, high codes, scale) of any sixteen elements: NaN, tiny, huge."""
    smooth = read_smooth(locate_smooth(place.slot, place.part, config))
    if smooth is not None:  # beyond K, where x is 0: 0 / 0 would be NaN
        smooth = [
            cutlass.select_(place.column + index < output.columns, value, Float32(1.0))
            for index, value in enumerate(smooth)
        ]
    scale = None if fast.global_scale is None else fast.global_scale.value
    divisors = make_divisors(smooth, scale, is_fast=False)
    quantized = read_and_quantize(output, place, divisors, config)
    return quantized.low, quantized.high, quantized.scale


@cute.jit
def store_codes(
    output: QuantizedOutput, row: Int32, column: Int32, low: Uint32, high: Uint32
) -> None:
    """Store sixteen codes, padding of K to 32 included."""
    padded = (output.columns + (CODE_ALIGNMENT - 1)) // CODE_ALIGNMENT * CODE_ALIGNMENT
    if (row < output.rows) & (column < padded):
        address = output.codes + Int64(row) * output.code_pitch + Int64(column // 2)
        st_global_pair(address, low, high)


@cute.jit
def store_scale_byte(
    output: QuantizedOutput, row: Int32, column: Int32, scale: Uint32, config: cutlass.Constexpr
) -> None:
    """Store a block's scale in swizzled_128x4; padding rows get zeros, whatever smooth is."""
    block = column // config.block_size
    if (column % config.block_size == 0) & (block < output.scale_columns):
        byte = cutlass.select_(row < output.rows, scale, Uint32(0))
        st_global_b8(locate_scale(output, row, block), byte)


def locate_scale(output: QuantizedOutput, row: Int32, block: Int32) -> Int64:
    """Return the address of a scale in swizzled_128x4 (formats.scale_layout.scale_offset)."""
    tiles_a_row = output.scale_columns // SF_TILE_COLUMNS
    tile = Int64(row // SF_TILE_ROWS) * Int64(tiles_a_row) + Int64(block // SF_TILE_COLUMNS)
    local = row % 32 * 16 + row // 32 % 4 * 4 + block % SF_TILE_COLUMNS
    return output.scales + tile * SF_TILE_BYTES + Int64(local)


@cute.jit
def store_scale_float16(
    output: QuantizedOutput, row: Int32, column: Int32, scale: Uint32, config: cutlass.Constexpr
) -> None:
    """Store a block's float16 scale in row-major order."""
    block = column // config.block_size
    if (column % config.block_size == 0) & (row < output.rows):
        place = Int64(row) * Int64(output.scale_columns) + Int64(block)
        st_global_b16(output.scales + place * 2, Uint16(scale))


@cute.jit
def store_zero_scales(output: QuantizedOutput, corner: Corner, config: cutlass.Constexpr) -> None:
    """Write the scales of a CTA whose rows are all padding."""
    words_a_row = output.scale_columns // SF_TILE_COLUMNS
    for item in cutlass.range(corner.thread, config.rows * words_a_row, config.threads, unroll=1):
        row = corner.row + item // words_a_row
        st_global_b32(locate_scale(output, row, item % words_a_row * SF_TILE_COLUMNS), Uint32(0))
