"""lora_act = x @ lora_down^T by warp-level tensor core products, summed over K in a fixed order."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from halfbyte.device.float_arithmetic import (
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    div_rn_f32,
    mov_b32_to_u32,
    mul_rn_f32,
)
from halfbyte.device.memory_access import (
    ld_shared_cluster_pair_f32,
    mapa_shared_cluster,
    st_global_b32,
    st_global_pair,
    st_shared_pair_f32,
)
from halfbyte.device.warp_product import MMA_K, MMA_M, MMA_N, ldmatrix_x4, mma_m16n8k16
from halfbyte.kernels.quantize_act_lora.config import K_TILE, RANK_ALIGNMENT, QuantizeConfig
from halfbyte.kernels.quantize_act_lora.tile_load import Corner, locate_piece


@dataclass(frozen=True)
class LowRankOutput:
    """Where lora_act [M, R_pad] goes, and what its sums are multiplied by.

    Attributes:
        address: of its first element.
        pitch: elements from one row to the next.
        rows, rank: M and the logical R; columns from R to R_pad are zero.
        factor: a power of two that every sum is multiplied by.
        divisor: the dynamic global scale that every sum is divided by, or None.
    """

    address: Int64
    pitch: Int64
    rows: Int32
    rank: Int32
    factor: Float32
    divisor: Float32 | None


@dataclass(frozen=True)
class WarpTile:
    """The part of [rows, rank_tile] that one warp sums up; sizes are compile-time.

    Attributes:
        row, rank: where it starts, inside the CTA's tile.
        lane: of this thread.
        row_steps, rank_steps: its 16 x 8 products.
    """

    row: Int32
    rank: Int32
    lane: Int32
    row_steps: int
    rank_steps: int


def make_warp_tile(thread: Int32, config: QuantizeConfig) -> WarpTile | None:
    """Return the tile of this thread's warp; warps beyond row_warps * rank_warps own none.

    None where there is no low-rank branch.
    """
    if not config.rank_tile:
        return None
    warp = cute.arch.make_warp_uniform(thread // 32)
    rows = config.rows // config.row_warps
    rank = config.rank_tile // config.rank_warps
    return WarpTile(
        row=warp // config.rank_warps * rows,
        rank=warp % config.rank_warps * rank,
        lane=thread % 32,
        row_steps=rows // MMA_M,
        rank_steps=rank // MMA_N,
    )


def make_sums(warp: WarpTile | None) -> Any:
    """Return the accumulators of a thread [row step, rank step, 4], all zero; None without rank."""
    if warp is None:
        return None
    sums = cute.make_rmem_tensor((warp.row_steps, warp.rank_steps, 4), Float32)
    sums.fill(0.0)
    return sums


def add_tile_product(sums: Any, slot: Int32, warp: WarpTile, config: QuantizeConfig) -> None:
    """Add the product of the tiles of one stage to `sums` [row step, rank step, 4]."""
    lane = warp.lane
    x_row = warp.row + lane % MMA_M
    down_row = warp.rank + lane % 8 + lane // 16 * 8
    for k_step in range(K_TILE // MMA_K):
        x_piece = 2 * k_step + lane // 16
        down_piece = 2 * k_step + lane // 8 % 2
        x_fragments = [
            ldmatrix_x4(slot + locate_piece(x_row + MMA_M * step, x_piece))
            for step in range(warp.row_steps)
        ]
        for pair in range(warp.rank_steps // 2):
            piece = locate_piece(down_row + 16 * pair, down_piece)
            words = ldmatrix_x4(slot + config.x_bytes + piece)
            for half in range(2):
                b = words[2 * half], words[2 * half + 1]
                _add_products(sums, x_fragments, b, 2 * pair + half, config)


def _add_products(
    sums: Any, x_fragments: list[Any], b: Any, rank_step: int, config: QuantizeConfig
) -> None:
    for row_step, a in enumerate(x_fragments):
        c = tuple(sums[row_step, rank_step, index] for index in range(4))
        result = mma_m16n8k16(a, b, c, config.dtype)
        for index in range(4):
            sums[row_step, rank_step, index] = result[index]


def list_sums(sums: Any, warp: WarpTile) -> list[tuple[Int32, Int32, Any, Any]]:
    """Return (row, column, sum, sum of the next column) of all sums of this thread."""
    found = []
    for row_step in range(warp.row_steps):
        for rank_step in range(warp.rank_steps):
            column = warp.rank + MMA_N * rank_step + 2 * (warp.lane % 4)
            for half in range(2):
                row = warp.row + MMA_M * row_step + 8 * half + warp.lane // 4
                values = (
                    sums[row_step, rank_step, 2 * half],
                    sums[row_step, rank_step, 2 * half + 1],
                )
                found.append((row, column, *values))
    return found


def store_sums(
    sums: Any, warp: WarpTile, corner: Corner, output: LowRankOutput, config: QuantizeConfig
) -> None:
    """Store a warp's sums to lora_act."""
    for row, column, low, high in list_sums(sums, warp):
        store_pair(output, corner.row + row, corner.rank + column, (low, high), config)


