"""The quantizing threads of fp8 and int8: a few whole rows at a time, and their scales."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from halfbyte.device.float_arithmetic import (
    add_rn_f32,
    max_magnitude_f32,
    max_u32,
    mov_b32_to_u32,
    mul_rn_f32,
    redux_max_u32,
)
from halfbyte.device.inline_ptx import update_by_ptx
from halfbyte.device.memory_access import (
    ld_shared_v4,
    st_global_f32,
    st_shared_b32,
    st_shared_f32,
)
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_wgmma.token_scale import (
    TokenScale,
    choose_token_scale,
    encode_words,
)
from halfbyte.kernels.quantize_act_wgmma.units import WORDS, Units

BUFFERS = 3  # batches of rows in registers: one in work, two on their way
FIRST_BARRIER = 1  # named barrier of the first group of threads


@dataclass(frozen=True)
class TokenRows(TracedRecord):
    """A quantizing thread of a mode with one scale a row.

    Attributes:
        units: its part of every row.
    """

    units: Units

    @cute.jit
    def run(self) -> None:
        """Quantize this CTA's rows; the ones of the next two batches are on their way meanwhile."""
        work, config = self.units.work, self.units.work.config
        rows = cutlass.const_expr(config.rows_at_once)
        size = cutlass.const_expr(rows * config.units * WORDS)
        step = cutlass.const_expr(config.row_groups)
        buffers = [cute.make_rmem_tensor((size,), Uint32) for _ in range(BUFFERS)]
        first = self.units.group
        for index in cutlass.range_constexpr(BUFFERS - 1):
            self.units.load_rows(buffers[index], first + index * step)
        batches = (work.rows.own_count + (rows - 1)) // rows
        for batch in cutlass.range(first, batches, BUFFERS * step, unroll=1):
            for index in cutlass.range_constexpr(BUFFERS):
                this = batch + index * step
                self.units.load_rows(
                    buffers[(index + BUFFERS - 1) % BUFFERS], this + (BUFFERS - 1) * step
                )
                if this < batches:
                    self.quantize_batch(buffers[index], this)

    @cute.jit
    def quantize_batch(self, words: Any, batch: Int32) -> None:
        """Quantize the rows of a batch; its group of threads calls it."""
        work, config = self.units.work, self.units.work.config
        rows = cutlass.const_expr(config.rows_at_once)
        bytes_of_batch = cutlass.const_expr(rows * config.row_threads // 32 * 4)
        turn = self.units.group * 2 + (batch // config.row_groups & 1)
        maxima = work.shared + config.maxima_offset + turn * bytes_of_batch
        self.share_maxima(words, maxima)
        # x' is made again: what the compiler would keep instead has no room in registers.
        update_by_ptx("", words)
        self.write_rows(words, batch * rows, maxima)

    @cute.jit
    def share_maxima(self, words: Any, maxima: Int32) -> None:
        """Leave the largest |x'| of each row and warp in shared memory, for all to read."""
        config = self.units.work.config
        for row in cutlass.range_constexpr(config.rows_at_once):
            largest = Float32(0.0)
            for unit in cutlass.range_constexpr(config.units):
                for value in self.prepare(words, row, unit):
                    largest = max_magnitude_f32(largest, value)
            bits = redux_max_u32(mov_b32_to_u32(largest))
            if self.units.thread % 32 == 0:
                place = row * (config.row_threads // 32) + self.units.thread // 32
                st_shared_b32(maxima + place * 4, bits)
        cute.arch.barrier(
            barrier_id=FIRST_BARRIER + self.units.group, number_of_threads=config.row_threads
        )

    def prepare(self, words: Any, row: int, unit: int) -> list[Any]:
        """Return x' = (x + shift) * factor of a unit."""
        config = self.units.work.config
        values = self.units.unpack(words, (row * config.units + unit) * WORDS)
        factors = self.units.read_factors(unit)
        if config.shift != 0.0:
            values = [add_rn_f32(value, Float32(config.shift)) for value in values]
        if factors is None:
            return values
        return [mul_rn_f32(value, factor) for value, factor in zip(values, factors, strict=True)]

    @cute.jit
    def write_rows(self, words: Any, first: Int32, maxima: Int32) -> None:
        """Scale, encode and store the rows of a batch, the first of which is this CTA's `first`."""
        work, config = self.units.work, self.units.work.config
        for row in cutlass.range_constexpr(config.rows_at_once):
            warps = cutlass.const_expr(config.row_threads // 32)
            scale = read_scale(maxima + row * (warps * 4), warps, config.mode)
            self.store_scale(first + row, scale.scale)
            if work.is_writing:
                for unit in cutlass.range_constexpr(config.units):
                    stored = encode_words(self.prepare(words, row, unit), scale)
                    self.units.store_unit(first + row, unit, stored)

    @cute.jit
    def store_scale(self, row: Int32, scale: Float32) -> None:
        """Store the scale of one of this CTA's rows, for the sums too."""
        work = self.units.work
        if (self.units.thread == 0) & (row < work.rows.own_count):
            st_shared_f32(work.shared + work.config.scales_offset + row * 4, scale)
            if work.is_writing:
                this_row = Int64(work.rows.first + work.rows.own + row)
                st_global_f32(work.outputs.token_scale + this_row * 4, scale)


def read_scale(maxima: Int32, warps: int, mode: str) -> TokenScale:
    """Return the scale of a row from the maxima of so many warps."""
    largest = Uint32(0)
    for four in range(0, warps, 4):
        for bits in ld_shared_v4(maxima + 4 * four):
            largest = max_u32(largest, bits)
    return choose_token_scale(largest, mode)
