"""y = lora_act @ lora_up^T of one 128 x 128 tile: a ring of two slots, one MMA, to break in tests.

    python low_rank_product.py [--producer-parity 0] [--flag always-true|always-false]

Each option puts one known bug in: a producer that starts at parity 0 waits for slots that nobody
gives back; a flag that is decided while the kernel is traced holds for every chunk. The program
compares y with torch and exits with 1 where they differ.
"""

import argparse
import sys

import cutlass
import torch
from cutlass import Float16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import (
    load_columns,
    make_accumulator_layout,
    wait_for_columns,
)
from halfbyte.device.operand_load import TmaOperand, partition_block_load
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.scaled_product import MmaShape, make_low_rank_mma, make_operand_layouts

TILE, CHUNK, STAGES = 128, 64, 2
MMA_WARP, LOAD_WARP, NUM_WARPS = 4, 5, 6
CHUNK_BYTES = 2 * TILE * CHUNK * 2  # of both operands
COLUMNS = 32
FLAGS = ("varies", "always-true", "always-false")


class Product:
    """Host function and kernel; `producer_parity` and `flag` say which bugs they have."""

    def __init__(self, producer_parity: int, flag: str) -> None:
        self.producer_parity = producer_parity
        self.flag = flag

    def make_mma(self):
        return make_low_rank_mma(MmaShape(TILE, TILE, 1), "float16")

    @cute.jit
    def launch(self, lora_act: cute.Tensor, lora_up: cute.Tensor, y: cute.Tensor):
        mma = self.make_mma()
        tiler = (TILE, TILE, CHUNK)
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        operands = []
        for make, tensor, layout in zip(
            (make_tiled_tma_atom_A, make_tiled_tma_atom_B),
            (lora_act, lora_up),
            make_operand_layouts(mma, tiler, Float16),
            strict=True,
        ):
            slot = cute.slice_(layout, (None, None, None, 0))
            operands.append(TmaOperand(*make(load, tensor, slot, tiler, mma, (1, 1, 1, 1))))
        chunks = lora_act.shape[1] // CHUNK
        self.kernel(operands[0], operands[1], y, chunks).launch(
            grid=(1, 1, 1), block=(32 * NUM_WARPS, 1, 1)
        )

    @cute.kernel
    def kernel(self, a: TmaOperand, b: TmaOperand, y: cute.Tensor, chunks: Int32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma = self.make_mma()
        memory = SmemAllocator()
        slots = [
            self.allocate_slots(memory, layout)
            for layout in make_operand_layouts(mma, (TILE, TILE, CHUNK), Float16)
        ]
        barriers = memory.allocate_array(Int64, 2 * STAGES + 2)
        address = memory.allocate_array(Int32, 4, byte_alignment=16)
        ring, done = Ring(barriers, STAGES), Ring(barriers + 2 * STAGES, 1)
        if warp == 0:
            with cute.arch.elect_one():
                ring.init(1, 1)
                done.init(1, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(TILE, address)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, address)
        accumulator = cute.make_tensor(pointer, make_accumulator_layout(mma, (TILE, TILE)))
        if warp == LOAD_WARP:
            self.load_role(ring, (a, b), slots, chunks)
        if warp == MMA_WARP:
            self.multiply_role(ring, done, accumulator, slots, chunks)
        if warp < MMA_WARP:
            done.wait_full(RingPosition.consumer(1))
            thread = cute.arch.thread_idx()[0]
            for part in cutlass.range_constexpr(TILE // COLUMNS):
                values = load_columns(accumulator, part * COLUMNS, COLUMNS, thread)
                wait_for_columns()
                row = cute.make_tensor(values.iterator, COLUMNS)
                for column in cutlass.range_constexpr(COLUMNS):
                    y[thread, part * COLUMNS + column] = row[column]
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(pointer, TILE)

    def allocate_slots(self, memory, layout):
        outer = cute.append(
            cute.slice_(layout.outer, (None, None, None, 0)),
            cute.make_layout(STAGES, stride=TILE * CHUNK),
        )
        return memory.allocate_tensor(Float16, outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def load_role(self, ring, operands, slots, chunks):
        thread_mma = self.make_mma().get_slice(0)
        loads = []
        for operand, slot, side in zip(operands, slots, "AB", strict=True):
            tiles = cute.local_tile(operand.tensor, (TILE, CHUNK), (None, None))
            part = thread_mma.partition_A(tiles) if side == "A" else thread_mma.partition_B(tiles)
            loads.append(partition_block_load(operand, part, slot, 0, cute.make_layout(1)))
        position = RingPosition(STAGES, Int32(0), Int32(self.producer_parity))
        for chunk in cutlass.range(chunks, unroll=1):
            ring.wait_empty(position)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full(position), CHUNK_BYTES)
            for load in loads:
                load.copy(0, chunk, position.index, ring.full(position))
            position = position.next()

    @cute.jit
    def multiply_role(self, ring, done, accumulator, slots, chunks):
        mma = self.make_mma()
        a, b = mma.make_fragment_A(slots[0]), mma.make_fragment_B(slots[1])
        position = RingPosition.consumer(STAGES)
        for chunk in cutlass.range(chunks, unroll=1):
            ring.wait_full(position)
            for step in cutlass.range_constexpr(CHUNK // 16):
                if cutlass.const_expr(self.flag == "varies"):
                    mma.set(tcgen05.Field.ACCUMULATE, chunk != 0 if step == 0 else True)
                elif cutlass.const_expr(self.flag == "always-true"):
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                else:
                    mma.set(tcgen05.Field.ACCUMULATE, step != 0)
                k = (None, None, step, position.index)
                cute.gemm(mma, accumulator, a[k], b[k], accumulator)
            with cute.arch.elect_one():
                tcgen05.commit(ring.empty(position))
            position = position.next()
        with cute.arch.elect_one():
            tcgen05.commit(done.full(RingPosition.consumer(1)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--producer-parity", type=int, default=1)
    parser.add_argument("--flag", choices=FLAGS, default="varies")
    parser.add_argument("--rank", type=int, default=192)
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(7)
    act, up = (
        torch.randint(-4, 5, (TILE, options.rank), generator=generator).half().cuda()
        for _ in range(2)
    )
    y = torch.full((TILE, TILE), float("nan"), device="cuda")
    tensors = [from_dlpack(tensor, assumed_align=16) for tensor in (act, up, y)]
    product = Product(options.producer_parity, options.flag)
    cute.compile(product.launch, *tensors)(*tensors)
    torch.cuda.synchronize()
    wanted = act.float() @ up.float().T
    differ = int((y != wanted).sum())
    print(f"{differ} of {y.numel()} elements differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
