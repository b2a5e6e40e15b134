"""Two accumulators in tensor memory, so that a tile is stored while the next one is multiplied.

Tiles use buffer 0 and 1 in turn. Where 2 * n columns and the block scales do not fit into 512, the
buffers share columns: the epilogue then reads the shared ones first (buffer 0 from its last column
down, buffer 1 from its first column up) and frees the buffer as soon as it has read them, instead
of after the whole tile. A published kernel that gave up the second buffer lost the overlap.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import tcgen05

from halfbyte.device.ring_position import RingPosition
from halfbyte.device.traced_record import TracedRecord


@dataclass(frozen=True)
class AccumulatorPair(TracedRecord):
    """Both accumulators of a CTA.

    Attributes:
        pointer: first column of buffer 0, float32.
        layout: of one accumulator, (MMA, rows, columns).
        offset: columns from buffer 0 to buffer 1.
        overlap: columns that both have.
    """

    pointer: Any
    layout: Any
    offset: cutlass.Constexpr
    overlap: cutlass.Constexpr

    @property
    def stages(self) -> int:
        """Slots of the accumulator ring: one where the buffers share columns, else two."""
        return num_accumulator_slots(self.overlap)

    def tensor(self, buffer: Int32) -> Any:
        """Return accumulator 0 or 1 as the MMA sees it."""
        return cute.make_tensor(self.pointer + buffer * self.offset, self.layout)

    def filled_by(self, position: RingPosition) -> Int32:
        """Return the buffer that the MMA warp fills at a position."""
        return position.phase ^ 1 if self.overlap else position.index

    def read_by(self, position: RingPosition) -> Int32:
        """Return the buffer that the epilogue reads at a position."""
        return position.phase if self.overlap else position.index

    def part(self, buffer: Int32, part: Int32, columns: int, num_parts: int) -> Int32:
        """Return which `columns` wide part is read at step `part`: the shared ones come first."""
        if not self.overlap:
            return part
        is_reversed = Int32(1) - buffer
        return part + is_reversed * (num_parts - 1 - 2 * part)

    def is_free_after(self, part: Int32, columns: int, num_parts: int) -> Boolean:
        """Return whether the buffer can be given back once step `part` has been read."""
        last = -(-self.overlap // columns) - 1 if self.overlap else num_parts - 1
        return part == last


def num_accumulator_slots(overlap: int) -> int:
    """Return the slots of the accumulator ring."""
    return 1 if overlap else 2


def make_accumulator_layout(mma: Any, tile: tuple[int, int]) -> Any:
    """Return the layout of one accumulator of `mma`."""
    return mma.make_fragment_C(mma.partition_shape_C(tile)).layout


def load_columns(accumulator: Any, start: Int32, columns: int, thread: Int32) -> Any:
    """Return `columns` values of this thread's row from column `start` on, float32 in registers.

    Thread t of the four epilogue warps reads lane t: row t of the CTA's part of the tile. The
    values are there after `wait_for_columns`.
    """
    lanes = accumulator[((None, None), 0, 0)]  # (128 rows, n columns)
    tiles = cute.flat_divide(lanes, (128, columns))[(None, None, 0, start // columns)]
    repeat = {16: tcgen05.Repetition.x16, 32: tcgen05.Repetition.x32, 64: tcgen05.Repetition.x64}
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(repeat[columns]), cutlass.Float32)
    tiled = tcgen05.make_tmem_copy(atom, tiles)
    source = tiled.get_slice(thread).partition_S(tiles)
    target = cute.make_rmem_tensor(
        tiled.get_slice(thread).partition_D(cute.make_identity_tensor((128, columns))).shape,
        cutlass.Float32,
    )
    cute.copy(tiled, source, target)
    return target


def wait_for_columns() -> None:
    """Wait until this warp's loads from tensor memory have arrived in its registers."""
    cute.arch.fence_view_async_tmem_load()
