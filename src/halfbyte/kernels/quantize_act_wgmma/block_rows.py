"""The quantizing threads of the exact modes: a unit is quantized as soon as it is here.

Scales of 16, 32 or 64 columns are the matter of one, two or four neighbouring threads.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32

from halfbyte.device.memory_access import st_global_b16
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    Divisors,
    make_divisors,
    shift_and_smooth,
)
from halfbyte.kernels.quantize_act_wgmma.block_values import BlockValues, make_block_values
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K
from halfbyte.kernels.quantize_act_wgmma.units import WORDS, Units


@dataclass(frozen=True)
class BlockRows(TracedRecord):
    """A quantizing thread of an exact mode.

    Attributes:
        units: its part of every row.
        global_scale: what stored scales are relative to, or None.
    """

    units: Units
    global_scale: Any

    @cute.jit
    def run(self) -> None:
        """Quantize this CTA's rows; the next ones are on their way meanwhile."""
        work, config = self.units.work, self.units.work.config
        rows = cutlass.const_expr(config.rows_at_once)
        size = cutlass.const_expr(rows * config.units * WORDS)
        words = cute.make_rmem_tensor((size,), Uint32)
        ahead = cute.make_rmem_tensor((size,), Uint32)
        group = self.units.group
        self.units.load_rows(ahead, group)
        batches = (work.rows.own_count + (rows - 1)) // rows
        for batch in cutlass.range(group, batches, config.row_groups, unroll=1):
            for index in cutlass.range_constexpr(size):
                words[index] = ahead[index]
            self.units.load_rows(ahead, batch + config.row_groups)
            for unit in cutlass.range_constexpr(config.units):
                fast = self.make_divisors(unit, is_fast=True)
                for row in cutlass.range_constexpr(rows):
                    self.write_unit(words, (batch * rows, row), unit, fast)

    @cute.jit
    def write_unit(
        self, words: Any, place: tuple[Int32, int], unit: cutlass.Constexpr, fast: Divisors
    ) -> None:
        """Quantize and store a unit; `place` is (first row of the batch, row of it)."""
        work, config = self.units.work, self.units.work.config
        row = place[0] + place[1]
        first = (place[1] * config.units + unit) * WORDS
        values = self.quantize(words, first, unit, fast)
        stored = cute.make_rmem_tensor((len(values.words),), Uint32)
        scale = values.scale
        for index in cutlass.range_constexpr(len(values.words)):
            stored[index] = values.words[index]
        if not cute.arch.vote_all_sync(values.is_exact):
            again = self.quantize(words, first, unit, self.make_divisors(unit, is_fast=False))
            scale = again.scale
            for index in cutlass.range_constexpr(len(values.words)):
                stored[index] = again.words[index]
        self.units.store_unit(row, unit, stored)
        if cutlass.const_expr(config.has_group_scales):
            column = self.units.column(unit)
            is_stored = (row < work.rows.own_count) & (column < work.outputs.act_columns)
            if is_stored & (self.units.quad == 0):
                this_row = Int64(work.rows.first + work.rows.own + row)
                group = this_row * work.outputs.group_pitch + Int64(column // BLOCK_K)
                st_global_b16(work.outputs.group_scale + group * 2, Uint16(scale))

    def make_divisors(self, unit: int, *, is_fast: bool) -> Divisors:
        """Return what a unit's columns are divided by."""
        return make_divisors(self.units.read_factors(unit), self.global_scale, is_fast=is_fast)

    def quantize(self, words: Any, first: int, unit: int, divisors: Divisors) -> BlockValues:
        """Return the values of a unit."""
        work = self.units.work
        raw = self.units.unpack(words, first)
        shift = work.config.activation.shift
        values = shift_and_smooth(raw, divisors.smooth, shift)
        if shift != 0.0:  # the padding of a block is zero, not a shifted zero
            column = self.units.column(unit)
            values = [
                cutlass.select_(column + index < work.x.columns, value, Float32(0.0))
                for index, value in enumerate(values)
            ]
        return make_block_values(values, raw, divisors, work.config)
