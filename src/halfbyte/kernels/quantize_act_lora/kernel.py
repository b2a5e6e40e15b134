"""The kernel: one read of x gives 4-bit codes, block scales and the low-rank product."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8

from halfbyte.kernels.quantize_act_lora.amax_pass import (
    AMAX_THREADS,
    find_amax_kernel,
    read_global_scale,
    store_global_scale,
)
from halfbyte.kernels.quantize_act_lora.config import K_TILE, QuantizeConfig
from halfbyte.kernels.quantize_act_lora.low_rank import (
    LowRankOutput,
    WarpTile,
    add_tile_product,
    make_sums,
    make_warp_tile,
    share_sums,
    store_cluster_sums,
    store_sums,
)
from halfbyte.kernels.quantize_act_lora.tile_load import Corner, Matrix, Sources, load_stage
from halfbyte.kernels.quantize_act_lora.tile_quantize import (
    QuantizedOutput,
    quantize_tile,
    store_zero_scales,
)


class GlobalScales(NamedTuple):
    """Scalars of a call; a mode has only those it needs, the others are None.

    Attributes:
        activation: float32 [1]: the calibrated scale that a static mode reads, or where a dynamic
            one writes g.
        alpha: float32 [1], written by a dynamic mode: g * weight.
        partial_amax: float32 [n], written and read by a dynamic mode; n is the first pass's grid.
        weight: what alpha contains of the weight's global scale (1 where placement keeps it).
        lora_act: the power of two that lora_act is multiplied by.
    """

    activation: cute.Tensor | None
    alpha: cute.Tensor | None
    partial_amax: cute.Tensor | None
    weight: Float32
    lora_act: Float32


class QuantizeActLora:
    """The host function of one configuration; `cute.compile` takes an instance."""

    def __init__(self, config: QuantizeConfig) -> None:
        """Keep the compile-time choices."""
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        smooth: cute.Tensor | None,
        lora_down: cute.Tensor | None,
        act_codes: cute.Tensor,
        act_sf: cute.Tensor,
        lora_act: cute.Tensor | None,
        scales: GlobalScales,
        stream: CUstream,
    ) -> None:
        """Launch the kernel on `stream`, behind the first pass where the mode is dynamic.

        Args:
            x: [M, K] float16 or bfloat16, rows of any pitch, M > 0.
            smooth: [K] float32, or None.
            lora_down: [R, K] in x's dtype, rows at multiples of 16 bytes, or None.
            act_codes: [M, K_pad / 2] uint8.
            act_sf: uint8 swizzled_128x4 as [padded rows, padded blocks], or float16 [M, blocks].
            lora_act: [M, R_pad] in the configured dtype, or None.
            scales: see GlobalScales.
            stream: the CUDA stream.
        """
        config = self.config
        if cutlass.const_expr(config.activation.global_scale == "dynamic"):
            find_amax_kernel(x, smooth, scales.partial_amax, config).launch(
                grid=(scales.partial_amax.shape[0], 1, 1),
                block=(AMAX_THREADS, 1, 1),
                stream=stream,
                use_pdl=config.use_pdl,
            )
        rows = x.shape[0]
        if cutlass.const_expr(config.is_swizzled):
            rows = act_sf.shape[0]  # padding rows have zeros to write too
        rank_tiles = 1
        if cutlass.const_expr(lora_down is not None):
            rank_tiles = cute.ceil_div(lora_down.shape[0], config.rank_tile)
        self.kernel(x, smooth, lora_down, act_codes, act_sf, lora_act, scales).launch(
            grid=(cute.ceil_div(rows, config.rows) * config.cluster_k, rank_tiles, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_k, 1, 1),
            smem=config.shared_bytes,
            min_blocks_per_mp=1,  # spill nothing for the sake of more CTAs an SM
            stream=stream,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        smooth: cute.Tensor | None,
        lora_down: cute.Tensor | None,
        act_codes: cute.Tensor,
        act_sf: cute.Tensor,
        lora_act: cute.Tensor | None,
        scales: GlobalScales,
    ) -> None:
        """Run one CTA: rows x (its slice of K) x (its part of the rank)."""
        config = self.config
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()
        shared = cutlass.memory.SmemAllocator().allocate_array(
            Uint8, config.shared_bytes, byte_alignment=128
        )
        thread, _, _ = cute.arch.thread_idx()
        block, rank_block, _ = cute.arch.block_idx()
        corner = Corner(
            row=block // config.cluster_k * config.rows,
            rank=rank_block * config.rank_tile,
            thread=thread,
        )
        cta = Cta(corner, block % config.cluster_k, rank_block == 0, shared.toint())
        sources = make_sources(x, smooth, lora_down)
        global_scale = read_global_scale(scales, shared.toint(), thread, config)
        output = make_output(x, act_codes, act_sf)
        if cutlass.const_expr(config.activation.global_scale == "dynamic"):
            is_first = (thread == 0) & (block == 0) & (rank_block == 0)
            store_global_scale(scales, global_scale, is_first)
        low_rank = None
        if cutlass.const_expr(lora_act is not None):
            divisor = global_scale
            if cutlass.const_expr(config.activation.global_scale != "dynamic"):
                divisor = None
            low_rank = LowRankOutput(
                address=lora_act.iterator.toint(),
                pitch=Int64(lora_act.stride[0]),
                rows=x.shape[0],
                rank=lora_down.shape[0],
                factor=scales.lora_act,
                divisor=divisor,
            )
        if corner.row < x.shape[0]:
            run_rows(sources, cta, (output, low_rank), global_scale, config)
        else:
            if cta.is_quantizing & (cta.rank_in_cluster == 0):
                store_zero_scales(output, corner, config)
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()


@dataclass(frozen=True)
class Cta:
    """Which part of the work a CTA has.

    Attributes:
        corner: where its tiles start.
        rank_in_cluster: which slice of K.
        is_quantizing: it writes codes and scales; CTAs of further rank tiles do not.
        shared: address of its stages.
    """

    corner: Corner
    rank_in_cluster: Int32
    is_quantizing: cutlass.Boolean
    shared: Int32


def make_sources(
    x: cute.Tensor, smooth: cute.Tensor | None, lora_down: cute.Tensor | None
) -> Sources:
    """Return addresses and sizes of what is read."""

    def describe(tensor: cute.Tensor) -> Matrix:
        return Matrix(
            address=tensor.iterator.toint(),
            rows=Int32(tensor.shape[0]),
            columns=Int32(tensor.shape[1]),
            pitch=Int64(tensor.stride[0]),
        )

    return Sources(
        x=describe(x),
        lora_down=None if lora_down is None else describe(lora_down),
        smooth=None if smooth is None else smooth.iterator.toint(),
    )


def make_output(x: cute.Tensor, act_codes: cute.Tensor, act_sf: cute.Tensor) -> QuantizedOutput:
    """Return addresses and sizes of what is written."""
    return QuantizedOutput(
        codes=act_codes.iterator.toint(),
        scales=act_sf.iterator.toint(),
        code_pitch=Int64(act_codes.stride[0]),
        rows=Int32(x.shape[0]),
        columns=Int32(x.shape[1]),
        scale_columns=Int32(act_sf.shape[1]),
    )


@cute.jit
def run_rows(
    sources: Sources,
    cta: Cta,
    outputs: tuple[QuantizedOutput, Any],
    global_scale: Any,
    config: cutlass.Constexpr,
) -> None:
    """Walk over this CTA's tiles of K: load ahead, quantize, multiply; then store the sums."""
    output, low_rank = outputs
    corner = cta.corner
    first, count = slice_tiles(output, cta.rank_in_cluster, config)
    for stage in cutlass.range_constexpr(config.stages - 1):
        if stage < count:
            slot = cta.shared + stage * config.stage_bytes
            load_stage(sources, corner, (first + stage) * K_TILE, slot, config)
        cute.arch.cp_async_commit_group()
    warp = make_warp_tile(corner.thread, config)
    sums = make_sums(warp)
    stage = Int32(0)  # the slot to read
    ahead = Int32(config.stages - 1)  # the slot to fill
    for index in cutlass.range(count, unroll=1):
        cute.arch.cp_async_wait_group(config.stages - 2)
        cute.arch.sync_threads()  # the tile has landed, and the slot to fill is read by all
        if index + (config.stages - 1) < count:
            k_ahead = (first + index + (config.stages - 1)) * K_TILE
            load_stage(sources, corner, k_ahead, cta.shared + ahead * config.stage_bytes, config)
        cute.arch.cp_async_commit_group()
        slot = cta.shared + stage * config.stage_bytes
        if cta.is_quantizing:
            quantize_tile(output, corner, (slot, (first + index) * K_TILE), global_scale, config)
        if cutlass.const_expr(low_rank is not None):
            multiply_tile(sums, slot, warp, corner, config)
        stage = cutlass.select_(stage == config.stages - 1, Int32(0), stage + 1)
        ahead = cutlass.select_(ahead == config.stages - 1, Int32(0), ahead + 1)
    if cutlass.const_expr(low_rank is not None):
        finish_sums(sums, warp, cta, low_rank, config)


