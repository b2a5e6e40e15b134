"""Rows of an output tile to the next layer's 4-bit codes and block scales, from registers.

A thread of the epilogue holds 64 consecutive columns of a row: four whole blocks, so that no
thread needs another one's values, and four scales, which are one word of swizzled_128x4
(formats.scale_layout). What is quantized is y as it is rounded to its own dtype: the bytes are
those that `quantize_act_lora` makes of the y that the same kernel writes.

All epilogue threads divide by the same smooth: its reciprocals are staged with it, and a quotient
is three instructions. A thread whose blocks are not exact that way (NaN, tiny, huge) repeats them
with div.rn; see `block_quantizer`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from halfbyte.device.epilogue_values import RECIPROCAL, SMOOTH, ColumnVectors
from halfbyte.device.float_arithmetic import Divisor
from halfbyte.device.memory_access import ld_global_f32, st_global_b32, st_global_v4
from halfbyte.device.output_store import ROWS_PER_WARP, RowPlace
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.gemm_w4a4.config import QUANTIZED_COLUMNS, SF_ATOM_ROWS, GemmConfig
from halfbyte.kernels.quantize_act_lora.block_quantizer import (
    Divisors,
    make_divisors,
    quantize_values,
    shift_and_smooth,
    unpack_values,
)
from halfbyte.kernels.quantize_act_lora.config import WIDTH, QuantizeConfig

SF_TILE_BYTES = 512  # of 128 rows x 4 scales
CODES_PER_STORE = 32  # 16 bytes
_PAIRS = QUANTIZED_COLUMNS // 2  # words of two 16-bit values
_CODE_WORDS = QUANTIZED_COLUMNS // 8  # words of eight codes


class QuantizedTensors(NamedTuple):
    """What a quantized output is written to, and its global scale.

    Attributes:
        codes: uint8 [M, N_pad / 2]. scales: uint8, flat, swizzled_128x4.
        global_scale: [1] float32, or None for a format without one.
    """

    codes: Any
    scales: Any
    global_scale: Any


@dataclass(frozen=True)
class QuantizedStore(TracedRecord):
    """A quantized output of one thread.

    Attributes:
        tensors: in global memory.
        rule: how blocks are quantized, as `quantize_act_lora` would be configured.
        vectors: has the factors `smooth` that rows are divided by, if there are any.
        scale: the divisors of the global scale alone.
        num_rows, num_columns: M and N.
    """

    tensors: QuantizedTensors
    rule: QuantizeConfig
    vectors: ColumnVectors
    scale: Divisors
    num_rows: Int32
    num_columns: Int32

    @cute.jit
    def put(self, row: Any, place: RowPlace) -> None:
        """Quantize and store 64 columns of this thread's row, 16-bit values in registers.

        Beyond M and N values are zeros, and so are their codes and scales: the padding of the
        output is theirs to write.
        """
        source = cute.recast_tensor(row, Uint32)
        words = cute.make_rmem_tensor((_PAIRS,), Uint32)
        for index in cutlass.range_constexpr(_PAIRS):
            words[index] = source[index]
        row_index = place.row_block * ROWS_PER_WARP + place.lane
        column = place.column_block * QUANTIZED_COLUMNS
        num_valid = Int32(0)
        if row_index < self.num_rows:
            num_valid = self.num_columns - column
        if num_valid < QUANTIZED_COLUMNS:
            for index in cutlass.range_constexpr(_PAIRS):
                words[index] = words[index] & make_pair_mask(num_valid - 2 * index)
        quantized = cute.make_rmem_tensor((_CODE_WORDS + 1,), Uint32)
        is_exact = self.quantize(quantized, words, place.tile_column, is_fast=True)
        if not is_exact:
            self.quantize(quantized, words, place.tile_column, is_fast=False)
        self.store_codes(quantized, row_index, column)
        self.store_scales(quantized[_CODE_WORDS], place, column)

    def quantize(self, quantized: Any, words: Any, tile_column: Int32, is_fast: bool) -> Boolean:
        """Write eight words of codes and one of scales for 32 words of two values.

        Returns whether they are the reference's; without reciprocals they always are.
        """
        scales, is_exact = Uint32(0), Boolean(True)
        for block in range(QUANTIZED_COLUMNS // WIDTH):
            first = block * WIDTH // 2
            pairs = [words[first + index] for index in range(WIDTH // 2)]
            raw = unpack_values(pairs, self.rule.dtype)
            divisors = self.list_divisors(tile_column + block * WIDTH, is_fast)
            values = shift_and_smooth(raw, divisors.smooth, 0.0)
            result = quantize_values(values, raw, divisors, self.rule)
            quantized[2 * block] = result.low
            quantized[2 * block + 1] = result.high
            scales = scales | (result.scale << Uint32(8 * block))
            is_exact = is_exact & result.is_exact
        quantized[_CODE_WORDS] = scales
        return is_exact

    def list_divisors(self, column: Int32, is_fast: bool) -> Divisors:
        """Return what a block that starts at a column of the tile is divided by."""
        smooth = reciprocals = None
        if self.rule.has_smooth:
            smooth = self.vectors.row(SMOOTH, column, WIDTH)
            reciprocals = self.vectors.row(RECIPROCAL, column, WIDTH)
        if not is_fast:
            factors = None if smooth is None else [smooth[index] for index in range(WIDTH)]
            scale = None if self.scale.global_scale is None else self.scale.global_scale.value
            return make_divisors(factors, scale, is_fast=False)
        if smooth is None or reciprocals is None:
            return self.scale
        pairs = [Divisor(smooth[index], reciprocals[index]) for index in range(WIDTH)]
        return replace(self.scale, smooth=pairs)

    @cute.jit
    def store_codes(self, codes: Any, row: Int32, column: Int32) -> None:
        """Store the codes that are within [M, N_pad]."""
        address = self.tensors.codes.iterator.toint() + Int64(column // 2)
        address = address + Int64(row) * Int64(self.tensors.codes.stride[0])
        for part in cutlass.range_constexpr(QUANTIZED_COLUMNS // CODES_PER_STORE):
            if (row < self.num_rows) & (column + part * CODES_PER_STORE < self.num_columns):
                st_global_v4(
                    address + 16 * part,
                    (
                        codes[4 * part],
                        codes[4 * part + 1],
                        codes[4 * part + 2],
                        codes[4 * part + 3],
                    ),
                )

    @cute.jit
    def store_scales(self, scales: Uint32, place: RowPlace, column: Int32) -> None:
        """Store four scales where the layout has them: rows to a multiple of 128."""
        warps_a_tile = SF_ATOM_ROWS // ROWS_PER_WARP
        sf_row = place.row_block // warps_a_tile
        if (sf_row * SF_ATOM_ROWS < self.num_rows) & (column < self.num_columns):
            tiles_a_row = cute.ceil_div(self.num_columns, QUANTIZED_COLUMNS)
            tile = Int64(sf_row) * Int64(tiles_a_row) + Int64(place.column_block)
            local = place.lane * 16 + place.row_block % warps_a_tile * 4
            address = self.tensors.scales.iterator.toint() + tile * SF_TILE_BYTES + Int64(local)
            st_global_b32(address, scales)

    def finish(self, lane: Int32) -> None:
        """Nothing is in flight: the stores are the thread's own."""


