"""What the CTAs of a cluster tell each other about a tile: maxima of rows, partial sums of lora_act.

Every warp stores the maxima of its 16 rows to all CTAs, and its partial sums to those that add them
up: CTA d owns rows d * share to (d + 1) * share - 1 of the tile, and adds rank 0 first, the same
bits whoever was faster. Then it arrives at the full barrier of all CTAs. There is one buffer for
both warpgroups, with an empty barrier.

Plain stores and one fence a warp, not st.async: that one updates the receiver's barrier for each
thread's packet, about ten clocks each on an H200, 2048 packets a tile.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from halfbyte.device.float_arithmetic import add_rn_f32, max_u32
from halfbyte.device.memory_access import (
    ld_shared_b32,
    ld_shared_f32_vector,
    mapa_shared_cluster,
    mbarrier_wait_cluster,
    st_shared_cluster_f32_vector,
)
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.config import TILE_ROWS, WgmmaQuantizeConfig
from halfbyte.kernels.quantize_act_wgmma.fragment import ROW_STEP, FragmentPlace

RANKS_AT_ONCE = 4  # float32 of one store: 16 bytes
PAIR_BYTES = 8  # maxima of a thread's two rows
QUAD_LANES = 4  # lanes that share two rows


@dataclass(frozen=True)
class TileExchange(TracedRecord):
    """The buffers of this CTA, and its ring of one slot.

    Attributes:
        ring: full: four warps of every CTA, what they send being here; empty: four warps of every
            CTA, once they have read what came from here.
        maxima: shared address of float32 [sender, pair of rows, 2].
        sums: shared address of float32 [sender, row of the share, rank].
        rank: of this CTA in its cluster.
        config: the configuration.
    """

    ring: Ring
    maxima: Int32
    sums: Int32
    rank: Int32
    config: cutlass.Constexpr

    @cute.jit
    def wait_empty(self, position: RingPosition) -> None:
        """Wait until all CTAs have read what was sent last; `position` is a producer's."""
        mbarrier_wait_cluster(self.ring.empty(position).toint(), position.phase)

    @cute.jit
    def send_maxima(self, maxima: Any, place: FragmentPlace) -> None:
        """Store the maxima [2] of this thread's rows, which its quad shares, to all CTAs."""
        own = self.locate_maximum(place.row) + self.rank * (TILE_ROWS * 4)
        for first in cutlass.range_constexpr(0, self.config.cluster_k, QUAD_LANES):
            peer = place.quad + first
            if peer < self.config.cluster_k:
                target = mapa_shared_cluster(own, peer)
                st_shared_cluster_f32_vector(target, (maxima[0], maxima[1]))

    @cute.jit
    def send_sums(self, sums: Any, place: FragmentPlace) -> None:
        """Store this thread's accumulators, float32 [rank_tile / 2], to those that add them up."""
        config = self.config
        for half in cutlass.range_constexpr(2):
            row = place.row + half * ROW_STEP
            local = row % config.share * config.rank_tile + place.quad * RANKS_AT_ONCE
            own = self.sums + self.rank * self.sender_bytes + local * 4
            target = mapa_shared_cluster(own, row // config.share)
            for step in cutlass.range_constexpr(config.rank_tile // 16):
                first = 8 * step + 2 * half
                values = (sums[first], sums[first + 1], sums[first + 4], sums[first + 5])
                st_shared_cluster_f32_vector(target + step * 64, values)

    @cute.jit
    def publish(self, position: RingPosition, lane: Int32) -> None:
        """Tell all CTAs that what this warp sent is there."""
        cute.arch.fence_acq_rel_cluster()
        cute.arch.sync_warp()
        if lane < self.config.cluster_k:
            cute.arch.mbarrier_arrive(self.ring.full(position), lane)

    def wait_full(self, position: RingPosition) -> None:
        """Wait until all that was sent is here; `position` is a consumer's."""
        mbarrier_wait_cluster(self.ring.full(position).toint(), position.phase)

    def locate_maximum(self, row: Int32) -> Int32:
        """Return the address of sender 0's maximum of a row of the tile."""
        pair = row // 16 * ROW_STEP + row % ROW_STEP
        return self.maxima + pair * PAIR_BYTES + row % 16 // 8 * 4

    def read_maximum(self, row: Int32) -> Uint32:
        """Return the bits of the largest maximum of a row of the tile."""
        address = self.locate_maximum(row)
        largest = ld_shared_b32(address)
        for sender in range(1, self.config.cluster_k):
            largest = max_u32(largest, ld_shared_b32(address + sender * (TILE_ROWS * 4)))
        return largest

    @property
    def sender_bytes(self) -> int:
        """Bytes of sums that come from one CTA."""
        return self.config.share * self.config.rank_tile * 4

    def add_up(self, item: Int32) -> list[Any]:
        """Return four sums of this CTA's share; item i is its ranks from 4 * i on, row by row."""
        address = self.sums + item * (RANKS_AT_ONCE * 4)
        total = list(ld_shared_f32_vector(address, RANKS_AT_ONCE))
        for sender in range(1, self.config.cluster_k):
            part = ld_shared_f32_vector(address + sender * self.sender_bytes, RANKS_AT_ONCE)
            total = [add_rn_f32(one, other) for one, other in zip(total, part, strict=True)]
        return total

    @cute.jit
    def release(self, position: RingPosition, lane: Int32) -> None:
        """Let all senders send again; every warp that read calls it, when its values are used."""
        cute.arch.sync_warp()
        if lane < self.config.cluster_k:
            cute.arch.mbarrier_arrive(self.ring.empty(position), lane)


def count_items(config: WgmmaQuantizeConfig) -> int:
    """Return the fours of sums that a CTA adds up for one tile."""
    return config.share * config.rank_tile // RANKS_AT_ONCE
