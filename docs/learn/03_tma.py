"""One TMA load: a box that sticks out of its tensor, swizzled, counted by an mbarrier."""

import cutlass
import torch
from cutlass import Float16, Int64, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

ROWS, COLUMNS = 64, 64  # 64 fp16 are 128 bytes: one swizzle span
BOX_BYTES = ROWS * COLUMNS * 2


@cute.kernel
def load_box(
    atom: cute.CopyAtom, coordinates: cute.Tensor, layout: cute.ComposedLayout, y: cute.Tensor
):
    """Load box (1, 1) and store shared memory to y [64, 64] as it lies there."""
    thread = cute.arch.thread_idx()[0]
    memory = SmemAllocator()
    sX = memory.allocate_tensor(Float16, layout.outer, 1024, layout.inner)  # (64, 64)
    full = memory.allocate_array(Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    boxes = cute.local_tile(coordinates, (ROWS, COLUMNS), (None, None))  # (64, 64, rows, columns)
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(boxes, 0, 2)
    )
    if thread < 32:
        with cute.arch.elect_one():  # one arrival, and how many bytes are to come
            cute.arch.mbarrier_arrive_and_expect_tx(full, BOX_BYTES)
        cute.copy(atom, source[(None, 1, 1)], target, tma_bar_ptr=full)  # elects a lane itself
    cute.arch.mbarrier_wait(full, 0)
    # A pointer without swizzle: the bytes as they lie there.
    raw = cute.make_tensor(
        cute.recast_ptr(sX.iterator, dtype=Float16),
        cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)),
    )
    for column in cutlass.range_constexpr(COLUMNS):
        y[thread, column] = raw[thread, column]


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    """Make the descriptor of x on the host, and launch two warps."""
    span = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Float16)  # 8 rows
    layout = cute.tile_to_shape(span, (ROWS, COLUMNS), (0, 1))
    load = cpasync.CopyBulkTensorTileG2SOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(load, x, layout, (ROWS, COLUMNS))
    load_box(atom, coordinates, layout, y).launch(grid=(1, 1, 1), block=(64, 1, 1))


def main() -> None:
    """Undo the swizzle by its formula; what lies outside of x is zero."""
    x = torch.randn(100, 104, device="cuda").half()
    y = torch.full((ROWS, COLUMNS), float("nan"), device="cuda").half()
    launch(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16))
    torch.cuda.synchronize()
    box = torch.zeros(ROWS, COLUMNS).half()
    box[:36, :40] = x.cpu()[64:, 64:]
    row, column = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)[None, :]
    place = (column // 8 ^ row % 8) * 8 + column % 8  # 16-byte chunk c of row r is at c ^ r % 8
    assert torch.equal(y.cpu().gather(1, place), box)
    print("36 x 40 elements inside, zeros around, 16-byte chunks swizzled")


if __name__ == "__main__":
    main()