def make_pair_mask(num_valid: Int32) -> Uint32:
    """Return the mask of two 16-bit values of which the first `num_valid` stay, none below 1."""
    half = cutlass.select_(num_valid == 1, Uint32(0xFFFF), Uint32(0))
    return cutlass.select_(num_valid >= 2, Uint32(0xFFFFFFFF), half)


def invert_smooth(smooth: Float32) -> Float32:
    """Return the reciprocal of a factor, NaN where a quotient by it would not be exact.

    Then the block's values are NaN, which no block is exact with, and the thread divides.
    """
    divisors = make_divisors([smooth], None, is_fast=True)
    assert divisors.smooth is not None
    nan = Float32(float("nan"))
    return Float32(cutlass.select_(divisors.are_tame, divisors.smooth[0].reciprocal, nan))


def make_quantized_store(
    config: GemmConfig, tensors: QuantizedTensors, vectors: ColumnVectors, shape: tuple[Any, Any]
) -> QuantizedStore:
    """Return a thread's quantized output of [M, N] = `shape`; it reads the global scale once."""
    epilogue = config.epilogue
    rule = QuantizeConfig(
        mode=epilogue.next_activation,
        dtype=config.out_dtype,  # type: ignore[arg-type]  # check_legal knows both
        lora_dtype=config.out_dtype,  # type: ignore[arg-type]  # likewise
        target=config.target,
        has_smooth=epilogue.has_next_smooth,
    )
    global_scale = None
    if tensors.global_scale is not None:
        global_scale = ld_global_f32(tensors.global_scale.iterator.toint())
    scale = make_divisors(None, global_scale, is_fast=True)
    return QuantizedStore(tensors, rule, vectors, scale, *shape)
