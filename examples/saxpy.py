"""y = a * x + y in CuTe DSL. The same program on a GPU (`python`) and on none (`halfbyte run`)."""

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

THREADS = 128


@cute.kernel
def saxpy_kernel(a: cutlass.Float32, x: cute.Tensor, y: cute.Tensor, count: cutlass.Int32):
    """Each thread takes one element."""
    index = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if index < count:
        y[index] = a * x[index] + y[index]


@cute.jit
def saxpy(a: cutlass.Float32, x: cute.Tensor, y: cute.Tensor, count: cutlass.Int32):
    """Launch one thread for every element."""
    blocks = (count + THREADS - 1) // THREADS
    saxpy_kernel(a, x, y, count).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1))


def main() -> None:
    """Compare the kernel with torch."""
    x, y = torch.randn(2, 1000, device="cuda")
    expected = 2.5 * x + y
    saxpy(2.5, from_dlpack(x), from_dlpack(y), 1000)
    torch.cuda.synchronize()
    assert torch.allclose(y, expected)
    print("1,000 elements as torch has them")


if __name__ == "__main__":
    main()
