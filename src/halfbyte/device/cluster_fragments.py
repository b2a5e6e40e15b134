"""The sum of accumulator fragments over a cluster, through distributed shared memory.

A party is a group of warps that holds a partial sum of a tile in registers, as `wgmma` leaves it:
four values of a thread for each 8 columns. A CTA has one party or several. A warp's 8 columns are a
piece; pieces are dealt out to the parties in turn, so that all of them add up about as much. A
party sends each piece to its owner, and adds up what it got for its own, party 0 first: the order
of additions, and so every bit of the result, does not depend on who was faster.

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


def count_slots(num_pieces: int, num_parties: int) -> int:
    """Return the pieces that the party with the most of them owns."""
    return -(-num_pieces // num_parties)


def count_fragment_bytes(num_pieces: int, num_parties: int) -> int:
    """Return the shared memory of a party, where its pieces arrive."""
    return num_parties * count_slots(num_pieces, num_parties) * PIECE_BYTES


@dataclass(frozen=True)
class FragmentSum(TracedRecord):
    """Where pieces of a CTA's parties arrive, and a ring of one slot for each party.

    Attributes:
        ring: slots are the parties of this CTA. full: 1 arrival (expect_tx) and the bytes of the
            party's pieces from each party; empty: every warp of every party, once it has read what
            came from here.
        buffer: pointer to `count_fragment_bytes` for each party of this CTA, 16-byte aligned:
            [party, sender, piece, lane, 16 bytes].
        rank: of this CTA in the cluster. own: of this thread's party in the CTA.
        warp: of this thread in its party. lane: of the warp.
        units: pieces of a warp. num_warps: of a party.
        per_cta: parties of a CTA. num_ctas: of the cluster.
    """

    ring: Ring
    buffer: Any
    rank: Int32
    own: Int32
    warp: Int32
    lane: Int32
    units: cutlass.Constexpr
    num_warps: cutlass.Constexpr
    per_cta: cutlass.Constexpr
    num_ctas: cutlass.Constexpr

    @property
    def num_parties(self) -> int:
        """Parties of the cluster."""
        return self.per_cta * self.num_ctas

    @property
    def party(self) -> Int32:
        """The number of this thread's party in the cluster."""
        return self.rank * self.per_cta + self.own

    @property
    def slots(self) -> int:
        """Pieces that fit a party's buffer, from each sender."""
        return count_slots(self.units * self.num_warps, self.num_parties)

    def owns(self, unit: int) -> Boolean:
        """Return whether this party adds up the warp's piece number `unit`; its threads agree."""
        return self.piece(unit) % self.num_parties == self.party

    def piece(self, unit: int) -> Int32:
        """Return the number of a piece in the tile."""
        return self.warp * self.units + unit

    def place(self, unit: int, sender: Any, receiver: Int32) -> Int32:
        """Return where a thread's values of a piece lie in the buffer of a CTA's party."""
        row = receiver * self.num_parties + sender
        slot = row * self.slots + self.piece(unit) // self.num_parties
        return self.buffer.toint() + (slot * WARP_THREADS + self.lane) * (VALUES * 4)

    @cute.jit
    def send(self, values: Any, turn: Int32) -> None:
        """Send this thread's values to their owners; all threads of all parties call it.

        Args:
            values: float32 [4 * units] in registers.
            turn: tiles sent before this one.
        """
        position = self.position(RingPosition.producer(1), turn)
        mbarrier_wait_cluster(self.ring.empty(position).toint(), position.phase)
        if (self.warp == 0) & (self.lane == 0):
            num_pieces = self.units * self.num_warps
            owned = (num_pieces + self.num_parties - 1 - self.party) // self.num_parties
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.ring.full(position), owned * (self.num_parties * PIECE_BYTES)
            )
        for unit in cutlass.range_constexpr(self.units):
            owner = self.piece(unit) % self.num_parties
            cta, receiver = owner // self.per_cta, owner % self.per_cta
            full = (self.ring.barriers + receiver).toint()
            st_async_f32_vector(
                mapa_shared_cluster(self.place(unit, self.party, receiver), cta),
                tuple(values[VALUES * unit + index] for index in range(VALUES)),
                mapa_shared_cluster(full, cta),
            )

    def wait(self, turn: Int32) -> None:
        """Wait for all pieces of this party."""
        position = self.position(RingPosition.consumer(1), turn)
        mbarrier_wait_cluster(self.ring.full(position).toint(), position.phase)

    def add_up(self, values: Any, unit: int) -> None:
        """Put the sum of an own piece into this thread's values of it; a whole warp calls it."""
        for sender in range(self.num_parties):
            parts = ld_shared_v4_f32(self.place(unit, Int32(sender), self.own))
            for index in range(VALUES):
                place = VALUES * unit + index
                values[place] = (
                    parts[index] if sender == 0 else add_rn_f32(values[place], parts[index])
                )

    @cute.jit
    def release(self) -> None:
        """Let all parties send again; every warp calls it once it has read its pieces."""
        cute.arch.sync_warp()
        if self.lane < self.num_parties:
            empty = self.ring.barriers + self.per_cta + self.lane % self.per_cta
            cute.arch.mbarrier_arrive(empty, self.lane // self.per_cta)

    def position(self, start: RingPosition, turn: Int32) -> RingPosition:
        """Return where a warp stands after `turn` tiles."""
        return RingPosition(1, self.own, start.phase ^ (turn & 1))
