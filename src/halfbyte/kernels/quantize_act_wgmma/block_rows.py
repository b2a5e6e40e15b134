"""Consumers of the exact modes: a block of x is quantized as soon as it is here.

Scales of 16, 32 or 64 columns are the matter of one, two or four neighbouring threads: nothing of x
is kept, and only sums of lora_act travel between CTAs.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from halfbyte.device.memory_access import st_global_b16, st_global_v4
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warpgroup_product import wait_for_products
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    Divisors,
    make_divisors,
    shift_and_smooth,
)
from halfbyte.kernels.quantize_act_wgmma.block_values import BlockValues, make_block_values
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K, CONSUMER_WARPGROUPS, TILE_ROWS
from halfbyte.kernels.quantize_act_wgmma.consumer import Consumer, make_sums
from halfbyte.kernels.quantize_act_wgmma.fragment import (
    ROW_STEP,
    WIDTH,
    WORDS,
    read_factors,
    transpose_words,
    unpack_row,
)

_PIECES_OF_FLOAT16 = 2  # 16-byte pieces of a thread's sixteen values


@dataclass(frozen=True)
class BlockConsumer(TracedRecord):
    """A consumer warpgroup of an exact mode.

    Attributes:
        consumer: what it has in common with others.
        global_scale: what stored scales are relative to, or None.
    """

    consumer: Consumer
    global_scale: Any

    @cute.jit
    def run(self) -> None:
        """Work on every second tile of the team."""
        one, work = self.consumer, self.consumer.work
        config = work.config
        position = RingPosition.consumer(config.stages)
        for tile in cutlass.range(one.warpgroup, work.rows.tiles, CONSUMER_WARPGROUPS, unroll=1):
            sums = make_sums(config.rank_tile)
            sums.fill(0.0)
            for block in cutlass.range(config.blocks, unroll=1):
                words = cute.make_rmem_tensor((2 * WORDS,), Uint32)
                one.take_block(words, position)
                if cutlass.const_expr(config.rank_tile > 0):
                    one.multiply_block(sums, words, block, Int32(1))
                if work.is_writing & (block < work.outputs.act_blocks):
                    self.write_block(words, tile, block)
                if cutlass.const_expr(config.rank_tile > 0):
                    wait_for_products(0, words)
                position = one.free_slot(position)
            if cutlass.const_expr(config.rank_tile > 0):
                wait_for_products(0, sums)
                sent, received = one.place_in_exchange(tile)
                work.exchange.wait_empty(sent)
                work.exchange.send_sums(sums, one.place)
                work.exchange.publish(sent, one.thread % 32)
                work.exchange.wait_full(received)
                one.store_sums(tile, lambda row: None)
                work.exchange.release(received, one.thread % 32)

    @cute.jit
    def write_block(self, words: Any, tile: Int32, block: Int32) -> None:
        """Quantize and store a block of both rows of this thread."""
        one, work = self.consumer, self.consumer.work
        config, outputs = work.config, work.outputs
        fast = self.make_divisors(block, is_fast=True)
        for half in cutlass.range_constexpr(2):
            row = tile * TILE_ROWS + one.place.row + half * ROW_STEP
            values = self.quantize(words, half, block, fast)
            stored = cute.make_rmem_tensor((len(values.words),), Uint32)
            scale = values.scale
            for index in cutlass.range_constexpr(len(values.words)):
                stored[index] = values.words[index]
            if not cute.arch.vote_all_sync(values.is_exact):
                again = self.quantize(words, half, block, self.make_divisors(block, is_fast=False))
                scale = again.scale
                for index in cutlass.range_constexpr(len(values.words)):
                    stored[index] = again.words[index]
            this_row = Int64(work.rows.first + row)
            for piece in cutlass.range_constexpr(config.act_bytes):
                whole = transpose_words([stored[4 * piece + i] for i in range(4)], one.place.quad)
                if one.is_inside(row):
                    offset = block * (BLOCK_K * config.act_bytes) + piece * BLOCK_K
                    address = outputs.act + this_row * outputs.act_pitch
                    st_global_v4(address + Int64(offset + one.place.quad * WIDTH), whole)
            if cutlass.const_expr(config.has_group_scales):
                if one.is_inside(row) & (one.place.quad == 0):
                    place = this_row * outputs.group_pitch + Int64(block)
                    st_global_b16(outputs.group_scale + place * 2, Uint16(scale))

    def make_divisors(self, block: Int32, *, is_fast: bool) -> Divisors:
        """Return what this thread's columns of a block are divided by."""
        work = self.consumer.work
        smooth = None
        if work.config.has_smooth:
            address = work.shared + work.config.smooth_offset
            smooth = read_factors(address, block, self.consumer.place.quad)
        return make_divisors(smooth, self.global_scale, is_fast=is_fast)

    def quantize(self, words: Any, half: int, block: Int32, divisors: Divisors) -> BlockValues:
        """Return the values of one row's sixteen columns."""
        work = self.consumer.work
        config = work.config
        raw = unpack_row(words, half, config.dtype)
        shift = config.activation.shift
        values = shift_and_smooth(raw, divisors.smooth, shift)
        if shift != 0.0:  # the padding of a block is zero, not a shifted zero
            first = (work.first_block + block) * BLOCK_K + self.consumer.place.quad * WIDTH
            values = [
                cutlass.select_(first + index < work.num_columns, value, Float32(0.0))
                for index, value in enumerate(values)
            ]
        return make_block_values(values, raw, divisors, config)
