"""Device code of a tiny kernel: y = scale * (a + b), elementwise, n of them."""

import cutlass
from cutlass import cute

THREADS = 128


@cute.kernel
def scaled_sum_kernel(
    a: cute.Tensor, b: cute.Tensor, y: cute.Tensor, n: cutlass.Int32, scale: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < n:
        y[i] = cutlass.Float32(scale) * (a[i] + b[i])


@cute.jit
def launch_scaled_sum(
    a: cute.Tensor,
    b: cute.Tensor,
    y: cute.Tensor,
    n: cutlass.Int32,
    stream,
    scale: cutlass.Constexpr,
):
    blocks = (n + THREADS - 1) // THREADS
    scaled_sum_kernel(a, b, y, n, scale).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
    )
