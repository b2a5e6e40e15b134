"""Two accumulators of 256 columns that share 48: tile i + 1 is multiplied while i is stored."""

from typing import Any

import cutlass
import torch
from cutlass import Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import (
    AccumulatorPair,
    load_columns,
    make_accumulator_layout,
    wait_for_columns,
)
from halfbyte.device.operand_load import TmaOperand, partition_block_load
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.scaled_product import MmaShape, make_low_rank_mma, make_operand_layouts

SHAPE, TILER = MmaShape(128, 256, 1), (128, 256, 64)
SLOT_BYTES = (128 + 256) * 64 * 2
COLUMNS, NUM_PARTS = 32, 8  # the epilogue reads 32 columns at a time
MMA_WARP = 4


@cute.jit
def mma_role(pair: AccumulatorPair, ring: Ring, fragments: Any, num_tiles: Int32):
    """Tile i is the product of the first i % 4 + 1 steps of K, so that tiles differ."""
    position = RingPosition.producer(pair.stages)
    for tile in cutlass.range(num_tiles, unroll=1):
        ring.wait_empty(position)  # the columns that the next product needs have been read
        accumulator = pair.tensor(pair.filled_by(position))
        mma = make_low_rank_mma(SHAPE, "float16")
        for k in cutlass.range(tile % 4 + 1, unroll=1):
            mma.set(tcgen05.Field.ACCUMULATE, k > 0)
            part = (None, None, k, 0)
            cute.gemm(mma, accumulator, fragments[0][part], fragments[1][part], accumulator)
        with cute.arch.elect_one():
            tcgen05.commit(ring.full(position))
        position = position.next()


@cute.jit
def epilogue_role(pair: AccumulatorPair, ring: Ring, y: cute.Tensor):
    """Store tile after tile, the shared columns first, and give those back at once."""
    thread = cute.arch.thread_idx()[0]
    position = RingPosition.consumer(pair.stages)
    for tile in cutlass.range(y.shape[0], unroll=1):
        ring.wait_full(position)
        buffer = pair.read_by(position)
        accumulator = pair.tensor(buffer)
        for step in cutlass.range(NUM_PARTS, unroll=1):
            part = pair.part(buffer, step, COLUMNS, NUM_PARTS)
            row = load_columns(accumulator, part * COLUMNS, COLUMNS, thread)
            wait_for_columns()  # before the release: the registers hold the values
            if pair.is_free_after(step, COLUMNS, NUM_PARTS):  # 48 columns: after 2 of 8 steps
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(ring.empty(position))
            target = cute.flat_divide(y[(tile, thread, None)], (COLUMNS,))
            cute.autovec_copy(row, target[(None, part)])
        position = position.next()


@cute.kernel
def multiply(a: Any, b: Any, y: cute.Tensor):
    """Warps 0 to 3 store, warp 4 loads once and multiplies."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    mma = make_low_rank_mma(SHAPE, "float16")
    layout_a, layout_b = make_operand_layouts(mma, TILER, Float16)
    memory = SmemAllocator()
    sA = memory.allocate_tensor(Float16, layout_a.outer, 1024, layout_a.inner)
    sB = memory.allocate_tensor(Float16, layout_b.outer, 1024, layout_b.inner)
    barriers = memory.allocate_array(Int64, 3)
    ring, loaded = Ring(barriers, 1), barriers + 2
    address = memory.allocate_array(Int32, 4, byte_alignment=16)
    if warp == 0:
        with cute.arch.elect_one():
            ring.init(full_arrivals=1, empty_arrivals=4)  # a commit; the four epilogue warps
            cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.alloc_tmem(512, address)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    layout = make_accumulator_layout(mma, TILER[:2])
    pair = AccumulatorPair(pointer, layout, offset=208, overlap=48)
    if warp == MMA_WARP:
        alone, thread_mma = cute.make_layout(1), mma.get_slice(0)
        tiles_a = cute.local_tile(a.tensor, (128, 64), (None, None))
        tiles_b = cute.local_tile(b.tensor, (256, 64), (None, None))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(loaded, SLOT_BYTES)
        partition_block_load(a, thread_mma.partition_A(tiles_a), sA, 0, alone).copy(0, 0, 0, loaded)
        partition_block_load(b, thread_mma.partition_B(tiles_b), sB, 0, alone).copy(0, 0, 0, loaded)
        cute.arch.mbarrier_wait(loaded, 0)
        fragments = (mma.make_fragment_A(sA), mma.make_fragment_B(sB))
        mma_role(pair, ring, fragments, y.shape[0])
    else:
        epilogue_role(pair, ring, y)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, 512)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, y: cute.Tensor):
    """Launch one CTA of five warps."""
    mma = make_low_rank_mma(SHAPE, "float16")
    cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
    load, slot = cpasync.CopyBulkTensorTileG2SOp(), (None, None, None, 0)
    layouts = [cute.slice_(one, slot) for one in make_operand_layouts(mma, TILER, Float16)]
    atom_a = make_tiled_tma_atom_A(load, a, layouts[0], TILER, mma, cluster)
    atom_b = make_tiled_tma_atom_B(load, b, layouts[1], TILER, mma, cluster)
    multiply(TmaOperand(*atom_a), TmaOperand(*atom_b), y).launch(grid=(1, 1, 1), block=(160, 1, 1))


def main() -> None:
    """Nine tiles by one CTA."""
    a, b = (torch.randn(rows, 64, device="cuda").half() for rows in (128, 256))
    y = torch.full((9, 128, 256), float("nan"), device="cuda")
    launch(*(from_dlpack(tensor, assumed_align=16) for tensor in (a, b, y)))
    torch.cuda.synchronize()
    a, b = a.cpu().double(), b.cpu().double()
    for tile in range(9):
        steps = 16 * (tile % 4 + 1)
        expected = a[:, :steps] @ b[:, :steps].T
        assert (y[tile].cpu() - expected).norm() < 1e-6 * expected.norm()
    print("9 tiles through two accumulators that share 48 of 256 columns")


if __name__ == "__main__":
    main()
