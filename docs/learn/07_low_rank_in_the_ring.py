"""Two slots of one ring: a block of 256 E2M1 codes, then 64 fp16 columns of the low-rank branch."""

from dataclasses import dataclass
from typing import Any

import cutlass
import torch
from cutlass import Float4E2M1FN, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import load_columns, make_accumulator_layout, wait_for_columns
from halfbyte.device.operand_load import TmaOperand, make_code_tensor, partition_block_load
from halfbyte.device.scale_copy import ScaleOperands, make_scale_copies
from halfbyte.device.scaled_product import (
    MmaShape,
    add_low_rank,
    check_same_accumulator,
    make_low_rank_mma,
    make_operand_layouts,
    make_scale_layouts,
    make_scaled_mma,
    multiply_scaled,
    with_slots,
)
from halfbyte.device.traced_record import TracedRecord
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.scale_layout import pack_scales

SHAPE, BLOCK, CHUNK = MmaShape(128, 128, 1), (128, 128, 256), (128, 128, 64)
SLOT_BYTES = 2 * 128 * 128  # A and B: 128 rows of 128 bytes, in either type
SF_BYTES = 128 * 256 // 16


def make_mmas():
    """Return both MMAs, whose accumulators are the same cells."""
    scaled, low_rank = make_scaled_mma(SHAPE, "nvfp4"), make_low_rank_mma(SHAPE, "float16")
    check_same_accumulator(scaled, low_rank, BLOCK[:2])
    return scaled, low_rank


@dataclass(frozen=True)
class Slots(TracedRecord):
    """Shared memory: both slots of A and B as codes and as fp16, block scales, barriers."""

    codes: list[Any]
    floats: list[Any]
    scales: list[Any]
    barriers: Any  # full slot 0, full slot 1, done


def allocate_slots(scaled: Any, low_rank: Any) -> Slots:
    """Allocate two slots, seen in both types."""
    memory = SmemAllocator()
    block = make_operand_layouts(scaled, BLOCK, Float4E2M1FN)[0]  # B's is the same
    chunk = make_operand_layouts(low_rank, CHUNK, Float16)[0]
    codes, floats = [], []
    for _ in "AB":
        outer = with_slots(block, 2, 128 * 256)  # codes from slot to slot
        codes.append(memory.allocate_tensor(Float4E2M1FN, outer, 1024, block.inner))
        # The same slots as fp16. Recasting drops the swizzle: it is named again.
        pointer = cute.recast_ptr(codes[-1].iterator, chunk.inner, dtype=Float16)
        floats.append(cute.make_tensor(pointer, with_slots(chunk, 2, 128 * 64)))
    scales = [
        memory.allocate_tensor(Float8E4M3FN, layout, 1024)
        for layout in make_scale_layouts(scaled, BLOCK, 16, 1)
    ]
    return Slots(codes, floats, scales, memory.allocate_array(Int64, 3))


def partition(mma: Any, tiler: tuple[int, int, int], operands: Any, slots: list[Any]) -> Any:
    """Return the loads of A and B."""
    thread_mma, alone = mma.get_slice(0), cute.make_layout(1)
    a, b = (cute.local_tile(one.tensor, tiler[1:], (None, None)) for one in operands)
    return (
        partition_block_load(operands[0], thread_mma.partition_A(a), slots[0], 0, alone),
        partition_block_load(operands[1], thread_mma.partition_B(b), slots[1], 0, alone),
    )


@cute.jit
def multiply_role(slots: Slots, codes: Any, chunks: Any, accumulator: Any, columns: Any):
    """Load both slots, multiply the block, add the chunk."""
    scaled, low_rank = make_mmas()
    block_loads = partition(scaled, BLOCK, codes, slots.codes)
    chunk_loads = partition(low_rank, CHUNK, chunks, slots.floats)
    for slot, loads in enumerate((block_loads, chunk_loads)):
        with cute.arch.elect_one():  # the same bytes for a block and for a chunk
            cute.arch.mbarrier_arrive_and_expect_tx(slots.barriers + slot, SLOT_BYTES)
        for load in loads:
            load.copy(0, 0, slot, slots.barriers + slot)
    operands = ScaleOperands(scaled, BLOCK, 16, Float8E4M3FN, SHAPE.group)
    sfa, sfb = make_scale_copies(operands, tuple(slots.scales), (columns, columns + 16))
    tCrA, tCrB = scaled.make_fragment_A(slots.codes[0]), scaled.make_fragment_B(slots.codes[1])
    cute.arch.mbarrier_wait(slots.barriers, 0)
    sfa.run(0)
    sfb.run(0)
    first, second = (None, None, None, 0), (None, None, None, 1)
    a, b = (tCrA[first], sfa.fragment), (tCrB[first], sfb.fragment)
    multiply_scaled(scaled, accumulator, a, b, False)
    tLrA = low_rank.make_fragment_A(slots.floats[0])
    tLrB = low_rank.make_fragment_B(slots.floats[1])
    cute.arch.mbarrier_wait(slots.barriers + 1, 0)
    add_low_rank(low_rank, accumulator, tLrA[second], tLrB[second])  # in order behind the block
    with cute.arch.elect_one():
        tcgen05.commit(slots.barriers + 2)


