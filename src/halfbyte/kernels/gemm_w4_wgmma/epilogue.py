"""The epilogue of a consumer warpgroup: 64 channels of a tile, from accumulator to y.

The accumulator holds y transposed. A thread's values of eight tokens are scaled, rounded in pairs
and stored by `stmatrix.trans`, which turns an 8 x 8 matrix of channels by tokens into rows of
tokens; the staging buffer is what TMA stores, row-major, clipped at the last token and channel.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from halfbyte.device.float_arithmetic import cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32
from halfbyte.device.memory_access import ld_shared_f32_vector
from halfbyte.device.operand_load import TmaOperand
from halfbyte.device.swizzled_box import make_store_operand, partition_boxes
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warp_product import stmatrix_x2_trans, stmatrix_x4_trans
from halfbyte.kernels.gemm_w4_wgmma.buffers import SharedBuffers, view_output_boxes
from halfbyte.kernels.gemm_w4_wgmma.config import (
    CHANNELS,
    CONSUMER_WARPGROUPS,
    ROW_BYTES,
    WARPGROUP_CHANNELS,
    WgmmaGemmConfig,
    plan_storage,
)
from halfbyte.kernels.gemm_w4_wgmma.work import Work

FIRST_BARRIER = 1  # named barrier of the first consumer warpgroup
WARPGROUP_THREADS = 128


class Factors(NamedTuple):
    """What the accumulator is multiplied with and what is added, in global memory; None without.

    Attributes:
        channel_scale, bias: float32 [N_pad]. token_scale: float32 [M]. alpha: float32 [1].
        act_group_scale: float16 [M, K_pad / 64], of sums of 64 columns.
    """

    channel_scale: Any
    token_scale: Any
    act_group_scale: Any
    bias: Any
    alpha: Any


class ThreadFactors(NamedTuple):
    """A thread's factors of one tile, in registers.

    Attributes:
        scales, biases: of channels g and g + 8 of the warp; biases are zeros without a bias.
        tokens: scales of tokens `thread` and `thread + 128`, for the warpgroup.
    """

    scales: tuple[Float32, Float32]
    biases: tuple[Float32, Float32]
    tokens: tuple[Float32, Float32]


def make_output_operand(config: WgmmaGemmConfig, y: Any) -> TmaOperand:
    """Return the descriptor of y [M, N]."""
    return make_store_operand(y, plan_storage(config).chunk_tokens, ROW_BYTES)


@dataclass(frozen=True)
class TileEpilogue(TracedRecord):
    """Stores the tiles of one consumer warpgroup.

    Attributes:
        config: of the kernel. work: of this CTA. buffers: shared memory.
        factors: in global memory. output: descriptor of y. num_tokens: M.
        warpgroup: 0 or 1. thread: of the warpgroup.
    """

    config: cutlass.Constexpr
    work: Work
    buffers: SharedBuffers
    factors: Factors
    output: TmaOperand
    num_tokens: Int32
    warpgroup: Int32
    thread: Int32

    @cute.jit
    def load_factors(self, token_tile: Int32, group: Int32) -> ThreadFactors:
        """Start reading a tile's factors; they arrive while it is multiplied."""
        config, factors = self.config, self.factors
        lane = self.thread % 32
        channel = self.work.loaded_channel_tile(group) * CHANNELS
        channel += self.warpgroup * WARPGROUP_CHANNELS + self.thread // 32 * 16 + lane // 4
        scales = factors.channel_scale[channel], factors.channel_scale[channel + 8]
        if cutlass.const_expr(factors.alpha is not None):
            alpha = factors.alpha[0]
            scales = scales[0] * alpha, scales[1] * alpha
        biases = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(factors.bias is not None):
            biases = factors.bias[channel], factors.bias[channel + 8]
        first, second = Float32(0.0), Float32(0.0)
        if cutlass.const_expr(factors.token_scale is not None):
            token = token_tile * config.tokens + self.thread
            end = cutlass.min(self.num_tokens, (token_tile + 1) * config.tokens)
            if token < end:
                first = factors.token_scale[token]
            if token + WARPGROUP_THREADS < end:
                second = factors.token_scale[token + WARPGROUP_THREADS]
        return ThreadFactors(scales, biases, (first, second))

    def join(self) -> None:
        """Wait for all threads of the warpgroup."""
        cute.arch.barrier(
            barrier_id=FIRST_BARRIER + self.warpgroup, number_of_threads=WARPGROUP_THREADS
        )

    @cute.jit
    def store_tile(
        self, accumulator: Any, factors: ThreadFactors, token_tile: Int32, group: Int32
    ) -> None:
        """Scale, round, stage and store a tile, `chunk_tokens` tokens at a time."""
        config, storage = self.config, plan_storage(self.config)
        self.stage_token_scales(factors.tokens)
        boxes = view_output_boxes(config, self.buffers)
        shape = storage.chunk_tokens, WARPGROUP_CHANNELS
        store = partition_boxes(self.output, boxes, shape)
        column = self.work.channel_tile(group) * CONSUMER_WARPGROUPS + self.warpgroup
        num_chunks = config.tokens // storage.chunk_tokens
        for chunk in cutlass.range_constexpr(num_chunks):
            buffer = chunk % storage.num_chunk_buffers
            if self.thread == 0:
                pending = count_pending(chunk, num_chunks, storage.num_chunk_buffers)
                cute.arch.cp_async_bulk_wait_group(pending, read=True)
            self.join()
            self.stage(accumulator, factors, chunk, buffer)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.join()
            if self.thread == 0:
                place = (buffer, self.warpgroup)
                row = token_tile * num_chunks + chunk
                cute.copy(
                    store.atom, store.target[(None, place)], store.source[(None, row, column)]
                )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def stage_token_scales(self, scales: tuple[Float32, Float32]) -> None:
        """Put the tile's token scales into shared memory; a barrier follows."""
        if cutlass.const_expr(self.factors.token_scale is not None):
            staged = cute.make_tensor(
                self.buffers.token_scales,
                cute.make_layout(CONSUMER_WARPGROUPS * self.config.tokens),
            )
            first = self.warpgroup * self.config.tokens
            for part in cutlass.range_constexpr(2):
                token = self.thread + part * WARPGROUP_THREADS
                if token < self.config.tokens:
                    staged[first + token] = scales[part]

    def stage(self, accumulator: Any, factors: ThreadFactors, chunk: int, buffer: int) -> None:
        """Write one chunk to its staging buffer."""
        storage = plan_storage(self.config)
        lane, warp = self.thread % 32, self.thread // 32
        matrix, row = lane // 8, lane % 8
        staging = self.buffers.output.toint()
        staging += (self.warpgroup * storage.num_chunk_buffers + buffer) * storage.chunk_bytes
        # Matrices are (channels 0-7, 8-15) of the warp by (tokens 0-7, 8-15); rows are swizzled.
        part = (2 * warp + matrix % 2) ^ row
        address = staging + (8 * (matrix // 2) + row) * ROW_BYTES + part * 16
        first = chunk * storage.chunk_tokens
        scales = self.load_token_scales(first, storage.chunk_tokens)
        for token in range(0, storage.chunk_tokens, 16):
            words = self.finish(accumulator, factors, first + token, scales[token // 8])
            if token + 8 < storage.chunk_tokens:
                words += self.finish(
                    accumulator, factors, first + token + 8, scales[token // 8 + 1]
                )
                stmatrix_x4_trans(address + token * ROW_BYTES, tuple(words))
            else:
                stmatrix_x2_trans(address + token * ROW_BYTES, tuple(words))

    def load_token_scales(self, first: int, count: int) -> list[Any]:
        """Return this thread's two token scales of each eight tokens; None where there are none.

        All are read before the first is used: one after the other, each would be waited for.
        """
        if self.factors.token_scale is None:
            return [None] * (count // 8)
        start = self.warpgroup * self.config.tokens + first + 2 * (self.thread % 4)
        address = self.buffers.token_scales.toint() + start * 4
        return [ld_shared_f32_vector(address + token * 4, 2) for token in range(0, count, 8)]

    def finish(
        self, accumulator: Any, factors: ThreadFactors, token: int, tokens: Any
    ) -> list[Uint32]:
        """Return the rounded pairs of channels g and g + 8 of eight tokens from `token` on.

        `tokens` are the scales of this thread's two of them, or None.
        """
        convert = cvt_rn_bf16x2_f32 if self.config.out_dtype == "bfloat16" else cvt_rn_f16x2_f32
        words = []
        for half in range(2):
            pair = []
            for index in range(2):
                value = accumulator[token // 2 + 2 * half + index] * factors.scales[half]
                if tokens is not None:
                    value = value * tokens[index]
                if self.factors.bias is not None:
                    value = value + factors.biases[half]
                pair.append(value)
            words.append(convert(*pair))
        return words

    @cute.jit
    def finish_role(self) -> None:
        """Wait until everything has been written to global memory."""
        if self.thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)


def count_pending(chunk: int, num_chunks: int, num_buffers: int) -> int:
    """Return how many stores may be unread when chunk number `chunk` of a tile is staged.

    Its buffer was last used by the chunk `num_buffers` before, or by the last one of the tile
    before that used it.
    """
    if chunk >= num_buffers:
        return num_buffers - 1
    last = max(index for index in range(num_chunks) if index % num_buffers == chunk)
    return num_chunks - 1 - last + chunk
