"""The sum of a tile over the CTAs of a cluster, through distributed shared memory.

Each CTA holds a partial [128 rows, columns] sum in registers, one row a thread. The columns are cut
into as many shares as there are CTAs; each CTA sends every share to its owner and adds up what it
got for its own, rank 0 first: the order of additions, and so every bit of the result, does not
depend on who was faster.

    send    st.async: a store that counts its bytes at the receiver's full barrier; one way, where
            reading from a neighbour's memory waits for an answer
    add_up  own shared memory only, after the full barrier
    release all senders may send again

Barriers and not barrier.cluster join the CTAs: that one counts all threads of a cluster, and the
load and MMA warps are elsewhere.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from halfbyte.device.float_arithmetic import add_rn_f32
from halfbyte.device.memory_access import (
    ld_shared_f32_vector,
    mapa_shared_cluster,
    mbarrier_arrive_cluster,
    mbarrier_wait_cluster,
    st_async_f32_vector,
)
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord

ROWS = 128  # threads that take part, one row each
FLOAT_BYTES = 4


@dataclass(frozen=True)
class ClusterSum(TracedRecord):
    """The buffer where shares of this CTA arrive, and its ring of one slot.

    Attributes:
        ring: full: 1 arrival (expect_tx) and the bytes of one share from each CTA; empty: every
            warp of every CTA, once it has read what came from here.
        buffer: pointer to `num_ctas * share * ROWS` float32, 16-byte aligned: [sender, vector of
            columns, row, column in vector].
        columns: of the tile.
        num_ctas: of the cluster, at least 2; divides `columns`.
    """

    ring: Ring
    buffer: Any
    columns: cutlass.Constexpr
    num_ctas: cutlass.Constexpr

    @property
    def share(self) -> int:
        """Columns that one CTA adds up."""
        return self.columns // self.num_ctas

    @property
    def vector(self) -> int:
        """Columns of one store: 16 bytes, or a whole share where that is less."""
        return min(4, self.share)

    def offset(self, sender: int, column: int) -> int:
        """Return where row 0 of a vector that starts at `column` of a share lies, in bytes."""
        return (sender * self.share + column) * ROWS * FLOAT_BYTES

    @cute.jit
    def send(self, values: Any, position: RingPosition, rank: Int32, row: Int32) -> None:
        """Send this thread's row to the owners of its columns; all threads of all CTAs call it.

        Args:
            values: float32 [columns] in registers.
            position: a producer's. rank: of this CTA. row: of this thread.
        """
        own_full = self.ring.full(position).toint()
        mbarrier_wait_cluster(self.ring.empty(position).toint(), position.phase)
        if row == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.ring.full(position), self.columns * ROWS * FLOAT_BYTES
            )
        row_bytes = row * (self.vector * FLOAT_BYTES)
        own_place = self.buffer.toint() + rank * self.offset(1, 0) + row_bytes
        for owner in cutlass.range_constexpr(self.num_ctas):
            full = mapa_shared_cluster(own_full, Int32(owner))
            place = mapa_shared_cluster(own_place, Int32(owner))
            for column in cutlass.range_constexpr(0, self.share, self.vector):
                first = owner * self.share + column
                st_async_f32_vector(
                    place + self.offset(0, column),
                    tuple(values[first + index] for index in range(self.vector)),
                    full,
                )

    @cute.jit
    def add_up(self, position: RingPosition, row: Int32) -> Any:
        """Return the sums of this CTA's share of a row, float32 [share] in registers.

        All threads that sent call it; `position` is a consumer's.
        """
        total = cute.make_rmem_tensor((self.share,), Float32)
        mbarrier_wait_cluster(self.ring.full(position).toint(), position.phase)
        own_place = self.buffer.toint() + row * (self.vector * FLOAT_BYTES)
        for sender in cutlass.range_constexpr(self.num_ctas):
            for column in cutlass.range_constexpr(0, self.share, self.vector):
                parts = ld_shared_f32_vector(own_place + self.offset(sender, column), self.vector)
                for index in cutlass.range_constexpr(self.vector):
                    part = parts[index]
                    if cutlass.const_expr(sender > 0):
                        part = add_rn_f32(total[column + index], part)
                    total[column + index] = part
        return total

    @cute.jit
    def release(self, position: RingPosition) -> None:
        """Let all senders send again; every warp that added up calls it, with that position.

        To be called after the tile's stores to global memory: the arrival releases to the cluster,
        which the hardware does by waiting for everything that the thread has in flight.
        """
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.num_ctas:
            empty = self.ring.empty(position).toint()
            mbarrier_arrive_cluster(mapa_shared_cluster(empty, lane))
