"""One block-scaled MMA: 128 x 128 x 64 E2M1 codes with an E4M3 scale for each 16 of them."""

import cutlass
import torch
from cutlass import Float4E2M1FN, Float8E4M3FN, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import load_columns, make_accumulator_layout, wait_for_columns
from halfbyte.device.scale_copy import ScaleOperands, make_scale_copies
from halfbyte.device.scaled_product import (
    MmaShape,
    make_operand_layouts,
    make_scale_layouts,
    make_scaled_mma,
    multiply_scaled,
)
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.scale_layout import pack_scales

SHAPE, TILER = MmaShape(128, 128, 1), (128, 128, 64)


@cute.kernel
def multiply(a: cute.Tensor, a_sf: cute.Tensor, b: cute.Tensor, b_sf: cute.Tensor, y: cute.Tensor):
    """Four warps fill shared memory, warp 0 multiplies, all four store their lanes."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    mma = make_scaled_mma(SHAPE, "nvfp4")
    memory = SmemAllocator()
    layout = make_operand_layouts(mma, TILER, Float4E2M1FN)[0]  # B's is the same
    sA, sB = (  # 128 rows of 32 bytes each
        memory.allocate_tensor(Float4E2M1FN, layout.outer, 1024, layout.inner) for _ in "AB"
    )
    sSFA, sSFB = (  # 512 bytes each
        memory.allocate_tensor(Float8E4M3FN, layout, 1024)
        for layout in make_scale_layouts(mma, TILER, 16, 1)
    )
    done = memory.allocate_array(Int64, 1)
    address = memory.allocate_array(Int32, 4, byte_alignment=16)
    if warp == 0:
        cute.arch.alloc_tmem(256, address)  # 128 columns of accumulator, 4 + 4 of scales
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()

    for target, source in ((sA, a), (sB, b)):  # a thread copies a row
        swizzled = cute.recast_ptr(target.iterator, layout.inner, dtype=Uint8)
        rows = cute.make_tensor(swizzled, cute.make_layout((128, 32), stride=(32, 1)))
        for byte in cutlass.range_constexpr(32):
            rows[thread, byte] = source[thread, byte]
    for target, source in ((sSFA, a_sf), (sSFB, b_sf)):  # as they are in global memory
        flat = cute.make_tensor(cute.recast_ptr(target.iterator, dtype=Uint8), 512)
        for index in cutlass.range_constexpr(4):
            flat[index * 128 + thread] = source[index * 128 + thread]
    cute.arch.fence_proxy("async.shared", space="cta")  # the MMA reads by the async proxy
    cute.arch.sync_threads()

    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    accumulator = cute.make_tensor(pointer, make_accumulator_layout(mma, TILER[:2]))
    if warp == 0:
        scales = ScaleOperands(mma, TILER, 16, Float8E4M3FN, SHAPE.group)
        sfa, sfb = make_scale_copies(scales, (sSFA, sSFB), (pointer + 128, pointer + 132))
        sfa.run(0)
        sfb.run(0)
        slot = (None, None, None, 0)
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        left, right = (tCrA[slot], sfa.fragment), (tCrB[slot], sfb.fragment)
        multiply_scaled(mma, accumulator, left, right, False)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    for part in cutlass.range_constexpr(4):
        row = load_columns(accumulator, Int32(part * 32), 32, thread)
        wait_for_columns()
        for column in cutlass.range_constexpr(32):
            y[thread, part * 32 + column] = row[column]
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, 256)


@cute.jit
def launch(a: cute.Tensor, a_sf: cute.Tensor, b: cute.Tensor, b_sf: cute.Tensor, y: cute.Tensor):
    """Launch one CTA of four warps."""
    multiply(a, a_sf, b, b_sf, y).launch(grid=(1, 1, 1), block=(128, 1, 1))


def main() -> None:
    """Compare with the float64 product of the decoded operands."""
    a, b = (quantize(torch.randn(128, 64), "nvfp4_one_level") for _ in range(2))
    y = torch.full((128, 128), float("nan"), device="cuda")
    operands = []
    for operand in (a, b):
        sf = pack_scales(operand.scales.view(torch.uint8), "swizzled_128x4").flatten()
        operands += [operand.data.cuda(), sf.cuda()]
    launch(*(from_dlpack(tensor) for tensor in (*operands, y)))
    expected = dequantize(a).double() @ dequantize(b).double().T
    error = (y.cpu() - expected).norm() / expected.norm()
    print(
        "codes", tuple(a.data.shape), "scales", tuple(a.scales.shape), "packed", operands[1].numel()
    )
    assert error < 1e-6
    print("relative error below 1e-6")


if __name__ == "__main__":
    main()