def slice_tiles(
    output: QuantizedOutput, rank_in_cluster: Int32, config: QuantizeConfig
) -> tuple[Int32, Int32]:
    """Return (first tile, number of tiles) of a CTA's slice of K; the last ones may be empty.

    Tiles cover the padding of codes and scales too.
    """
    columns = output.scale_columns * config.block_size
    num_tiles = (columns + (K_TILE - 1)) // K_TILE
    if config.cluster_k == 1:
        return Int32(0), num_tiles
    share = (num_tiles + (config.cluster_k - 1)) // config.cluster_k
    first = share * rank_in_cluster
    left = num_tiles - first
    count = cutlass.select_(left < share, left, share)
    return first, cutlass.select_(count < 0, Int32(0), count)


@cute.jit
def multiply_tile(
    sums: Any, slot: Int32, warp: WarpTile, corner: Corner, config: cutlass.Constexpr
) -> None:
    """Add a stage's low-rank product, in the warps that own part of it."""
    busy_threads = 32 * config.row_warps * config.rank_warps
    if cutlass.const_expr(busy_threads == config.threads) or corner.thread < busy_threads:
        add_tile_product(sums, slot, warp, config)


@cute.jit
def finish_sums(
    sums: Any, warp: WarpTile, cta: Cta, low_rank: LowRankOutput, config: cutlass.Constexpr
) -> None:
    """Store the sums; those of a cluster are added up first."""
    is_busy = cta.corner.thread < 32 * config.row_warps * config.rank_warps
    if cutlass.const_expr(config.cluster_k == 1):
        if is_busy:
            store_sums(sums, warp, cta.corner, low_rank, config)
    else:
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # partial sums overwrite the stages
        if is_busy:
            share_sums(sums, warp, cta.shared, config)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        store_cluster_sums(cta.shared, cta.rank_in_cluster, cta.corner, low_rank, config)
        cute.arch.cluster_arrive()  # nobody leaves while a peer may still read its sums
        cute.arch.cluster_wait()
