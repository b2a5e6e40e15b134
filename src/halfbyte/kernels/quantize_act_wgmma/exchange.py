"""What the CTAs of a cluster tell each other: maxima of rows, and partial sums of lora_act.

    maxima  every warp sends the maxima of its 16 rows to all CTAs; no reply. A buffer is written
            again two tiles later by the same warpgroup, and a CTA sends its next maxima only when it
            has read these: two buffers are enough, and nobody waits for an empty one
    sums    of a tile [64 rows, ranks], every CTA adds up its share of rows, rank 0 first: the same
            bits whoever was faster. One buffer for both warpgroups, with an empty barrier

Both travel by st.async, which counts its bytes at the receiver's full barrier.
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
    st_async_f32_vector,
)
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.config import (
    MAXIMA_BUFFERS,
    TILE_ROWS,
    WgmmaQuantizeConfig,
)
from halfbyte.kernels.quantize_act_wgmma.fragment import ROW_STEP, FragmentPlace

RANKS_AT_ONCE = 4  # float32 of one store: 16 bytes
_PAIR_BYTES = 8  # maxima of a thread's two rows


@dataclass(frozen=True)
class MaximaExchange(TracedRecord):
    """Maxima of one warpgroup's tiles.

    Attributes:
        barriers: pointer to one full barrier a buffer: 1 arrival (expect_tx) and the bytes of all
            CTAs.
        buffers: shared address of float32 [buffer, sender, pair of rows, 2].
        rank: of this CTA in its cluster.
        config: the configuration.
    """

    barriers: Any
    buffers: Int32
    rank: Int32
    config: cutlass.Constexpr

    def of_warpgroup(self, warpgroup: Int32) -> "MaximaExchange":
        """Return the exchange of another warpgroup, this being that of the first."""
        return MaximaExchange(
            self.barriers + warpgroup * MAXIMA_BUFFERS,
            self.buffers + warpgroup * (MAXIMA_BUFFERS * self.buffer_bytes),
            self.rank,
            self.config,
        )

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer."""
        return self.config.cluster_k * TILE_ROWS * 4

    def locate(self, buffer: Int32, row: Int32) -> Int32:
        """Return the address of sender 0's maximum of a row of the tile."""
        pair = row // 16 * ROW_STEP + row % ROW_STEP
        return self.buffers + buffer * self.buffer_bytes + pair * _PAIR_BYTES + row % 16 // 8 * 4

    @cute.jit
    def send(self, maxima: Any, buffer: Int32, place: FragmentPlace, thread: Int32) -> None:
        """Send the maxima [2] of this thread's rows, which its quad shares, to all CTAs."""
        full = self.barriers + buffer
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.buffer_bytes)
        own = self.locate(buffer, place.row) + self.rank * (TILE_ROWS * 4)
        for first in cutlass.range_constexpr(0, self.config.cluster_k, 4):
            peer = place.quad + first
            if peer < self.config.cluster_k:
                st_async_f32_vector(
                    mapa_shared_cluster(own, peer),
                    (maxima[0], maxima[1]),
                    mapa_shared_cluster(full.toint(), peer),
                )

    def wait(self, buffer: Int32, phase: Int32) -> None:
        """Wait until the maxima of all CTAs are here."""
        mbarrier_wait_cluster((self.barriers + buffer).toint(), phase)

    def read(self, buffer: Int32, row: Int32) -> Uint32:
        """Return the bits of the largest maximum of a row of the tile."""
        address = self.locate(buffer, row)
        largest = ld_shared_b32(address)
        for sender in range(1, self.config.cluster_k):
            largest = max_u32(largest, ld_shared_b32(address + sender * (TILE_ROWS * 4)))
        return largest


@dataclass(frozen=True)
class SumExchange(TracedRecord):
    """Partial sums of a cluster's tiles.

    Attributes:
        ring: of one slot; full: 1 arrival (expect_tx) and the bytes of all CTAs; empty: four warps
            of every CTA, once they have read what came from here.
        buffer: shared address of float32 [sender, row of the share, rank].
        rank: of this CTA in its cluster.
        config: the configuration.
    """

    ring: Ring
    buffer: Int32
    rank: Int32
    config: cutlass.Constexpr

    @property
    def sender_bytes(self) -> int:
        """Bytes that come from one CTA."""
        return self.config.share * self.config.rank_tile * 4

    @cute.jit
    def send(self, sums: Any, position: RingPosition, place: FragmentPlace, thread: Int32) -> None:
        """Send the accumulators of this thread to the CTAs that add up its rows.

        Args:
            sums: float32 [rank_tile / 2], an accumulator of wgmma.
            position: a producer's. place, thread: of this thread in its warpgroup.
        """
        config = self.config
        full = self.ring.full(position)
        mbarrier_wait_cluster(self.ring.empty(position).toint(), position.phase)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.sender_bytes * config.cluster_k)
        for half in cutlass.range_constexpr(2):
            row = place.row + half * ROW_STEP
            owner = row // config.share
            local = row % config.share * config.rank_tile + place.quad * RANKS_AT_ONCE
            target = mapa_shared_cluster(
                self.buffer + self.rank * self.sender_bytes + local * 4, owner
            )
            barrier = mapa_shared_cluster(full.toint(), owner)
            for step in cutlass.range_constexpr(config.rank_tile // 16):
                first = 8 * step + 2 * half
                values = (sums[first], sums[first + 1], sums[first + 4], sums[first + 5])
                st_async_f32_vector(target + step * 64, values, barrier)

    def wait(self, position: RingPosition) -> None:
        """Wait until the sums of all CTAs are here; `position` is a consumer's."""
        mbarrier_wait_cluster(self.ring.full(position).toint(), position.phase)

    def add_up(self, item: Int32) -> list[Any]:
        """Return four sums of this CTA's share; item i is its ranks from 4 * i on, row by row."""
        address = self.buffer + item * (RANKS_AT_ONCE * 4)
        total = list(ld_shared_f32_vector(address, RANKS_AT_ONCE))
        for sender in range(1, self.config.cluster_k):
            part = ld_shared_f32_vector(address + sender * self.sender_bytes, RANKS_AT_ONCE)
            total = [add_rn_f32(one, other) for one, other in zip(total, part, strict=True)]
        return total

    @cute.jit
    def release(self, position: RingPosition, thread: Int32) -> None:
        """Let all senders send again; every warp that added up calls it, with that position."""
        cute.arch.sync_warp()
        lane = thread % 32
        if lane < self.config.cluster_k:
            cute.arch.mbarrier_arrive(self.ring.empty(position), lane)


def count_items(config: WgmmaQuantizeConfig) -> int:
    """Return the fours of sums that a CTA adds up for one tile."""
    return config.share * config.rank_tile // RANKS_AT_ONCE
