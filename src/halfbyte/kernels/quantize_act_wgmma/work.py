"""Which rows and columns a CTA has, and what its warps share; every role gets one record of it."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from halfbyte.device.ring_position import Ring
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.config import (
    BOX_ROWS,
    SLOT_BYTES,
    TILE_ROWS,
    WgmmaQuantizeConfig,
)
from halfbyte.kernels.quantize_act_wgmma.exchange import TileExchange


@dataclass(frozen=True)
class Rows(TracedRecord):
    """The rows of a team.

    Attributes:
        first: its first row, a multiple of 16.
        count: its rows; the last team may have fewer than others, or none.
        tiles: of 64 rows.
    """

    first: Int32
    count: Int32
    tiles: Int32


def share_rows(rows: Int32, team: Int32, teams: Int32) -> Rows:
    """Return the part of M rows that a team has; parts differ by the granularity of 16 rows."""
    units = (rows + (BOX_ROWS - 1)) // BOX_ROWS
    share = (units + teams - 1) // teams * BOX_ROWS
    first = team * share
    left = rows - first
    count = cutlass.select_(left < share, left, share)
    count = cutlass.select_(count < 0, Int32(0), count)
    return Rows(first, count, (count + (TILE_ROWS - 1)) // TILE_ROWS)


@dataclass(frozen=True)
class Outputs(TracedRecord):
    """Addresses of what is written, None for what the configuration does not have.

    Attributes:
        act: of row 0 in this CTA's slice of K. act_pitch: bytes from one row to the next.
        act_blocks: blocks of 64 columns of this CTA that act has.
        token_scale: float32 [M].
        group_scale: float16 [M, groups], of this CTA's first one; group_pitch: elements a row.
        lora_act: of row 0 at this CTA's first rank; lora_pitch: elements from one row to the next.
        lora_columns: ranks of this CTA that lora_act has.
    """

    act: Int64
    act_pitch: Int64
    act_blocks: Int32
    token_scale: Any
    group_scale: Any
    group_pitch: Any
    lora_act: Any
    lora_pitch: Any
    lora_columns: Any


@dataclass(frozen=True)
class Work(TracedRecord):
    """What all roles of a CTA know.

    Attributes:
        rows: of the team.
        num_rows, num_columns: M and K.
        first_block: the first block of 64 columns of this CTA's slice.
        slice: which slice of K of the team, 0 writes what a row has once.
        is_writing: whether this team writes act, and not only its ranks of lora_act.
        x_rings: barriers of the rings of x, one ring for each consumer warpgroup; full: 1 arrival
            and the bytes of a slot, empty: four warps.
        lora_barriers: pointer to a full barrier for each block of lora_down, None without rank.
        shared: shared address of all storage.
        exchange: with the other CTAs of the cluster.
        outputs: what is written.
        factor: the power of two that sums are multiplied by.
        global_scale: what values and sums are divided by, None for none.
        config: the configuration.
    """

    rows: Rows
    num_rows: Int32
    num_columns: Int32
    first_block: Int32
    slice: Int32
    is_writing: cutlass.Boolean
    x_rings: Any
    lora_barriers: Any
    shared: Int32
    exchange: TileExchange
    outputs: Outputs
    factor: Float32
    global_scale: Any
    config: cutlass.Constexpr

    def x_ring(self, warpgroup: Int32) -> Ring:
        """Return the ring of a consumer warpgroup."""
        return Ring(self.x_rings + warpgroup * (2 * self.config.stages), self.config.stages)

    def slot_address(self, warpgroup: Int32, index: Int32) -> Int32:
        """Return the shared address of a slot of a warpgroup's ring."""
        config: WgmmaQuantizeConfig = self.config
        first = self.shared + config.ring_offset
        return first + (index + warpgroup * config.stages) * SLOT_BYTES

    def wait_lora_block(self, block: Any) -> None:
        """Wait until a block of lora_down is in shared memory."""
        cute.arch.mbarrier_wait(self.lora_barriers + block, 0)
