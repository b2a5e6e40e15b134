"""What all roles of a CTA share: tiles, barriers, and which part of K is this CTA's."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from halfbyte.device.tile_scheduler import TileScheduler
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.gemm_w4a4.buffers import Rings
from halfbyte.kernels.gemm_w4a4.config import EPILOGUE_WARPS

MMA_WARP = EPILOGUE_WARPS
LOAD_WARP = EPILOGUE_WARPS + 1
SCHEDULER_WARP = EPILOGUE_WARPS + 2  # there with cluster launch control only
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS


@dataclass(frozen=True)
class KRange(TracedRecord):
    """The part of a tile's products that one CTA adds up.

    Attributes:
        first_block, end_block: its blocks of K.
        num_chunks: its low-rank chunks.
    """

    first_block: Int32
    end_block: Int32
    num_chunks: Int32

    @property
    def is_empty(self) -> Any:
        """Whether there is nothing to add; chunks never come without a block."""
        return self.first_block == self.end_block


def split_k(num_blocks: Int32, num_chunks: Int32, rank: Int32, num_splits: int) -> KRange:
    """Return the share of CTA `rank` of `num_splits`.

    A chunk moves as many bytes as a block, so blocks and chunks together are cut into equal parts.
    All chunks are the last CTA's, and at least one block: an accumulator starts with a block.
    """
    if num_splits == 1:
        return KRange(Int32(0), Int32(num_blocks), Int32(num_chunks))
    total, last = num_blocks + num_chunks, num_blocks - 1
    is_last = rank == num_splits - 1
    first = cutlass.min(rank * total // num_splits, last)
    end = cutlass.min((rank + 1) * total // num_splits, last)
    return KRange(
        Int32(first),
        cutlass.select_(is_last, Int32(num_blocks), Int32(end)),
        cutlass.select_(is_last, Int32(num_chunks), Int32(0)),
    )


@dataclass(frozen=True)
class Work(TracedRecord):
    """What all roles of a CTA share.

    A tile is a few segments: some main blocks, then one low-rank chunk. Chunks at the end of K
    leave all blocks to the first segment; spread ones take an equal share each. The first block of
    a tile, which starts the accumulator, is a main one in any case.

    Attributes:
        scheduler: where tiles come from.
        rings: of blocks, accumulators, and what else there is.
        k: what this CTA multiplies of each tile.
        is_spread: whether chunks are spread between the blocks.
        is_leader: whether this CTA issues MMAs.
        rank: of this CTA in its cluster.
    """

    scheduler: TileScheduler
    rings: Rings
    k: KRange
    is_spread: cutlass.Constexpr
    is_leader: Any
    rank: Int32

    @property
    def num_segments(self) -> Int32:
        """Segments of a tile, at least one."""
        return cutlass.max(self.k.num_chunks, 1)

    def segment_end(self, segment: Int32) -> Int32:
        """Return the block at which a segment's chunk comes."""
        if self.is_spread:
            # Rounded up: the first segment has a block, even where there are more chunks.
            shares = (segment + 1) * (self.k.end_block - self.k.first_block)
            return self.k.first_block + cute.ceil_div(shares, self.num_segments)
        return self.k.end_block
