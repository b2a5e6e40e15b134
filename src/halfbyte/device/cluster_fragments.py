"""The sum of accumulator fragments over the CTAs of a cluster, through distributed shared memory.

Each CTA holds a partial sum of the same tile in the registers of its warps, as `wgmma` leaves it:
four values of a thread for each 8 columns. A warp's 8 columns are a piece; pieces are dealt out to
the CTAs in turn, so that all of them add up about as much. A CTA sends each piece to its owner, and
adds up what it got for its own, rank 0 first: the order of additions, and so every bit of the
result, does not depend on who was faster.

    send    st.async: a store that counts its bytes at the receiver's full barrier
    add_up  own shared memory only, after the full barrier
    release all senders may send again; not called for a CTA's last tile, so that nobody arrives at
            the barriers of a CTA that has ended
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from halfbyte.device.float_arithmetic import add_rn_f32
from halfbyte.device.memory_access import (
    ld_shared_v4_f32,
    mapa_shared_cluster,
    mbarrier_wait_cluster,
    st_async_f32_vector,
)
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord

WARP_THREADS = 32
VALUES = 4  # of a thread in a piece
PIECE_BYTES = WARP_THREADS * VALUES * 4


def count_slots(num_pieces: int, num_ctas: int) -> int:
    """Return the pieces that the CTA with the most of them owns."""
    return -(-num_pieces // num_ctas)


def count_fragment_bytes(num_pieces: int, num_ctas: int) -> int:
    """Return the shared memory of the buffer where pieces arrive."""
    return num_ctas * count_slots(num_pieces, num_ctas) * PIECE_BYTES


@dataclass(frozen=True)
class FragmentSum(TracedRecord):
    """The buffer where pieces of this CTA arrive, and its ring of one slot.

    Attributes:
        ring: full: 1 arrival (expect_tx) and the bytes of this CTA's pieces from each CTA; empty:
            every warp of every CTA, once it has read what came from here.
        buffer: pointer to `count_fragment_bytes`, 16-byte aligned: [sender, piece, lane, 16 bytes].
        rank: of this CTA in the cluster.
        warp: of this thread among those with a fragment. lane: of the warp.
        units: pieces of a warp. num_warps: of a CTA. num_ctas: of the cluster.
    """

    ring: Ring
    buffer: Any
    rank: Int32
    warp: Int32
    lane: Int32
    units: cutlass.Constexpr
    num_warps: cutlass.Constexpr
    num_ctas: cutlass.Constexpr

    @property
    def slots(self) -> int:
        """Pieces that fit the buffer, from each sender."""
        return count_slots(self.units * self.num_warps, self.num_ctas)

    def owns(self, unit: int) -> Boolean:
        """Return whether this CTA adds up the warp's piece number `unit`; all its threads agree."""
        return self.piece(unit) % self.num_ctas == self.rank

    def piece(self, unit: int) -> Int32:
        """Return the number of a piece in the tile."""
        return self.warp * self.units + unit

    def place(self, unit: int, sender: Any) -> Int32:
        """Return where this thread's values of a piece lie in its owner's buffer."""
        slot = sender * self.slots + self.piece(unit) // self.num_ctas
        return self.buffer.toint() + (slot * WARP_THREADS + self.lane) * (VALUES * 4)

    @cute.jit
    def send(self, values: Any, turn: Int32) -> None:
        """Send this thread's values to their owners; all threads of all CTAs call it.

        Args:
            values: float32 [4 * units] in registers.
            turn: tiles sent before this one.
        """
        position = self.position(RingPosition.producer(1), turn)
        own_full = self.ring.full(position).toint()
        mbarrier_wait_cluster(self.ring.empty(position).toint(), position.phase)
        if (self.warp == 0) & (self.lane == 0):
            num_pieces = self.units * self.num_warps
            owned = (num_pieces - 1 - self.rank) // self.num_ctas + 1
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.ring.full(position), owned * (self.num_ctas * PIECE_BYTES)
            )
        for unit in cutlass.range_constexpr(self.units):
            owner = self.piece(unit) % self.num_ctas
            st_async_f32_vector(
                mapa_shared_cluster(self.place(unit, self.rank), owner),
                tuple(values[VALUES * unit + index] for index in range(VALUES)),
                mapa_shared_cluster(own_full, owner),
            )

    def wait(self, turn: Int32) -> None:
        """Wait for all pieces of this CTA."""
        position = self.position(RingPosition.consumer(1), turn)
        mbarrier_wait_cluster(self.ring.full(position).toint(), position.phase)

    def add_up(self, values: Any, unit: int) -> None:
        """Put the sum of an own piece into this thread's values of it; a whole warp calls it."""
        for sender in range(self.num_ctas):
            parts = ld_shared_v4_f32(self.place(unit, Int32(sender)))
            for index in range(VALUES):
                place = VALUES * unit + index
                values[place] = (
                    parts[index] if sender == 0 else add_rn_f32(values[place], parts[index])
                )

    @cute.jit
    def release(self) -> None:
        """Let all CTAs send again; every warp calls it once it has read its pieces."""
        cute.arch.sync_warp()
        if self.lane < self.num_ctas:
            empty = self.ring.empty(RingPosition.consumer(1))
            cute.arch.mbarrier_arrive(empty, self.lane)

    def position(self, start: RingPosition, turn: Int32) -> RingPosition:
        """Return where a warp stands after `turn` tiles."""
        return RingPosition(1, start.index, start.phase ^ (turn & 1))