@cute.jit
def store_pair(
    output: LowRankOutput,
    row: Int32,
    column: Int32,
    values: tuple[Float32, Float32],
    config: cutlass.Constexpr,
) -> None:
    """Store two neighbouring sums in the dtype of lora_act, rounded once to nearest even."""
    padded_rank = (output.rank + (RANK_ALIGNMENT - 1)) // RANK_ALIGNMENT * RANK_ALIGNMENT
    if (row < output.rows) & (column < padded_rank):
        low = _finish(values[0], column, output)
        high = _finish(values[1], column + 1, output)
        place = Int64(row) * output.pitch + Int64(column)
        if cutlass.const_expr(config.lora_dtype == "float32"):
            st_global_pair(output.address + place * 4, mov_b32_to_u32(low), mov_b32_to_u32(high))
        elif cutlass.const_expr(config.lora_dtype == "float16"):
            st_global_b32(output.address + place * 2, cvt_rn_f16x2_f32(low, high))
        else:
            st_global_b32(output.address + place * 2, cvt_rn_bf16x2_f32(low, high))


def _finish(value: Float32, column: Int32, output: LowRankOutput) -> Float32:
    value = mul_rn_f32(value, output.factor)
    if output.divisor is not None:
        value = div_rn_f32(value, output.divisor)
    # Not the sum itself: x times the zeros of the padding is NaN where x is not finite.
    return cutlass.select_(column < output.rank, value, Float32(0.0))


def share_sums(sums: Any, warp: WarpTile, shared: Int32, config: QuantizeConfig) -> None:
    """Put a warp's partial sums where the other CTAs of the cluster read them."""
    for row, column, low, high in list_sums(sums, warp):
        place = row * config.partial_pitch + column
        st_shared_pair_f32(shared + 4 * place, low, high)


def store_cluster_sums(
    shared: Int32, rank_in_cluster: Int32, corner: Corner, output: LowRankOutput, config: Any
) -> None:
    """Add the partial sums of all CTAs in rank order; each CTA stores its share of the rows."""
    rows = config.rows // config.cluster_k
    pairs_a_row = config.rank_tile // 2
    peers = [mapa_shared_cluster(shared, Int32(peer)) for peer in range(config.cluster_k)]
    for first in range(0, rows * pairs_a_row, config.threads):
        _store_cluster_pair(
            peers, corner.thread + first, rank_in_cluster * rows, corner, output, config
        )


@cute.jit
def _store_cluster_pair(
    peers: list[Any],
    item: Int32,
    first_row: Int32,
    corner: Corner,
    output: LowRankOutput,
    config: cutlass.Constexpr,
) -> None:
    pairs_a_row = config.rank_tile // 2
    if item < config.rows // config.cluster_k * pairs_a_row:
        row = first_row + item // pairs_a_row
        column = item % pairs_a_row * 2
        offset = 4 * (row * config.partial_pitch + column)
        low, high = ld_shared_cluster_pair_f32(peers[0] + offset)
        for peer in peers[1:]:
            other_low, other_high = ld_shared_cluster_pair_f32(peer + offset)
            low = low + other_low
            high = high + other_high
        store_pair(output, corner.row + row, corner.rank + column, (low, high), config)
