"""The loading warps: one for each consumer warpgroup's tiles of x, one for lora_down."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from halfbyte.device.operand_load import BlockLoad
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_lora.tile_load import PIECES, Matrix, gather_piece
from halfbyte.kernels.quantize_act_wgmma.config import (
    BLOCK_K,
    BOX_ROWS,
    BOXES,
    CONSUMER_WARPGROUPS,
    SLOT_BYTES,
    TILE_ROWS,
)
from halfbyte.kernels.quantize_act_wgmma.work import Work


@dataclass(frozen=True)
class LoadRoles(TracedRecord):
    """What the loading warps need.

    Attributes:
        work: of the CTA.
        x: loads of boxes of 16 rows, None where rows of x are not aligned.
        matrix: x by address, for rows that are not aligned.
        lora_down: loads of blocks, None without rank.
        rank_tile: which rows of lora_down.
    """

    work: Work
    x: BlockLoad | None
    matrix: Matrix
    lora_down: BlockLoad | None
    rank_tile: Int32

    @cute.jit
    def lora_down_role(self) -> None:
        """Load this CTA's slice of lora_down, once."""
        config = self.work.config
        block_bytes = cutlass.const_expr(config.lora_down_bytes // config.blocks)
        for block in cutlass.range_constexpr(config.blocks):
            full = self.work.lora_barriers + block
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, block_bytes)
            self.lora_down.copy(self.rank_tile, self.work.first_block + block, block, full)

    @cute.jit
    def x_role(self, warpgroup: Int32, lane: Int32) -> None:
        """Load the tiles of a warpgroup: every second one of the team, block by block."""
        work = self.work
        stages = work.config.stages
        ring = work.x_ring(warpgroup)
        position = RingPosition.producer(stages)
        for tile in cutlass.range(warpgroup, work.rows.tiles, CONSUMER_WARPGROUPS, unroll=1):
            for block in cutlass.range(work.config.blocks, unroll=1):
                ring.wait_empty(position)
                if cutlass.const_expr(self.x is not None):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(ring.full(position), SLOT_BYTES)
                    self.copy_boxes(
                        tile, block, position.index + warpgroup * stages, ring, position
                    )
                else:
                    slot = work.slot_address(warpgroup, position.index)
                    self.gather(tile, block, slot, lane)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(ring.full(position))
                position = position.next()

    def copy_boxes(
        self, tile: Int32, block: Int32, slot: Int32, ring: Any, position: RingPosition
    ) -> None:
        """Start the loads of a slot; a box without rows of the team is one beyond M: zeros."""
        work = self.work
        assert self.x is not None
        first = work.rows.first // BOX_ROWS + tile * BOXES
        end = (work.rows.first + work.rows.count + (BOX_ROWS - 1)) // BOX_ROWS
        beyond = (work.num_rows + (BOX_ROWS - 1)) // BOX_ROWS
        for box in range(BOXES):
            unit = cutlass.select_(first + box < end, first + box, beyond)
            self.x.copy(unit, work.first_block + block, slot * BOXES + box, ring.full(position))

    @cute.jit
    def gather(self, tile: Int32, block: Int32, slot: Int32, lane: Int32) -> None:
        """Fill a slot element by element; what lies outside of the team's rows or K is zero."""
        row = self.work.rows.first + tile * TILE_ROWS
        column = (self.work.first_block + block) * BLOCK_K
        for item in cutlass.range(lane, TILE_ROWS * PIECES, 32, unroll=1):
            gather_piece(self.matrix, row, column, slot, item)
