"""Rows of an output tile from registers to global memory, by way of a warp's own staging slots."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from halfbyte.device.traced_record import TracedRecord

ROWS_PER_WARP = 32
WIDTH = 32  # columns that a thread writes to shared memory at once


@dataclass(frozen=True)
class RowPlace(TracedRecord):
    """Where a thread's part of a row lies: rows in blocks of a warp, columns in blocks of a part.

    Attributes:
        row_block: 32 rows; the thread's is number `lane` of them.
        column_block: of the output.
        tile_column: first column of the part within its tile.
        slot: the staging slot, of all warps' slots.
        lane: of the thread.
    """

    row_block: Int32
    column_block: Int32
    tile_column: Int32
    slot: Int32
    lane: Int32


def make_output_layout(element: Any, columns: int, slots: int) -> Any:
    """Return the swizzled layout of `slots` staging slots of [32 rows, columns]."""
    return sm100.make_smem_layout_epi(
        element, LayoutEnum.ROW_MAJOR, (ROWS_PER_WARP, columns), slots
    )


def make_output_operand(output: Any, columns: int) -> tuple[Any, Any]:
    """Return the TMA descriptor for boxes of 32 rows x `columns` of [rows, N], and its tensor."""
    layout = make_output_layout(output.element_type, columns, 1)
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(),
        output,
        cute.slice_(layout, (None, None, 0)),
        (ROWS_PER_WARP, columns),
    )


@dataclass(frozen=True)
class OutputStore(TracedRecord):
    """The staging slots of one epilogue warp and the descriptor that empties them.

    Each warp stages and stores its own 32 rows, so that no barrier joins the four. TMA clips rows
    and columns beyond the output.

    Attributes:
        atom: the descriptor's copy atom.
        staged: (32, columns, slot) in shared memory, slots of all warps.
        source: ((TMA box), slot) in shared memory.
        target: ((TMA box), row block, column block) in global memory.
        slots: of one warp.
        columns: of a box.
    """

    atom: Any
    staged: Any
    source: Any
    target: Any
    slots: cutlass.Constexpr
    columns: cutlass.Constexpr

    @cute.jit
    def wait_for_slot(self, lane: Int32) -> None:
        """Wait until the warp's oldest slot has been read by its store."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)
        cute.arch.sync_warp()

    def put(self, row: Any, place: RowPlace) -> None:
        """Store `columns` values of this thread's row, in registers; a whole warp calls it."""
        self.wait_for_slot(place.lane)
        source = cute.flat_divide(row, (WIDTH,))
        target = cute.flat_divide(self.staged[(place.lane, None, place.slot)], (WIDTH,))
        for half in range(self.columns // WIDTH):
            cute.autovec_copy(source[(None, half)], target[(None, half)])
        self.send(place)

    @cute.jit
    def send(self, place: RowPlace) -> None:
        """Send a slot to global memory."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if place.lane == 0:
            cute.copy(
                self.atom,
                self.source[(None, place.slot)],
                self.target[(None, place.row_block, place.column_block)],
            )
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self, lane: Int32) -> None:
        """Wait until everything has been written to global memory."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.sync_warp()


def make_output_store(operand: Any, staged: Any, slots: int, columns: int) -> OutputStore:
    """Return the store of an output for one warp; `operand` is (atom, coordinate tensor)."""
    atom, tensor = operand
    boxes = cute.local_tile(tensor, (ROWS_PER_WARP, columns), (None, None))
    source, target = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    return OutputStore(atom, staged, source, target, slots, columns)
