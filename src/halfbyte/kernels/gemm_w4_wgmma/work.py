"""What all roles of a CTA share: tiles, barriers, and which part of K is this CTA's."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from halfbyte.device.ring_position import Ring
from halfbyte.device.tile_scheduler import TileScheduler
from halfbyte.device.traced_record import TracedRecord


@dataclass(frozen=True)
class KRange(TracedRecord):
    """The part of a tile's products that one CTA adds up.

    Attributes:
        first_block: of weight blocks, 128 columns each.
        num_blocks: at least one.
        num_chunks: low-rank chunks, all of them, 0 for a CTA that has none.
    """

    first_block: Int32
    num_blocks: Int32
    num_chunks: Int32


@dataclass(frozen=True)
class Work(TracedRecord):
    """What all roles of a CTA share.

    Attributes:
        scheduler: where tiles come from; a tile is (token tile, group of `cluster` channel tiles).
        ring: slots of activations and weights.
        k: what this CTA multiplies of each tile.
        num_channel_tiles: of the weight; a cluster's last one may lie beyond.
        sharers: CTAs of the cluster that share activations.
        rank: of this CTA among them.
    """

    scheduler: TileScheduler
    ring: Ring
    k: KRange
    num_channel_tiles: Int32
    sharers: cutlass.Constexpr
    rank: Int32

    def channel_tile(self, group: Int32) -> Int32:
        """Return this CTA's channel tile of a group; it may lie beyond the last."""
        return group * self.sharers + self.rank

    def loaded_channel_tile(self, group: Int32) -> Any:
        """Return the channel tile whose weights are loaded: the last one instead of none."""
        return cutlass.min(self.channel_tile(group), self.num_channel_tiles - 1)
