"""Units of a row: sixteen neighbouring columns, what one thread loads, quantizes and stores.

Thread i of those that share a row has unit i of it, and in longer rows the one as many units
further on. Four neighbouring threads hold 64 columns in order; act wants word p of all four beside
each other (kernels/gemm_w4_wgmma/weight_layout.py). `transpose_words` exchanges them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import (
    cvt_f32_bf16x2,
    cvt_f32_f16x2,
    mov_b32_to_f32,
)
from halfbyte.device.memory_access import (
    cp_async_16,
    ld_global_b16,
    ld_global_f32,
    ld_global_v4,
    ld_shared_v4_f32,
    st_global_v4,
    st_shared_f32,
)
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K, WIDTH
from halfbyte.kernels.quantize_act_wgmma.work import Work

WORDS = 8  # of a unit of x: two numbers each
_PIECE_BYTES = 16


@dataclass(frozen=True)
class Units(TracedRecord):
    """The units of one thread.

    Attributes:
        work: of the CTA.
        group: which rows it has.
        thread: of those that share a row.
        factors: float32 [units * 16] in registers, or None: there are none, or in shared memory.
    """

    work: Work
    group: Int32
    thread: Int32
    factors: Any

    @property
    def quad(self) -> Int32:
        """Which of the four threads that hold 64 columns."""
        return self.thread % 4

    def column(self, unit: int) -> Int32:
        """Return the first column of a unit."""
        return self.thread * WIDTH + unit * self.work.config.span

    @cute.jit
    def load_rows(self, words: Any, batch: Int32) -> None:
        """Load x of a batch of this CTA's rows, Uint32 [rows at once * units * 8]; else zeros."""
        config = self.work.config
        for index in cutlass.range_constexpr(config.rows_at_once * config.units):
            row = batch * config.rows_at_once + index // config.units
            self.load_unit(words, index * WORDS, row, self.column(index % config.units))

    @cute.jit
    def load_unit(self, words: Any, first: cutlass.Constexpr, row: Int32, column: Int32) -> None:
        """Load sixteen columns of one of this CTA's rows; what lies outside is zero."""
        work = self.work
        place = Int64(work.rows.first + work.rows.own + row) * work.x.pitch + Int64(column)
        source = work.x.address + place * 2
        for index in cutlass.range_constexpr(WORDS):
            words[first + index] = Uint32(0)
        if (row < work.rows.own_count) & (column < work.x.columns):
            is_whole = column + WIDTH <= work.x.columns
            if cutlass.const_expr(not work.config.x_is_aligned):
                is_whole = Boolean(False)
            if is_whole:
                for piece in cutlass.range_constexpr(2):
                    loaded = ld_global_v4(source + piece * _PIECE_BYTES)
                    for index in cutlass.range_constexpr(4):
                        words[first + piece * 4 + index] = loaded[index]
            else:
                for index in cutlass.range_constexpr(WIDTH):
                    if column + index < work.x.columns:
                        bits = Uint32(ld_global_b16(source + 2 * index)) << (16 * (index % 2))
                        words[first + index // 2] = words[first + index // 2] | bits

    def read_factors(self, unit: int) -> list[Any] | None:
        """Return the factors or divisors of a unit's columns, None without smooth."""
        config = self.work.config
        if not config.has_smooth:
            return None
        if config.has_shared_smooth:
            address = self.work.shared + config.smooth_offset + self.thread * _PIECE_BYTES
            step = config.row_threads * _PIECE_BYTES
            pieces = [ld_shared_v4_f32(address + (4 * unit + four) * step) for four in range(4)]
            return [value for piece in pieces for value in piece]
        return [self.factors[unit * WIDTH + index] for index in range(WIDTH)]

    def unpack(self, words: Any, first: int) -> list[Any]:
        """Return the sixteen float32 values of a unit's words."""
        convert = cvt_f32_f16x2 if self.work.config.dtype == "float16" else cvt_f32_bf16x2
        return [value for index in range(WORDS) for value in convert(words[first + index])]

    @cute.jit
    def store_unit(self, row: Int32, unit: cutlass.Constexpr, words: Any) -> None:
        """Store a unit's words of act, four for each byte of an element."""
        work, config = self.work, self.work.config
        column = self.column(unit)
        block = column // BLOCK_K * (BLOCK_K * config.act_bytes)
        this_row = Int64(work.rows.first + work.rows.own + row)
        address = work.outputs.act + this_row * work.outputs.act_pitch
        address = address + Int64(block + self.quad * _PIECE_BYTES)
        for piece in cutlass.range_constexpr(config.act_bytes):
            whole = transpose_words([words[4 * piece + index] for index in range(4)], self.quad)
            if (row < work.rows.own_count) & (column < work.outputs.act_columns):
                st_global_v4(address + piece * BLOCK_K, whole)


@cute.jit
def make_units(work: Work, thread: Int32) -> Units:
    """Return the units of quantizing thread `thread`, with their factors on the way.

    Beyond K lie factors 0, whatever is added to x before, or divisors 1.
    """
    config = work.config
    group = cute.arch.make_warp_uniform(thread // config.row_threads)
    thread_of_row = thread % config.row_threads
    factors = None
    if cutlass.const_expr(config.has_shared_smooth):
        for four in cutlass.range(thread, config.columns // 4, config.quantize_threads, unroll=1):
            copy_four_factors(work, four)
    elif cutlass.const_expr(config.has_smooth):
        factors = cute.make_rmem_tensor((config.units * WIDTH,), Float32)
        for unit in cutlass.range_constexpr(config.units):
            for four in cutlass.range_constexpr(4):
                column = thread_of_row * WIDTH + unit * config.span + 4 * four
                load_four_factors(work, factors, unit * WIDTH + 4 * four, column)
    return Units(work, group, thread_of_row, factors)


@cute.jit
def load_four_factors(work: Work, factors: Any, first: cutlass.Constexpr, column: Int32) -> None:
    """Load the factors of four neighbouring columns into registers."""
    beyond = cutlass.const_expr(0.0 if work.config.has_token_scale else 1.0)
    source = work.smooth + Int64(column) * 4
    for index in cutlass.range_constexpr(4):
        factors[first + index] = Float32(beyond)
    if column + 4 <= work.x.columns:
        loaded = ld_global_v4(source)
        for index in cutlass.range_constexpr(4):
            factors[first + index] = mov_b32_to_f32(loaded[index])
    else:
        for index in cutlass.range_constexpr(4):
            if column + index < work.x.columns:
                factors[first + index] = ld_global_f32(source + 4 * index)


@cute.jit
def copy_four_factors(work: Work, four: Int32) -> None:
    """Copy the factors of columns 4 * four to 4 * four + 3 to shared memory, asynchronously.

    There, what a thread reads at once lies beside what its neighbour does: [unit, four of the
    unit, thread].
    """
    config = work.config
    column = four * 4
    thread = column % config.span // WIDTH
    place = (column // config.span * 4 + four % 4) * config.row_threads + thread
    target = work.shared + config.smooth_offset + place * _PIECE_BYTES
    source = work.smooth + Int64(column) * 4
    if column + 4 <= work.x.columns:
        cp_async_16(target, source, Int32(_PIECE_BYTES))
    else:
        for index in cutlass.range_constexpr(4):
            value = Float32(0.0 if config.has_token_scale else 1.0)
            if column + index < work.x.columns:
                value = ld_global_f32(source + 4 * index)
            st_shared_f32(target + 4 * index, value)


def transpose_words(words: list[Any], quad: Int32) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Return word `t` of each of four neighbouring lanes, in their order.

    Args:
        words: four.
        quad: t of this lane; all lanes of the warp take part.
    """
    moved = list(words)
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        is_upper = (quad & bit) != 0
        for low, high in pairs:
            sent = cutlass.select_(is_upper, moved[low], moved[high])
            received = Uint32(cute.arch.shuffle_sync_bfly(sent, bit))
            moved[low] = cutlass.select_(is_upper, received, moved[low])
            moved[high] = cutlass.select_(is_upper, moved[high], received)
    return Uint32(moved[0]), Uint32(moved[1]), Uint32(moved[2]), Uint32(moved[3])
