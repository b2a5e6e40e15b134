"""INT4 weights on integer tensor cores: 64 columns at a time, scaled before they are added.

A group of INT4 is half a weight block: two products of 32 columns. Their int32 sums are exact; they
become float32 and are multiplied with the group's scales on their way into the accumulator:

    accumulator[n, m] += (float(sum) * weight_scale[n, j]) * act_group_scale[m, j]     mode "exact"
    accumulator[n, m] += float(sum) * weight_scale[n, j]                               mode "int8"

Codes are decoded to bytes that hold 16 times their value (two's complement in the upper half), and
weight scales are divided by 16: a mask, or a shift and a mask, for four weights. |sum| is at most
64 * 16 * 8 * 128 = 2^20: float32 holds it.

While a group's products run, the next group's codes are decoded. A warpgroup's threads fetch the
activation scales of the next block, one token each, and share them through two buffers.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import cvt_f32_f16x2, fma_rn_f32, mul_rn_f32
from halfbyte.device.memory_access import (
    ld_global_b32,
    ld_shared_f32_vector,
    ld_shared_v4,
    st_shared_f32,
)
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.warpgroup_product import (
    STEP_UNITS,
    commit_products,
    count_accumulators,
    fence_products,
    make_descriptor,
    multiply_from_registers,
    wait_for_products,
)
from halfbyte.kernels.gemm_w4_wgmma.config import (
    HALF_BYTES,
    ROW_BYTES,
    WARPGROUP_BLOCK_BYTES,
    plan_storage,
)
from halfbyte.kernels.gemm_w4_wgmma.epilogue import FIRST_BARRIER, WARPGROUP_THREADS
from halfbyte.kernels.gemm_w4_wgmma.sm90 import MultiplyRole

GROUPS = 2  # of a block
INSTRUCTIONS = 2  # of a group
HIGH_NIBBLES = 0xF0F0F0F0
CODE_FACTOR = 16.0  # of an operand byte over its code
NUM_GROUP_BUFFERS = 2


@dataclass(frozen=True)
class IntegerMultiplyRole(MultiplyRole):
    """One consumer warpgroup.

    Attributes:
        act_group_scale: float16 [M, K_pad / 64] in global memory, None in mode "int8".
        sums: Int32 [tokens / 2] in registers, of one group.
        weight_scales: float32 [4] in registers: of each group of a block, channels g and g + 8.
        group_word: Uint32 [1] in registers: activation scales of this thread's token, next block.
    """

    act_group_scale: Any
    sums: Any
    weight_scales: Any
    group_word: Any

    @cute.jit
    def multiply_role(self, epilogue: Any) -> None:
        """Multiply and store every tile."""
        position = self.work.consumer()
        tile = self.work.scheduler.start()
        while tile.is_valid:
            token_tile, group = tile.place
            factors = epilogue.load_factors(token_tile, group)
            position = self.multiply_groups(position, token_tile)
            if cutlass.const_expr(self.config.lora_dtype is not None):
                position = self.multiply_chunks(position)
            epilogue.store_tile(self.accumulator, factors, token_tile, group)
            tile = tile.next()
        epilogue.finish_role()

    @cute.jit
    def multiply_groups(self, position: RingPosition, token_tile: Int32) -> RingPosition:
        """Multiply all blocks of a tile; return the position behind them."""
        num_blocks = self.work.k.num_blocks
        self.accumulator.fill(0.0)
        self.fetch_group_scales(token_tile, Int32(0))
        self.work.ring.wait_full(position)
        self.prepare(position, 0)
        for block in cutlass.range(num_blocks, unroll=1):
            self.multiply_group(position, 0)
            self.prepare(position, 1)
            self.share_group_scales(token_tile, block)
            wait_for_products(0, self.sums)
            self.add_group(block, 0)
            self.multiply_group(position, 1)
            following = position.next()
            if block + 1 < num_blocks:
                self.work.ring.wait_full(following)
                self.prepare(following, 0)
            wait_for_products(0, self.sums)
            self.release(position)
            self.add_group(block, 1)
            position = following
        return position

    @cute.jit
    def multiply_chunks(self, position: RingPosition) -> RingPosition:
        """Add all low-rank chunks of a tile; return the position behind them."""
        for _ in cutlass.range(self.work.k.num_chunks, unroll=1):
            self.load_fragments(position, 0)
            self.multiply_chunk(position, 0)
            wait_for_products(0, self.accumulator)
            self.release(position)
            position = position.next()
        return position

    def prepare(self, position: RingPosition, group: int) -> None:
        """Read and decode a group's codes into its operand, and read its scales."""
        slot_bytes = plan_storage(self.config).weight_slot_bytes
        block = self.buffers.weights.toint() + position.index * slot_bytes
        block += self.warpgroup * WARPGROUP_BLOCK_BYTES
        words = ld_shared_v4(block + group * HALF_BYTES + self.thread * 16)
        scales = block + GROUPS * HALF_BYTES + self.thread // 4 * 16 + group * 8
        for row, scale in enumerate(ld_shared_f32_vector(scales, 2)):
            scaled = mul_rn_f32(scale, Float32(1 / CODE_FACTOR))
            self.weight_scales[2 * group + row] = scaled
        for row in range(2):
            for index in range(INSTRUCTIONS):
                word = words[2 * row + index]
                first = 4 * index + row
                self.operands[group][first] = word & Uint32(HIGH_NIBBLES)
                self.operands[group][first + 2] = (word << 4) & Uint32(HIGH_NIBBLES)

    def multiply_group(self, position: RingPosition, group: int) -> None:
        """Issue the products of a group."""
        operand = self.operands[group]
        descriptor = make_descriptor(self.slot_address(position), ROW_BYTES)
        fence_products(operand)
        for index in range(INSTRUCTIONS):
            multiply_from_registers(
                self.sums,
                tuple(operand[4 * index + word] for word in range(4)),
                descriptor + STEP_UNITS * (INSTRUCTIONS * group + index),
                Int32(index),
                "int8",
            )
        commit_products()

    def add_group(self, block: Int32, group: int) -> None:
        """Scale a group's sums and add them to the accumulator."""
        for unit in range(self.config.tokens // 8):
            tokens = None
            if self.act_group_scale is not None:
                place = 8 * unit + self.thread % 4 * 2
                tokens = ld_shared_f32_vector(self.group_place(block, group) + place * 4, 2)
            for row in range(2):
                scale = self.weight_scales[2 * group + row]
                for index in range(2):
                    place = 4 * unit + 2 * row + index
                    value = self.sums[place].to(Float32)
                    factor = scale
                    if tokens is not None:
                        value, factor = mul_rn_f32(value, scale), tokens[index]
                    self.accumulator[place] = fma_rn_f32(value, factor, self.accumulator[place])

    def group_place(self, block: Int32, group: int) -> Int32:
        """Return the shared address of a group's activation scales, float32 [tokens]."""
        buffer = self.warpgroup * NUM_GROUP_BUFFERS + block % NUM_GROUP_BUFFERS
        row = buffer * GROUPS + group
        return self.buffers.group_scales.toint() + row * (self.config.tokens * 4)

    @cute.jit
    def fetch_group_scales(self, token_tile: Int32, block: Int32) -> None:
        """Start reading both activation scales of this thread's token in a block."""
        if cutlass.const_expr(self.act_group_scale is not None):
            scales = self.act_group_scale
            token = token_tile * self.config.tokens + self.thread
            self.group_word[0] = Uint32(0)
            is_inside = (self.thread < self.config.tokens) & (token < scales.shape[0])
            if is_inside & (block < self.work.k.num_blocks):
                column = (self.work.k.first_block + block) * GROUPS
                offset = Int64(token) * scales.stride[0] + column
                self.group_word[0] = ld_global_b32(scales.iterator.toint() + offset * 2)

    @cute.jit
    def share_group_scales(self, token_tile: Int32, block: Int32) -> None:
        """Hand the warpgroup the scales that were fetched for `block`, and fetch the next ones.

        One barrier a block is enough for two buffers: who fills one again has met at the barrier of
        the block between with all that read it.
        """
        if cutlass.const_expr(self.act_group_scale is not None):
            if self.thread < self.config.tokens:
                for group, scale in enumerate(cvt_f32_f16x2(self.group_word[0])):
                    st_shared_f32(self.group_place(block, group) + self.thread * 4, scale)
            self.fetch_group_scales(token_tile, block + 1)
            cute.arch.barrier(
                barrier_id=FIRST_BARRIER + self.warpgroup, number_of_threads=WARPGROUP_THREADS
            )


def make_integer_role(parts: Any, act_group_scale: Any) -> IntegerMultiplyRole:
    """Return the role of a warpgroup: `parts` are the fields of a MultiplyRole, in order."""
    sums = cute.make_rmem_tensor((count_accumulators(parts[0].tokens),), Int32)
    weight_scales = cute.make_rmem_tensor((2 * GROUPS,), Float32)
    group_word = cute.make_rmem_tensor((1,), Uint32)
    return IntegerMultiplyRole(*(*parts, act_group_scale, sums, weight_scales, group_word))
