"""Tensor memory: columns by alloc, lanes by warp, two views of the same cells."""

import torch
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

COLUMNS = 32  # a power of two, at least 32


@cute.kernel
def through_tensor_memory(x: cute.Tensor, y: cute.Tensor):
    """Write x [128, 32] a thread a lane, read it back as 16 x 256 bit matrices, store as y."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    address = SmemAllocator().allocate_array(Int32, 4, byte_alignment=16)
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, address)  # the whole warp; blocks until there is room
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
    # An address is lane << 16 | column: a step of one lane is a stride of 65536.
    cells = cute.make_tensor(pointer, cute.make_layout((128, COLUMNS), stride=(65536, 1)))

    repeat = tcgen05.Repetition
    write = cute.make_copy_atom(tcgen05.St32x32bOp(repeat.x32), Float32)
    writer = tcgen05.make_tmem_copy(write, cells).get_slice(thread)
    rows = writer.partition_S(x)  # of this thread: lane `thread`, all columns
    values = cute.make_rmem_tensor(rows.shape, Float32)
    cute.autovec_copy(rows, values)
    cute.copy(write, values, writer.partition_D(cells))
    cute.arch.fence_view_async_tmem_store()  # tcgen05.wait::st: this warp's stores are done

    read = cute.make_copy_atom(tcgen05.Ld16x256bOp(repeat.x4), Float32)
    reader = tcgen05.make_tmem_copy(read, cells).get_slice(thread)
    targets = reader.partition_D(y)  # of this thread: pairs of columns in rows 8 apart
    values = cute.make_rmem_tensor(targets.shape, Float32)
    cute.copy(read, reader.partition_S(cells), values)
    cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld: the registers are filled
    cute.autovec_copy(values, targets)
    cute.arch.sync_threads()  # nobody reads any more
    if warp == 0:
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor):
    """Launch one CTA of four warps: warp w reaches lanes 32 w to 32 w + 31."""
    through_tensor_memory(x, y).launch(grid=(1, 1, 1), block=(128, 1, 1))


def main() -> None:
    """What went in as rows comes out of another instruction as the same matrix."""
    x = torch.arange(128 * COLUMNS, dtype=torch.float32, device="cuda").reshape(128, COLUMNS)
    y = torch.full_like(x, float("nan"))
    launch(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16))
    torch.cuda.synchronize()
    assert torch.equal(x, y)
    print("128 lanes x 32 columns: the same by 32x32b and by 16x256b")


if __name__ == "__main__":
    main()
