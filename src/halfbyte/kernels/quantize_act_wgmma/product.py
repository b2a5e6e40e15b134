"""lora_act: products of a cluster's rows with slices of K, summed over the cluster at the end.

load warp            lora_down [ranks, 64] and x [rows, 64] by TMA -> ring slots
product warpgroups   D [64 ranks, rows] += lora_down * x^T, both from shared memory
all, after a cluster barrier   every CTA adds the partial sums of its rows, rank 0 first, and
                     divides by their scales, which it found itself
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from halfbyte.device.float_arithmetic import (
    add_rn_f32,
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    div_rn_f32,
    mul_rn_f32,
)
from halfbyte.device.memory_access import (
    ld_shared_cluster_f32_vector,
    ld_shared_f32,
    mapa_shared_cluster,
    st_global_pair,
    st_shared_f32,
)
from halfbyte.device.operand_load import BlockLoad
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warpgroup_product import (
    STEP_UNITS,
    commit_products,
    fence_products,
    make_accumulator,
    make_descriptor,
    multiply_from_shared,
    wait_for_products,
)
from halfbyte.kernels.quantize_act_lora.tile_load import PIECES, Matrix, gather_piece
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K, PRODUCT_RANKS, ROW_BYTES
from halfbyte.kernels.quantize_act_wgmma.work import Work

RANKS_AT_ONCE = 4  # float32 of one load: 16 bytes
_STEPS = 4  # products of 16 columns in a block


@dataclass(frozen=True)
class LoadRole(TracedRecord):
    """The load warp.

    Attributes:
        work: of the CTA.
        x: loads of boxes from the cluster's first row on, None where rows of x are not aligned.
        lora_down: loads of blocks.
        rank_tile: which rows of lora_down.
    """

    work: Work
    x: BlockLoad | None
    lora_down: BlockLoad
    rank_tile: Int32

    @cute.jit
    def run(self, lane: Int32) -> None:
        """Load all blocks; weights of the first ones before the kernel ahead has ended."""
        work, ring = self.work, self.work.ring
        stages = cutlass.const_expr(work.config.stages)
        ahead = RingPosition.producer(stages)
        for block in cutlass.range(stages, unroll=1):
            if block < work.blocks.count:
                self.load_lora_down(block, ahead)
            ahead = ahead.next()
        if cutlass.const_expr(work.config.use_pdl):
            cute.arch.griddepcontrol_wait()
        position = RingPosition.producer(stages)
        for block in cutlass.range(work.blocks.count, unroll=1):
            if block >= stages:
                ring.wait_empty(position)
                self.load_lora_down(block, position)
            self.load_x(block, position, lane)
            position = position.next()

    @cute.jit
    def load_lora_down(self, block: Int32, position: RingPosition) -> None:
        """Expect a slot's bytes and start the load of its lora_down."""
        config, full = self.work.config, self.work.ring.full(position)
        x_bytes = config.tokens * ROW_BYTES * config.x_is_aligned
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, config.rank_tile * ROW_BYTES + x_bytes)
        self.lora_down.copy(self.rank_tile, self.work.blocks.first + block, position.index, full)

    @cute.jit
    def load_x(self, block: Int32, position: RingPosition, lane: Int32) -> None:
        """Start the load of a slot's x, or gather it."""
        work = self.work
        full = work.ring.full(position)
        if cutlass.const_expr(self.x is not None):
            self.x.copy(0, work.blocks.first + block, position.index, full)
        else:
            slot = work.slot_address(position.index) + work.config.lora_down_slot_bytes
            column = (work.blocks.first + block) * BLOCK_K
            x = Matrix(
                work.x.address, work.rows.first + work.rows.count, work.x.columns, work.x.pitch
            )
            for item in cutlass.range(lane, work.config.tokens * PIECES, 32, unroll=1):
                gather_piece(x, work.rows.first, column, slot, item)
            cute.arch.fence_view_async_shared()  # what was stored is read by wgmma
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(full)


