"""CTAs that take tile after tile: a static stride, or cluster launch control. No product here."""

import cutlass
import torch
from cutlass import Int32, Int64, Int128, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.tile_scheduler import CLC_STAGES, ClcMailbox, Raster, TileScheduler


@cute.jit
def work_role(scheduler: TileScheduler, owner: cute.Tensor):
    """Note in owner [tiles_m, tiles_n] which CTA each tile went to."""
    tile = scheduler.start()
    while tile.is_valid:
        m, n = tile.place
        owner[m, n] = cute.arch.block_idx()[0]
        tile = tile.next()  # static: add the stride; clc: wait for the answer


@cute.jit
def scheduler_role(scheduler: TileScheduler):
    """Ask for another tile while there is one; the answers also end this loop."""
    position = RingPosition.producer(CLC_STAGES)
    tile = scheduler.start()
    while tile.is_valid:
        scheduler.mailbox.request(position)
        position = position.next()
        tile = tile.next()


@cute.kernel
def walk(owner: cute.Tensor, is_clc: cutlass.Constexpr):
    """Warp 0 works; warp 1 asks for tiles, with cluster launch control only."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = SmemAllocator()
    ring = Ring(memory.allocate_array(Int64, 2 * CLC_STAGES), CLC_STAGES)
    responses = memory.allocate_array(Int128, CLC_STAGES, byte_alignment=16)
    if warp == 0:
        with cute.arch.elect_one():
            ring.init(full_arrivals=1, empty_arrivals=2)  # both warps read every answer
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    raster = Raster(Int32(owner.shape[0]), Int32(owner.shape[1]), 4)
    mailbox = ClcMailbox(ring, responses, 1) if is_clc else None
    scheduler = TileScheduler(raster, cute.arch.block_idx()[0], cute.arch.grid_dim()[0], mailbox)
    if warp == 0:
        work_role(scheduler, owner)
    elif cutlass.const_expr(is_clc):
        scheduler_role(scheduler)


@cute.jit
def launch(owner: cute.Tensor, num_ctas: Int32, is_clc: cutlass.Constexpr):
    """Launch `num_ctas` CTAs, each with so much shared memory that an SM holds one."""
    walk(owner, is_clc).launch(grid=(num_ctas, 1, 1), block=(64, 1, 1), smem=200 * 1024)


def main() -> None:
    """200 tiles on 148 SMs."""
    for name, num_ctas in (("static", 148), ("clc", 200)):
        owner = torch.full((10, 20), -1, dtype=torch.int32, device="cuda")
        launch(from_dlpack(owner), num_ctas, name == "clc")
        torch.cuda.synchronize()
        assert (owner >= 0).all()
        counts = owner.flatten().bincount()
        print(f"{name}: launched {num_ctas}, ran {(counts > 0).sum()}, most tiles {counts.max()}")


if __name__ == "__main__":
    main()
