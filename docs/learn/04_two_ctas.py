"""One product by two CTAs: 256 x 128 x 64 fp16, half of A, of B and of the rows in each."""

from typing import Any

import cutlass
import torch
from cutlass import Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import load_columns, make_accumulator_layout, wait_for_columns
from halfbyte.device.operand_load import TmaOperand, partition_block_load
from halfbyte.device.scaled_product import MmaShape, make_low_rank_mma, make_operand_layouts

SHAPE, TILER = MmaShape(256, 128, 2), (256, 128, 64)
PAIR_BYTES = (256 + 128) * 64 * 2  # what both CTAs load
BOTH = 0b11  # CTAs 0 and 1 of the cluster


@cute.kernel
def multiply(a: Any, b: Any, y: cute.Tensor):
    """Each CTA loads its halves; CTA 0 multiplies for both; each stores its 128 rows."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    mma = make_low_rank_mma(SHAPE, "float16")
    layout_a, layout_b = make_operand_layouts(mma, TILER, Float16)
    memory = SmemAllocator()
    sA = memory.allocate_tensor(Float16, layout_a.outer, 1024, layout_a.inner)  # 128 rows
    sB = memory.allocate_tensor(Float16, layout_b.outer, 1024, layout_b.inner)  # 64 rows
    barriers = memory.allocate_array(Int64, 2)
    loaded, multiplied = barriers, barriers + 1
    address = memory.allocate_array(Int32, 4, byte_alignment=16)
    if warp == 0:
        cute.arch.alloc_tmem(128, address, is_two_cta=True)  # in both CTAs: the same columns
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init(multiplied, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()  # the other CTA's barriers exist from here on
    cute.arch.cluster_wait()
    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    accumulator = cute.make_tensor(pointer, make_accumulator_layout(mma, TILER[:2]))

    if warp == 0:
        thread_mma, alone = mma.get_slice(rank), cute.make_layout(1)
        tiles_a = cute.local_tile(a.tensor, (256, 64), (None, None))
        tiles_b = cute.local_tile(b.tensor, (128, 64), (None, None))
        load_a = partition_block_load(a, thread_mma.partition_A(tiles_a), sA, 0, alone)
        load_b = partition_block_load(b, thread_mma.partition_B(tiles_b), sB, 0, alone)
        if rank == 0:  # one barrier, the leader's, counts the bytes of both CTAs
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, PAIR_BYTES)
        load_a.copy(0, 0, 0, loaded)
        load_b.copy(0, 0, 0, loaded)
        if rank == 0:
            cute.arch.mbarrier_wait(loaded, 0)
            tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for k in cutlass.range_constexpr(4):  # K = 16 an instruction
                part = (None, None, k, 0)
                cute.gemm(mma, accumulator, tCrA[part], tCrB[part], accumulator)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(multiplied, BOTH, SHAPE.group)  # one arrival in each CTA
    cute.arch.mbarrier_wait(multiplied, 0)
    for part in cutlass.range_constexpr(4):
        row = load_columns(accumulator, Int32(part * 32), 32, thread)
        wait_for_columns()
        for column in cutlass.range_constexpr(32):
            y[rank * 128 + thread, part * 32 + column] = row[column]
    cute.arch.cluster_arrive()  # neither CTA leaves, or frees, before the other is done
    cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, 128, is_two_cta=True)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, y: cute.Tensor):
    """Launch one cluster of two CTAs."""
    mma = make_low_rank_mma(SHAPE, "float16")
    pair = cute.tiled_divide(cute.make_layout((2, 1, 1)), (mma.thr_id.shape,)).shape
    load = cpasync.CopyBulkTensorTileG2SOp(SHAPE.group)
    layout_a, layout_b = make_operand_layouts(mma, TILER, Float16)
    slot = (None, None, None, 0)
    atom_a = make_tiled_tma_atom_A(load, a, cute.slice_(layout_a, slot), TILER, mma, pair)
    atom_b = make_tiled_tma_atom_B(load, b, cute.slice_(layout_b, slot), TILER, mma, pair)
    multiply(TmaOperand(*atom_a), TmaOperand(*atom_b), y).launch(
        grid=(2, 1, 1), block=(128, 1, 1), cluster=(2, 1, 1)
    )


def main() -> None:
    """Compare with the float64 product."""
    a, b = torch.randn(256, 64, device="cuda").half(), torch.randn(128, 64, device="cuda").half()
    y = torch.full((256, 128), float("nan"), device="cuda")
    launch(*(from_dlpack(tensor, assumed_align=16) for tensor in (a, b, y)))
    torch.cuda.synchronize()
    expected = a.cpu().double() @ b.cpu().double().T
    assert (y.cpu() - expected).norm() < 1e-6 * expected.norm()
    print("256 x 128 x 64 by two CTAs, relative error below 1e-6")


if __name__ == "__main__":
    main()