@dataclass(frozen=True)
class ProductRole(TracedRecord):
    """A product warpgroup as one of its threads sees it.

    Attributes:
        work: of the CTA.
        thread: of all product threads.
    """

    work: Work
    thread: Int32

    @cute.jit
    def run(self) -> None:
        """Multiply all blocks and leave the sums in shared memory."""
        work, config = self.work, self.work.config
        warpgroup = cute.arch.make_warp_uniform(self.thread // 128)
        sums = make_accumulator(config.tokens)
        sums.fill(0.0)
        position = RingPosition.consumer(config.stages)
        before = position
        for block in cutlass.range(work.blocks.count, unroll=1):
            work.ring.wait_full(position)
            slot = work.slot_address(position.index)
            a = make_descriptor(slot + warpgroup * (PRODUCT_RANKS * ROW_BYTES), ROW_BYTES)
            b = make_descriptor(slot + config.lora_down_slot_bytes, ROW_BYTES)
            fence_products(sums)
            for step in cutlass.range_constexpr(_STEPS):
                offset = step * STEP_UNITS
                multiply_from_shared(sums, a + offset, b + offset, config.dtype)
            commit_products()
            wait_for_products(1, sums)
            if (block > 0) & (self.thread % 128 == 0):
                cute.arch.mbarrier_arrive(work.ring.empty(before))
            before = position
            position = position.next()
        wait_for_products(0, sums)
        self.store_partial(sums)

    @cute.jit
    def store_partial(self, sums: Any) -> None:
        """Store the accumulator, float32 [tokens / 2], as [row, rank]."""
        config = self.work.config
        lane = self.thread % 32
        rank = self.thread // 32 * 16 + lane // 4
        first = self.work.shared + config.sums_offset + lane % 4 * (2 * config.sum_pitch * 4)
        for half in cutlass.range_constexpr(2):
            this_rank = rank + 8 * half
            if this_rank < config.rank_tile:
                for index in cutlass.range_constexpr(config.tokens // 4):
                    row = index // 2 * 8 + index % 2  # and two more for each quad lane
                    value = sums[index // 2 * 4 + 2 * half + index % 2]
                    place = row * config.sum_pitch * 4
                    st_shared_f32(first + place + this_rank * 4, value)


@cute.jit
def finish_sums(work: Work, thread: Int32, threads: cutlass.Constexpr) -> None:
    """Add up the partial sums of this CTA's rows, store them rounded once; all threads call it."""
    config = work.config
    fours = cutlass.const_expr(config.rank_tile // RANKS_AT_ONCE)
    own = work.shared + config.sums_offset
    for item in cutlass.range(thread, work.rows.own_count * fours, threads, unroll=1):
        row = item // fours
        column = item % fours * RANKS_AT_ONCE
        place = own + ((work.rows.own + row) * config.sum_pitch + column) * 4
        total = None
        for peer in cutlass.range_constexpr(config.cluster_k):
            address = mapa_shared_cluster(place, Int32(peer))
            part = ld_shared_cluster_f32_vector(address, RANKS_AT_ONCE)
            total = add_parts(total, part)
        scale = None
        if cutlass.const_expr(config.has_token_scale):
            scale = ld_shared_f32(work.shared + config.scales_offset + row * 4)
        values = [_finish(value, scale, work) for value in total]
        if column < work.outputs.lora_columns:
            this_row = Int64(work.rows.first + work.rows.own + row)
            place_of_row = this_row * work.outputs.lora_pitch + Int64(column)
            is_half = cutlass.const_expr(config.dtype == "float16")
            convert = cvt_rn_f16x2_f32 if is_half else cvt_rn_bf16x2_f32
            low, high = convert(values[0], values[1]), convert(values[2], values[3])
            st_global_pair(work.outputs.lora_act + place_of_row * 2, low, high)


def add_parts(total: Any, part: Any) -> list[Any]:
    """Return total + part, number by number; `part` where there is no total yet."""
    if total is None:
        return list(part)
    return [add_rn_f32(one, other) for one, other in zip(total, part, strict=True)]


def _finish(value: Float32, scale: Any, work: Work) -> Float32:
    value = mul_rn_f32(value, work.factor)
    for divisor in (work.global_scale, scale):
        if divisor is not None:
            value = div_rn_f32(value, divisor)
    return value
