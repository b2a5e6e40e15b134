"""What both kinds of consumer warpgroups do: products with lora_down, and lora_act's last step."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import (
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    div_rn_f32,
    mul_rn_f32,
)
from halfbyte.device.memory_access import st_global_pair
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warpgroup_product import (
    STEP_UNITS,
    commit_products,
    fence_products,
    make_descriptor,
    multiply_from_registers,
)
from halfbyte.kernels.quantize_act_wgmma.config import TILE_ROWS
from halfbyte.kernels.quantize_act_wgmma.exchange import RANKS_AT_ONCE, count_items
from halfbyte.kernels.quantize_act_wgmma.fragment import (
    ROW_BYTES,
    WORDS,
    FragmentPlace,
    read_rows,
)
from halfbyte.kernels.quantize_act_wgmma.work import Work

STEPS = 4  # products of 16 columns in a block


@dataclass(frozen=True)
class Consumer(TracedRecord):
    """A consumer warpgroup as one of its threads sees it.

    Attributes:
        work: of the CTA.
        warpgroup: which consumer.
        thread: of the warpgroup, 0 to 127.
        place: of the thread in a tile.
    """

    work: Work
    warpgroup: Int32
    thread: Int32
    place: FragmentPlace

    def take_block(self, words: Any, position: RingPosition) -> None:
        """Load this thread's words of the next block."""
        self.work.x_ring(self.warpgroup).wait_full(position)
        read_rows(words, self.work.slot_address(self.warpgroup, position.index), self.place)

    @cute.jit
    def free_slot(self, position: RingPosition) -> RingPosition:
        """Let the slot be filled again; to be called when the words were used.

        An arrival does not wait for loads in flight, and TMA does not either.
        """
        ring = self.work.x_ring(self.warpgroup)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.empty(position))
        return position.next()

    @cute.jit
    def multiply_block(self, sums: Any, words: Any, block: Any, accumulate: Int32) -> None:
        """Start sums (+)= words * lora_down[block]^T; the words stay as they are until it is done."""
        config = self.work.config
        self.work.wait_lora_block(block)
        tile = self.work.shared + block * (config.rank_tile * ROW_BYTES)
        descriptor = make_descriptor(tile, ROW_BYTES)
        fence_products(words)
        for step in cutlass.range_constexpr(STEPS):
            first = 2 * step
            a = (words[first], words[WORDS + first], words[first + 1], words[WORDS + first + 1])
            is_added = accumulate if cutlass.const_expr(step == 0) else Int32(1)
            multiply_from_registers(sums, a, descriptor + step * STEP_UNITS, is_added, config.dtype)
        commit_products()

    def is_inside(self, row: Int32) -> Boolean:
        """Return whether a row of the team, from its first one, is one of its rows."""
        return row < self.work.rows.count

    def place_in_exchange(self, tile: Int32) -> tuple[RingPosition, RingPosition]:
        """Return the positions at which a tile's values are sent and received."""
        return RingPosition(1, Int32(0), (tile & 1) ^ 1), RingPosition(1, Int32(0), tile & 1)

    @cute.jit
    def store_sums(self, tile: Int32, read_multiplier: Any) -> None:
        """Add up this CTA's share of a tile's sums and store them, rounded once.

        Args:
            tile: of the team, received.
            read_multiplier: returns what a row of the tile is multiplied by, or None.
        """
        work, config = self.work, self.work.config
        fours = cutlass.const_expr(config.rank_tile // RANKS_AT_ONCE)
        for first in cutlass.range_constexpr(0, count_items(config), 128):
            item = self.thread + first
            if cutlass.const_expr(first + 128 <= count_items(config)) or (
                item < count_items(config)
            ):
                total = work.exchange.add_up(item)
                row = work.exchange.rank * config.share + item // fours
                multiplier = read_multiplier(row)
                total = [self.finish(value, multiplier) for value in total]
                self.store_ranks(tile * TILE_ROWS + row, item % fours * RANKS_AT_ONCE, total)

    def finish(self, value: Float32, multiplier: Any) -> Float32:
        """Return a sum as it is rounded: times the call's factor, by the scale of its row."""
        value = mul_rn_f32(value, self.work.factor)
        if self.work.global_scale is not None:
            value = div_rn_f32(value, self.work.global_scale)
        return value if multiplier is None else multiplier(value)

    @cute.jit
    def store_ranks(self, row: Int32, column: Int32, values: Any) -> None:
        """Store four neighbouring ranks of a row of the team."""
        work, outputs = self.work, self.work.outputs
        if self.is_inside(row) & (column < outputs.lora_columns):
            place = Int64(work.rows.first + row) * outputs.lora_pitch + Int64(column)
            address = outputs.lora_act + place * 2
            low, high = self.round_pairs(values)
            st_global_pair(address, low, high)

    def round_pairs(self, values: Any) -> tuple[Uint32, Uint32]:
        """Return four numbers in the dtype of lora_act."""
        is_half = self.work.config.dtype == "float16"
        convert = cvt_rn_f16x2_f32 if is_half else cvt_rn_bf16x2_f32
        return convert(values[0], values[1]), convert(values[2], values[3])


def make_sums(rank_tile: int) -> Any:
    """Return the accumulator of a tile; one unused register without rank."""
    return cute.make_rmem_tensor((max(1, rank_tile // 2),), Float32)
