"""Consumers of fp8 and int8: a tile's rows stay in registers until their scale is known.

    for each block   registers <- shared memory; product with lora_down; maximum of |x'|
    exchange         maxima to all CTAs of the cluster, sums to those that add them up and store
    for each block   x' again, scaled, encoded, stored

While the maxima of one warpgroup's tile travel, the other warpgroup works on the next tile.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import (
    add_rn_f32,
    div_rn_f32,
    max_magnitude_f32,
    max_u32,
    mov_b32_to_f32,
    mov_b32_to_u32,
    mul_rn_f32,
)
from halfbyte.device.inline_ptx import update_by_ptx
from halfbyte.device.memory_access import st_global_f32, st_global_v4
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.warpgroup_product import wait_for_products
from halfbyte.kernels.quantize_act_wgmma.config import (
    BLOCK_K,
    CONSUMER_WARPGROUPS,
    TILE_ROWS,
)
from halfbyte.kernels.quantize_act_wgmma.consumer import Consumer, make_sums
from halfbyte.kernels.quantize_act_wgmma.fragment import (
    ROW_STEP,
    WIDTH,
    WORDS,
    read_factors,
    transpose_words,
    unpack_row,
)
from halfbyte.kernels.quantize_act_wgmma.token_scale import (
    TokenScale,
    choose_token_scale,
    encode_words,
)


@dataclass(frozen=True)
class TokenConsumer(Consumer):
    """A consumer warpgroup of a mode with one scale a row."""

    @cute.jit
    def run(self) -> None:
        """Work on every second tile of the team."""
        work, config = self.work, self.work.config
        position = RingPosition.consumer(config.stages)
        for tile in cutlass.range(self.warpgroup, work.rows.tiles, CONSUMER_WARPGROUPS, unroll=1):
            words = [cute.make_rmem_tensor((2 * WORDS,), Uint32) for _ in range(config.blocks)]
            sums = make_sums(config.rank_tile)
            maxima = cute.make_rmem_tensor((2,), Float32)
            position = self.read_tile(words, sums, maxima, position)
            sent, received = self.place_in_exchange(tile)
            work.exchange.wait_empty(sent)
            work.exchange.send_maxima(maxima, self.place)
            if cutlass.const_expr(config.rank_tile > 0):
                wait_for_products(0, sums)
                work.exchange.send_sums(sums, self.place)
            work.exchange.publish(sent, self.thread % 32)
            work.exchange.wait_full(received)
            if cutlass.const_expr(config.rank_tile > 0):
                self.store_sums(tile, self.read_multiplier)
            scales = [self.read_scale(half * ROW_STEP + self.place.row) for half in range(2)]
            work.exchange.release(received, self.thread % 32)
            if work.is_writing:
                self.write_tile(words, tile, scales)

    @cute.jit
    def read_tile(self, words: Any, sums: Any, maxima: Any, position: RingPosition) -> RingPosition:
        """Load all blocks of a tile, start their products, find both rows' largest |x'|."""
        config = self.work.config
        maxima.fill(0.0)
        for block in cutlass.range_constexpr(config.blocks):
            self.take_block(words[block], position)
            if cutlass.const_expr(config.rank_tile > 0):
                self.multiply_block(sums, words[block], block, Int32(int(block > 0)))
            factors = self.read_block_factors(block)
            for half in cutlass.range_constexpr(2):
                for value in self.prepare(words[block], half, factors):
                    maxima[half] = max_magnitude_f32(maxima[half], value)
            position = self.free_slot(position)
        for half in cutlass.range_constexpr(2):
            largest = mov_b32_to_u32(maxima[half])
            for offset in (1, 2):  # the quad shares its rows
                other = Uint32(cute.arch.shuffle_sync_bfly(largest, offset))
                largest = max_u32(largest, other)
            maxima[half] = mov_b32_to_f32(largest)
        return position

    def read_block_factors(self, block: int) -> list[Any] | None:
        """Return the factors of this thread's columns of a block, None without smooth."""
        if not self.work.config.has_smooth:
            return None
        smooth = self.work.shared + self.work.config.smooth_offset
        return read_factors(smooth, block, self.place.quad)

    def prepare(self, words: Any, half: int, factors: list[Any] | None) -> list[Any]:
        """Return x' = (x + shift) * factor of one row's sixteen values."""
        config = self.work.config
        values = unpack_row(words, half, config.dtype)
        if config.shift != 0.0:
            values = [add_rn_f32(value, Float32(config.shift)) for value in values]
        if factors is None:
            return values
        return [mul_rn_f32(value, factor) for value, factor in zip(values, factors, strict=True)]

    @cute.jit
    def write_tile(self, words: Any, tile: Int32, scales: Any) -> None:
        """Scale, encode and store both rows; the first CTA of a team stores their scales."""
        work, outputs = self.work, self.work.outputs
        row = tile * TILE_ROWS + self.place.row
        addresses = []
        for half in cutlass.range_constexpr(2):
            this_row = work.rows.first + row + half * ROW_STEP
            is_first = (work.slice == 0) & (self.place.quad == 0)
            if is_first & self.is_inside(row + half * ROW_STEP):
                st_global_f32(outputs.token_scale + Int64(this_row) * 4, scales[half].scale)
            addresses.append(outputs.act + Int64(this_row) * outputs.act_pitch)
        for block in cutlass.range_constexpr(work.config.blocks):
            # x' is made again: what the compiler would keep instead has no room in registers.
            update_by_ptx("", words[block])
            factors = self.read_block_factors(block)
            for half in cutlass.range_constexpr(2):
                values = self.prepare(words[block], half, factors)
                stored = transpose_words(encode_words(values, scales[half]), self.place.quad)
                is_stored = self.is_inside(row + half * ROW_STEP) & (block < outputs.act_blocks)
                if is_stored:
                    offset = block * BLOCK_K + self.place.quad * WIDTH
                    st_global_v4(addresses[half] + Int64(offset), stored)

    def read_scale(self, row: Int32) -> TokenScale:
        """Return the scale of a row of the tile that was received."""
        return choose_token_scale(self.work.exchange.read_maximum(row), self.work.config.mode)

    def read_multiplier(self, row: Int32) -> Any:
        """Return the function that divides a sum by the scale of a row of the tile."""
        scale = self.read_scale(row)
        if scale.divisor is None:
            return lambda value: mul_rn_f32(value, scale.factor)
        return lambda value: div_rn_f32(value, scale.scale)
