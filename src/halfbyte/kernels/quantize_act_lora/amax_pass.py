"""The global scale of a call: read, or found by a first pass over x.

A dynamic scale follows the largest finite |z| of the tensor. The first pass leaves one maximum per
CTA, and every CTA of the second pass takes the largest of them: no atomics, nothing to clear
beforehand, and the same bits in any order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import Divisor, max_u32, mul_rn_f32
from halfbyte.device.memory_access import (
    ld_global_b16,
    ld_global_b32,
    ld_global_f32,
    ld_global_v4,
    ld_shared_b32,
    st_global_b32,
    st_global_f32,
    st_shared_b32,
)
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    choose_dynamic_global_scale,
    find_largest_finite_magnitude,
    shift_and_smooth,
    unpack_values,
)

AMAX_THREADS = 256
_PIECE = 8  # elements that a thread reads at once: 16 bytes


@cute.kernel
def find_amax_kernel(
    x: cute.Tensor,
    smooth: cute.Tensor | None,
    partial_amax: cute.Tensor,
    config: cutlass.Constexpr,
) -> None:
    """Write the largest finite |z| of this CTA's part of x [M, K] to partial_amax [CTA]."""
    if cutlass.const_expr(config.use_pdl):
        cute.arch.griddepcontrol_wait()
    shared = cutlass.memory.SmemAllocator().allocate_array(
        Uint32, AMAX_THREADS // 32, byte_alignment=16
    )
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    pieces_a_row = (x.shape[1] + (_PIECE - 1)) // _PIECE
    largest = Uint32(0)
    for row in cutlass.range(block, x.shape[0], ctas, unroll=1):
        for piece in cutlass.range(thread, pieces_a_row, AMAX_THREADS, unroll=1):
            values = read_smoothed_piece(x, smooth, (row, piece * _PIECE), config)
            largest = max_u32(largest, find_largest_finite_magnitude(values))
    largest = share_largest(largest, shared.toint(), thread, AMAX_THREADS)
    if thread == 0:
        st_global_b32(partial_amax.iterator.toint() + Int64(block) * 4, largest)
    if cutlass.const_expr(config.use_pdl):
        cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def read_smoothed_piece(
    x: cute.Tensor,
    smooth: cute.Tensor | None,
    place: tuple[Int32, Int32],
    config: cutlass.Constexpr,
) -> list[Any]:
    """Return z of eight elements at (row, column); what lies beyond K is 0."""
    row, column = place
    columns = x.shape[1]
    source = x.iterator.toint() + (Int64(row) * Int64(x.stride[0]) + Int64(column)) * 2
    words = cute.make_rmem_tensor((_PIECE // 2,), Uint32)
    divisors = cute.make_rmem_tensor((_PIECE,), Float32)
    words.fill(0)
    divisors.fill(1.0)
    if cutlass.const_expr(config.x_is_aligned):
        is_whole = column + _PIECE <= columns
    else:
        is_whole = cutlass.Boolean(False)
    if is_whole:
        loaded = ld_global_v4(source)
        for index in cutlass.range_constexpr(_PIECE // 2):
            words[index] = loaded[index]
    else:
        for index in cutlass.range_constexpr(_PIECE):
            if column + index < columns:
                bits = Uint32(ld_global_b16(source + 2 * index))
                words[index // 2] = words[index // 2] | (bits << Uint32(16 * (index % 2)))
    if cutlass.const_expr(smooth is not None):
        for index in cutlass.range_constexpr(_PIECE):
            if column + index < columns:
                divisors[index] = ld_global_f32(smooth.iterator.toint() + Int64(column + index) * 4)
    values = unpack_values([words[index] for index in range(_PIECE // 2)], config.dtype)
    wanted = None
    if cutlass.const_expr(smooth is not None):
        wanted = [Divisor(divisors[index]) for index in range(_PIECE)]
    return shift_and_smooth(values, wanted, config.activation.shift)


@cute.jit
def share_largest(
    largest: Uint32, shared: Int32, thread: Int32, threads: cutlass.Constexpr
) -> Uint32:
    """Return the largest value of a CTA's threads to all; `shared` holds a word a warp."""
    for offset in (16, 8, 4, 2, 1):
        largest = max_u32(largest, Uint32(cute.arch.shuffle_sync_bfly(largest, offset)))
    if thread % 32 == 0:
        st_shared_b32(shared + thread // 32 * 4, largest)
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(threads // 32):
        largest = max_u32(largest, ld_shared_b32(shared + 4 * warp))
    cute.arch.sync_threads()  # the words may be overwritten from here on
    return largest


@cute.jit
def read_global_scale(scales: Any, shared: Int32, thread: Int32, config: cutlass.Constexpr) -> Any:
    """Return g, or None for a mode without one. All threads call it."""
    rule = cutlass.const_expr(config.activation.global_scale)
    if cutlass.const_expr(rule == "none"):
        return None
    if cutlass.const_expr(rule == "static"):
        return ld_global_f32(scales.activation.iterator.toint())
    partial_amax = scales.partial_amax
    largest = Uint32(0)
    for index in cutlass.range(thread, partial_amax.shape[0], config.threads, unroll=1):
        address = partial_amax.iterator.toint() + Int64(index) * 4
        largest = max_u32(largest, ld_global_b32(address))
    return choose_dynamic_global_scale(share_largest(largest, shared, thread, config.threads))


@cute.jit
def store_global_scale(scales: Any, global_scale: Float32, is_first: cutlass.Boolean) -> None:
    """Write g and alpha = g * the weight's part, from the one thread of the grid that is first."""
    if is_first:
        st_global_f32(scales.activation.iterator.toint(), global_scale)
        st_global_f32(scales.alpha.iterator.toint(), mul_rn_f32(global_scale, scales.weight))
