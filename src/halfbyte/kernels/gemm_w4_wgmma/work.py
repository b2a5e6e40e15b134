"""What all roles of a CTA share: tiles, barriers, and which part of K is this CTA's."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32

from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.tile_scheduler import TileScheduler
from halfbyte.device.traced_record import TracedRecord


@dataclass(frozen=True)
class KRange(TracedRecord):
    """The part of a tile's products that one pair of consumer warpgroups adds up.

    Attributes:
        first_block: of weight blocks, 128 columns each.
        num_blocks: at least one.
        first_chunk, num_chunks: of the low-rank chunks; there may be none.
    """

    first_block: Int32
    num_blocks: Int32
    first_chunk: Int32
    num_chunks: Int32


def split_k(num_blocks: Int32, num_chunks: Int32, splits: int, rank: Int32) -> KRange:
    """Return what part `rank` of `splits` adds up; the longer shares of chunks go to the last ones.

    So a CTA with one block more has no chunk more: blocks are dealt out from the first on.
    """
    first_block, own_blocks = _take_share(num_blocks, splits, rank)
    first_chunk, own_chunks = _take_share(num_chunks, splits, splits - 1 - rank)
    return KRange(first_block, own_blocks, first_chunk, own_chunks)


def _take_share(count: Int32, parts: int, index: Int32) -> tuple[Int32, Int32]:
    """Return (first, number) of part `index`; the first parts have one more where any has."""
    share, longer = count // parts, count % parts
    extra = cutlass.min(longer, index)
    return index * share + extra, share + cutlass.min(cutlass.max(longer - index, 0), 1)


@dataclass(frozen=True)
class Work(TracedRecord):
    """What the load warp and the consumer warpgroups of a ring share.

    Attributes:
        scheduler: where tiles come from; a tile is (token tile, group of `cluster` channel tiles).
        ring: slots of activations and weights.
        k: what is multiplied of each tile.
        num_channel_tiles: of the weight; a cluster's last one may lie beyond.
        sharers: CTAs of the cluster that share activations.
        rank: of this CTA among them.
        stages: slots of a ring. first_slot: of this pair's ring, which lies behind those before.
    """

    scheduler: TileScheduler
    ring: Ring
    k: KRange
    num_channel_tiles: Int32
    sharers: cutlass.Constexpr
    rank: Int32
    stages: cutlass.Constexpr
    first_slot: Int32

    def producer(self) -> RingPosition:
        """Return where the load warp starts."""
        return RingPosition.producer(self.stages, self.first_slot)

    def consumer(self) -> RingPosition:
        """Return where the consumer warpgroups start."""
        return RingPosition.consumer(self.stages, self.first_slot)

    def channel_tile(self, group: Int32) -> Int32:
        """Return this CTA's channel tile of a group; it may lie beyond the last."""
        return group * self.sharers + self.rank

    def loaded_channel_tile(self, group: Int32) -> Any:
        """Return the channel tile whose weights are loaded: the last one instead of none."""
        return cutlass.min(self.channel_tile(group), self.num_channel_tiles - 1)