@cute.kernel
def multiply(codes: Any, chunks: Any, scales: Any, y: cute.Tensor):
    """y = scaled product + low-rank product."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    scaled, low_rank = make_mmas()
    slots = allocate_slots(scaled, low_rank)
    address = SmemAllocator().allocate_array(Int32, 4, byte_alignment=16)
    if warp == 0:
        cute.arch.alloc_tmem(256, address)
        cute.arch.relinquish_tmem_alloc_permit()
        with cute.arch.elect_one():
            for index in range(3):
                cute.arch.mbarrier_init(slots.barriers + index, 1)
        cute.arch.mbarrier_init_fence()
    for target, source in zip(slots.scales, scales, strict=True):
        flat = cute.make_tensor(cute.recast_ptr(target.iterator, dtype=Uint8), SF_BYTES)
        for start in cutlass.range_constexpr(0, SF_BYTES, 128):
            flat[start + thread] = source[start + thread]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    accumulator = cute.make_tensor(pointer, make_accumulator_layout(scaled, BLOCK[:2]))
    if warp == 0:
        multiply_role(slots, codes, chunks, accumulator, pointer + 128)
    cute.arch.mbarrier_wait(slots.barriers + 2, 0)
    for part in cutlass.range_constexpr(4):
        row = load_columns(accumulator, Int32(part * 32), 32, thread)
        wait_for_columns()
        target = cute.flat_divide(y[(thread, None)], (32,))
        cute.autovec_copy(row, target[(None, part)])
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, 256)


@cute.jit
def launch(codes: Any, chunks: Any, scales: Any, y: cute.Tensor):
    """Make four descriptors and launch one CTA."""
    operands = []
    elements = (Float4E2M1FN, Float16)
    for mma, tiler, element, pair in zip(
        make_mmas(), (BLOCK, CHUNK), elements, (codes, chunks), strict=True
    ):
        cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
        slot = cute.slice_(make_operand_layouts(mma, tiler, element)[0], (None, None, None, 0))
        made = []
        for make, tensor in zip((make_tiled_tma_atom_A, make_tiled_tma_atom_B), pair, strict=True):
            if cutlass.const_expr(element is Float4E2M1FN):
                tensor = make_code_tensor(tensor, element)
            load = cpasync.CopyBulkTensorTileG2SOp()
            made.append(TmaOperand(*make(load, tensor, slot, tiler, mma, cluster)))
        operands.append(made)
    multiply(operands[0], operands[1], scales, y).launch(grid=(1, 1, 1), block=(128, 1, 1))


def main() -> None:
    """Compare with float64 from the bytes."""
    x, w = (quantize(torch.randn(128, 256), "nvfp4_one_level") for _ in range(2))
    lora_act, lora_up = torch.randn(2, 128, 64).half()
    scales = [
        pack_scales(one.scales.view(torch.uint8), "swizzled_128x4").flatten() for one in (x, w)
    ]
    y = torch.full((128, 128), float("nan"), device="cuda")

    def pass_over(*tensors):
        return tuple(from_dlpack(one.cuda(), assumed_align=16) for one in tensors)

    launch(
        pass_over(x.data, w.data), pass_over(lora_act, lora_up), pass_over(*scales), *pass_over(y)
    )
    torch.cuda.synchronize()
    expected = dequantize(x).double() @ dequantize(w).double().T
    expected += lora_act.double() @ lora_up.double().T
    assert (y.cpu() - expected).norm() < 1e-6 * expected.norm()
    print("block and chunk in one accumulator, relative error below 1e-6")


if __name__ == "__main__":
    main()
