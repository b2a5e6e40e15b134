"""A ring of two slots between a load warp and a store warp. With the argument `wrong` it hangs."""

import sys
from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.operand_load import BlockLoad
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord

COLUMNS, STAGES = 128, 2  # a block is one row of 128 float32


@dataclass(frozen=True)
class Work(TracedRecord):
    """What both roles share."""

    ring: Ring
    load: BlockLoad
    slots: Any  # (1, 128, slot) in shared memory
    y: Any  # [rows, 128]
    num_rows: Int32


@cute.jit
def load_role(work: Work, is_wrong: cutlass.Constexpr):
    """Fill slots: wait until empty, then one arrival and 512 bytes make it full."""
    position = RingPosition.producer(STAGES)  # parity 1: a fresh barrier lets it pass
    if cutlass.const_expr(is_wrong):
        position = RingPosition.consumer(STAGES)  # parity 0: waits for an arrival
    for row in cutlass.range(work.num_rows, unroll=1):
        work.ring.wait_empty(position)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(work.ring.full(position), 4 * COLUMNS)
        work.load.copy(row, 0, position.index, work.ring.full(position))
        position = position.next()


@cute.jit
def store_role(work: Work):
    """Empty slots: wait until full, use it, one arrival gives it back."""
    position = RingPosition.consumer(STAGES)
    lane = cute.arch.lane_idx()
    for row in cutlass.range(work.num_rows, unroll=1):
        work.ring.wait_full(position)
        for part in cutlass.range_constexpr(COLUMNS // 32):
            column = part * 32 + lane
            work.y[row, column] = 2.0 * work.slots[0, column, position.index]
        cute.arch.sync_warp()  # all lanes have read
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(work.ring.empty(position))
        position = position.next()


@cute.kernel
def double(
    atom: cute.CopyAtom, coordinates: cute.Tensor, y: cute.Tensor, is_wrong: cutlass.Constexpr
):
    """Initialise the ring and hand out roles."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    slots = memory.allocate_tensor(Float32, cute.make_layout((1, COLUMNS, STAGES)), 128)
    ring = Ring(memory.allocate_array(Int64, 2 * STAGES), STAGES)
    if warp == 0:
        with cute.arch.elect_one():
            ring.init(full_arrivals=1, empty_arrivals=1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    rows = cute.local_tile(coordinates, (1, COLUMNS), (None, None))
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 2), cute.group_modes(rows, 0, 2)
    )
    work = Work(ring, BlockLoad(atom, source, target), slots, y, y.shape[0])
    if warp == 0:
        load_role(work, is_wrong)
    else:
        store_role(work)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, is_wrong: cutlass.Constexpr):
    """Launch a load warp and a store warp."""
    layout = cute.make_layout((1, COLUMNS))
    load = cpasync.CopyBulkTensorTileG2SOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(load, x, layout, (1, COLUMNS))
    double(atom, coordinates, y, is_wrong).launch(grid=(1, 1, 1), block=(64, 1, 1))


def main() -> None:
    """Five rows through two slots."""
    x = torch.randn(5, COLUMNS, device="cuda")
    y = torch.full_like(x, float("nan"))
    launch(*(from_dlpack(tensor, assumed_align=16) for tensor in (x, y)), "wrong" in sys.argv)
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)
    print("5 rows through 2 slots")


if __name__ == "__main__":
    main()
