"""The load warp: blocks of activations and weights, and low-rank chunks, into ring slots."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from halfbyte.device.memory_access import cp_async_bulk
from halfbyte.device.operand_load import BlockLoad, TmaOperand
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.swizzled_box import make_load_operand, partition_boxes
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.gemm_w4_wgmma.buffers import (
    CHUNK_ROW_BYTES,
    SharedBuffers,
    act_box,
    view_act_boxes,
    view_chunk_boxes,
)
from halfbyte.kernels.gemm_w4_wgmma.config import (
    BLOCK_K,
    CHUNK_RANKS,
    CONSUMER_WARPGROUPS,
    HALF_BYTES,
    LORA_BLOCK_BYTES,
    ROW_BYTES,
    SCALE_BYTES,
    WARPGROUP_BLOCK_BYTES,
    WEIGHT_BLOCK_BYTES,
    WgmmaGemmConfig,
    plan_storage,
)
from halfbyte.kernels.gemm_w4_wgmma.work import Work


class Sources(NamedTuple):
    """Where loads come from; the last two are None for rank 0.

    Attributes:
        act: descriptor of [M, K_pad]. weight_blocks: uint8 [N / 128, K / 128, 9216].
        lora_act: descriptor of [M, R_pad]. lora_blocks: uint8 [N / 128, R / 32, 8192].
    """

    act: TmaOperand
    weight_blocks: Any
    lora_act: TmaOperand | None
    lora_blocks: Any


def make_sources(config: WgmmaGemmConfig, tensors: Any) -> Sources:
    """Return the sources of a launch, descriptors made."""
    rows, is_multicast = config.tokens // config.cluster, config.cluster > 1
    lora_act = None
    if config.lora_dtype is not None:
        lora_act = make_load_operand(tensors.lora_act, rows, CHUNK_ROW_BYTES, is_multicast)
    return Sources(
        make_load_operand(tensors.act, rows, ROW_BYTES, is_multicast),
        tensors.weight_blocks,
        lora_act,
        tensors.lora_blocks,
    )


@dataclass(frozen=True)
class LoadRole(TracedRecord):
    """The load warp: fills ring slots, tile by tile.

    Attributes:
        config: of the kernel. work: of this CTA. sources: in global memory. buffers: shared memory.
    """

    config: cutlass.Constexpr
    work: Work
    sources: Sources
    buffers: SharedBuffers

    @cute.jit
    def load_role(self) -> None:
        """Load every slot of every tile."""
        work, config = self.work, self.config
        self.prefetch_descriptors()
        act, chunks = self.partition()
        slots_per_block = BLOCK_K // config.slot_columns
        num_slots = work.k.num_blocks * slots_per_block
        first_slot = work.k.first_block * slots_per_block
        position = work.producer()
        ahead = Int32(0)
        tile = work.scheduler.start()
        if cutlass.const_expr(config.use_pdl):
            ahead = cutlass.min(num_slots, min(config.ahead, config.stages))
            self.load_weights_ahead(tile, first_slot, ahead)
        while tile.is_valid:
            token_tile, group = tile.place
            channel_tile = work.loaded_channel_tile(group)
            for index in cutlass.range(num_slots, unroll=1):
                slot = first_slot + index
                if index >= ahead:
                    work.ring.wait_empty(position)
                    self.expect(position, plan_storage(config).slot_bytes)
                    self.load_weights(position, channel_tile, slot)
                self.load_act(act, position, token_tile, slot)
                position = position.next()
            if cutlass.const_expr(config.lora_dtype is not None):
                for chunk in cutlass.range(work.k.num_chunks, unroll=1):
                    place = (token_tile, channel_tile, work.k.first_chunk + chunk)
                    self.load_chunk(chunks, position, place)
                    position = position.next()
            ahead = Int32(0)
            tile = tile.next()

    def prefetch_descriptors(self) -> None:
        """Fetch the descriptors, which the first loads would wait for."""
        with cute.arch.elect_one():
            cpasync.prefetch_descriptor(self.sources.act.atom)
            if self.sources.lora_act is not None:
                cpasync.prefetch_descriptor(self.sources.lora_act.atom)

    def partition(self) -> tuple[BlockLoad, BlockLoad | None]:
        """Return the loads of activations and of low-rank activations, None for rank 0."""
        config = self.config
        mask = None
        if config.cluster > 1:
            mask = cutlass.Int16((1 << config.cluster) - 1)
        act = partition_boxes(
            self.sources.act, view_act_boxes(config, self.buffers), act_box(config), mask
        )
        if self.sources.lora_act is None:
            return act, None
        shape = config.tokens // config.cluster, CHUNK_RANKS
        boxes = view_chunk_boxes(config, self.buffers)
        return act, partition_boxes(self.sources.lora_act, boxes, shape, mask)

    @cute.jit
    def load_weights_ahead(self, tile: Any, first_slot: Int32, count: Int32) -> None:
        """Load the first weights of a tile, then wait for the kernel that writes activations."""
        if tile.is_valid:
            position = self.work.producer()
            channel_tile = self.work.loaded_channel_tile(tile.place[1])
            for index in cutlass.range(count, unroll=1):
                self.expect(position, plan_storage(self.config).slot_bytes)
                self.load_weights(position, channel_tile, first_slot + index)
                position = position.next()
        cute.arch.griddepcontrol_wait()

    def expect(self, position: RingPosition, num_bytes: int) -> None:
        """Let the slot's full barrier wait for as many bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.work.ring.full(position), num_bytes)

    def load_act(
        self, act: BlockLoad, position: RingPosition, token_tile: Int32, slot: Int32
    ) -> None:
        """Start the loads of a slot's activations, this CTA's share of the rows."""
        config, work = self.config, self.work
        row = token_tile * config.cluster + work.rank
        boxes = config.slot_columns * config.act_bytes // ROW_BYTES
        for box in range(boxes):
            target = (work.rank if config.cluster > 1 else 0, box, position.index)
            act.copy(row, slot * boxes + box, target, work.ring.full(position))

    def load_weights(self, position: RingPosition, channel_tile: Int32, slot: Int32) -> None:
        """Start the loads of a slot's weights: one block, or half of one with its scales."""
        config, storage = self.config, plan_storage(self.config)
        blocks = self.sources.weight_blocks
        num_blocks = blocks.shape[1]
        barrier = self.work.ring.full(position).toint()
        target = self.buffers.weights.toint() + position.index * storage.weight_slot_bytes
        slots_per_block = BLOCK_K // config.slot_columns
        place = Int64(channel_tile) * num_blocks + slot // slots_per_block
        source = blocks.iterator.toint() + place * WEIGHT_BLOCK_BYTES
        with cute.arch.elect_one():
            if slots_per_block == 1:
                cp_async_bulk(target, source, WEIGHT_BLOCK_BYTES, barrier)
            else:
                half = Int64(slot % 2) * HALF_BYTES
                for _ in range(CONSUMER_WARPGROUPS):
                    cp_async_bulk(target, source + half, HALF_BYTES, barrier)
                    scales = source + 2 * HALF_BYTES
                    cp_async_bulk(target + HALF_BYTES, scales, SCALE_BYTES, barrier)
                    target = target + HALF_BYTES + SCALE_BYTES
                    source = source + WARPGROUP_BLOCK_BYTES

    def load_chunk(self, chunks: Any, position: RingPosition, place: Any) -> None:
        """Start the loads of low-rank chunk (token tile, channel tile, chunk) into a slot."""
        config, work = self.config, self.work
        token_tile, channel_tile, chunk = place
        work.ring.wait_empty(position)
        self.expect(position, config.tokens * CHUNK_ROW_BYTES + LORA_BLOCK_BYTES)
        barrier = work.ring.full(position)
        blocks = self.sources.lora_blocks
        source = Int64(channel_tile) * blocks.shape[1] + chunk
        with cute.arch.elect_one():
            cp_async_bulk(
                lora_blocks_address(config, self.buffers, position.index),
                blocks.iterator.toint() + source * LORA_BLOCK_BYTES,
                LORA_BLOCK_BYTES,
                barrier.toint(),
            )
        row = token_tile * config.cluster + work.rank
        target = (work.rank if config.cluster > 1 else 0, position.index)
        chunks.copy(row, chunk, target, barrier)


def lora_blocks_address(config: WgmmaGemmConfig, buffers: SharedBuffers, slot: Int32) -> Int32:
    """Return the shared address of a slot's lora_blocks."""
    storage = plan_storage(config)
    if storage.lora_in_weights:
        return buffers.weights.toint() + slot * storage.weight_slot_bytes
    behind = config.tokens * CHUNK_ROW_BYTES
    return buffers.act.toint() + slot * storage.act_slot_bytes + behind
