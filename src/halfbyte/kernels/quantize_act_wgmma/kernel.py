"""The kernel: x once from HBM gives act, its scales and the low-rank product."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint8

from halfbyte.device.operand_load import BlockLoad, TmaOperand
from halfbyte.device.ring_position import Ring
from halfbyte.device.scaled_product import FLOAT_TYPES
from halfbyte.device.swizzled_box import make_box_tensor, make_load_operand, partition_boxes
from halfbyte.kernels.quantize_act_lora.amax_pass import (
    AMAX_THREADS,
    find_amax_kernel,
    read_global_scale,
    store_global_scale,
)
from halfbyte.kernels.quantize_act_lora.kernel import GlobalScales
from halfbyte.kernels.quantize_act_lora.tile_load import Matrix
from halfbyte.kernels.quantize_act_wgmma.block_rows import BlockRows
from halfbyte.kernels.quantize_act_wgmma.config import (
    BLOCK_K,
    LOAD_REGISTERS,
    ROW_BYTES,
    WgmmaQuantizeConfig,
)
from halfbyte.kernels.quantize_act_wgmma.product import LoadRole, ProductRole, finish_sums
from halfbyte.kernels.quantize_act_wgmma.token_rows import TokenRows
from halfbyte.kernels.quantize_act_wgmma.units import make_units
from halfbyte.kernels.quantize_act_wgmma.work import Outputs, Work, share_blocks, share_rows

SMOOTH_BARRIER = 3  # named barrier of the quantizing threads
_SWIZZLE_ALIGN = 1024
_ROW_STEP = 8  # rows that a cluster has at least, where there are fewer clusters than fit


class QuantizeActWgmma:
    """The host function of one configuration; `cute.compile` takes an instance."""

    def __init__(self, config: WgmmaQuantizeConfig) -> None:
        """Keep the compile-time choices."""
        self.config = config

    @cute.jit
    def __call__(
        self, tensors: Any, scales: GlobalScales, max_clusters: Int32, stream: CUstream
    ) -> None:
        """Launch the kernel on `stream`, behind the first pass where the mode is dynamic.

        Args:
            tensors: see `source.make_source`.
            scales: see GlobalScales.
            max_clusters: clusters that are resident at once.
            stream: the CUDA stream.
        """
        config = self.config
        x, lora_down = tensors.x, tensors.lora_down
        if cutlass.const_expr(has_dynamic_scale(config)):
            find_amax_kernel(x, tensors.smooth, scales.partial_amax, config).launch(
                grid=(scales.partial_amax.shape[0], 1, 1),
                block=(AMAX_THREADS, 1, 1),
                stream=stream,
                use_pdl=config.use_pdl,
            )
        rank_tiles = Int32(1)
        operands = None
        if cutlass.const_expr(config.rank_tile > 0):
            rank_tiles = cute.ceil_div(lora_down.shape[0], config.rank_tile)
            x_operand = None
            if cutlass.const_expr(config.x_is_aligned):
                x_operand = make_load_operand(x, config.tokens, ROW_BYTES, False)
            operands = x_operand, make_load_operand(lora_down, config.rank_tile, ROW_BYTES, False)
        clusters = count_clusters(x.shape[0], max_clusters // rank_tiles, config.tokens)
        self.kernel(tensors, scales, operands).launch(
            grid=(clusters * config.cluster_k, rank_tiles, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_k, 1, 1),
            smem=config.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(self, tensors: Any, scales: GlobalScales, operands: Any) -> None:
        """Run one CTA."""
        config = self.config
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, rank_tile, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        shared = cutlass.memory.SmemAllocator().allocate_array(
            Uint8, config.shared_bytes, byte_alignment=_SWIZZLE_ALIGN
        )
        ring = init_ring(shared, thread, config)
        global_scale = None
        if cutlass.const_expr(not config.has_token_scale):
            if cutlass.const_expr(config.use_pdl):
                cute.arch.griddepcontrol_wait()  # its scale may be the previous kernel's
            maxima = shared.toint() + config.maxima_offset
            global_scale = read_global_scale(scales, maxima, thread, config)
            if cutlass.const_expr(has_dynamic_scale(config)):
                is_first = (thread == 0) & (block == 0) & (rank_tile == 0)
                store_global_scale(scales, global_scale, is_first)
        rank = block % config.cluster_k
        x, smooth = tensors.x, tensors.smooth
        work = Work(
            rows=share_rows(
                Int32(x.shape[0]),
                ctas // config.cluster_k,
                block // config.cluster_k,
                rank,
                config.cluster_k,
            ),
            blocks=share_blocks(Int32(x.shape[1]), rank, config.cluster_k),
            x=Matrix(x.iterator.toint(), Int32(x.shape[0]), Int32(x.shape[1]), Int64(x.stride[0])),
            smooth=None if smooth is None else smooth.iterator.toint(),
            is_writing=rank_tile == 0,
            rank=rank,
            ring=ring,
            shared=shared.toint(),
            outputs=make_outputs(tensors, rank_tile, config),
            factor=scales.lora_act,
            global_scale=global_scale if has_dynamic_scale(config) else None,
            config=config,
        )
        load = make_load_role(work, operands, shared, rank_tile)
        run_roles(work, load, global_scale, thread, config)
        if cutlass.const_expr(config.rank_tile > 0):
            cute.arch.cluster_arrive()  # partial sums and scales are there
            cute.arch.cluster_wait()
            finish_sums(work, thread, config.threads)
            cute.arch.cluster_arrive()  # nobody leaves while a peer may still read its sums
            cute.arch.cluster_wait()


@cute.jit
def run_roles(
    work: Work, load: Any, global_scale: Any, thread: Int32, config: cutlass.Constexpr
) -> None:
    """Give each warp its role: product warpgroups, then quantizing warps, then the load warp."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    first = cutlass.const_expr(config.product_threads // 32)
    last = cutlass.const_expr(first + config.quantize_threads // 32)
    if cutlass.const_expr(config.rank_tile == 0):
        quantize_rows(work, global_scale, thread, config)
    elif warp < first:
        change_registers(config.product_registers, config)
        ProductRole(work, thread).run()
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()  # lora_act is written after it
    elif warp < last:
        change_registers(config.quantize_registers, config)
        quantize_rows(work, global_scale, thread - config.product_threads, config)
    else:
        change_registers(LOAD_REGISTERS, config)
        if warp == last:
            load.run(thread % 32)


def change_registers(registers: int, config: WgmmaQuantizeConfig) -> None:
    """Let a warpgroup have so many registers a thread from here on."""
    if registers > config.launch_registers:
        cute.arch.setmaxregister_increase(registers)
    elif registers < config.launch_registers:
        cute.arch.setmaxregister_decrease(registers)


@cute.jit
def quantize_rows(work: Work, global_scale: Any, thread: Int32, config: cutlass.Constexpr) -> None:
    """Quantize this CTA's rows; the quantizing threads call it."""
    units = make_units(work, thread)
    if cutlass.const_expr(config.use_pdl):
        cute.arch.griddepcontrol_wait()  # x is there, and nobody reads act any more
    if cutlass.const_expr(config.has_shared_smooth):
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier(barrier_id=SMOOTH_BARRIER, number_of_threads=config.quantize_threads)
    if cutlass.const_expr(config.has_token_scale):
        TokenRows(units).run()
    else:
        if work.is_writing:
            BlockRows(units, global_scale).run()


def count_clusters(rows: Int32, resident: Int32, tokens: int) -> Int32:
    """Return the clusters along the rows: as many as are resident, but of 8 rows at least."""
    needed = (rows + (tokens - 1)) // tokens
    most = (rows + (_ROW_STEP - 1)) // _ROW_STEP
    wanted = cutlass.select_(resident < most, resident, most)
    return Int32(cutlass.select_(wanted < needed, needed, wanted))


def has_dynamic_scale(config: WgmmaQuantizeConfig) -> bool:
    """Return whether a first pass over x finds a global scale."""
    return not config.has_token_scale and config.activation.global_scale == "dynamic"


@cute.jit
def init_ring(shared: Any, thread: Int32, config: cutlass.Constexpr) -> Any:
    """Return the ring of the product, its barriers initialised; None without rank."""
    ring = None
    if cutlass.const_expr(config.rank_tile > 0):
        ring = Ring(cute.recast_ptr(shared + config.barrier_offset, dtype=Int64), config.stages)
        if thread == 0:
            full_arrivals = cutlass.const_expr(1 if config.x_is_aligned else 2)
            ring.init(full_arrivals, config.product_warpgroups)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
    return ring


def make_outputs(tensors: Any, rank_tile: Int32, config: WgmmaQuantizeConfig) -> Outputs:
    """Return where a cluster writes."""
    act, lora_act = tensors.act, tensors.lora_act
    group_scale, token_scale = tensors.act_group_scale, tensors.token_scale
    first_rank = rank_tile * config.rank_tile
    has_rank = lora_act is not None
    return Outputs(
        act=act.iterator.toint(),
        act_pitch=Int64(act.stride[0]) * config.act_bytes,
        act_columns=Int32(act.shape[1]),
        token_scale=None if token_scale is None else token_scale.iterator.toint(),
        group_scale=None if group_scale is None else group_scale.iterator.toint(),
        group_pitch=None if group_scale is None else Int64(group_scale.stride[0]),
        lora_act=lora_act.iterator.toint() + Int64(first_rank) * 2 if has_rank else None,
        lora_pitch=Int64(lora_act.stride[0]) if has_rank else None,
        lora_columns=Int32(lora_act.shape[1]) - first_rank if has_rank else None,
    )


def make_load_role(work: Work, operands: Any, shared: Any, rank_tile: Int32) -> LoadRole | None:
    """Return the load warp's role, None without rank."""
    if operands is None:
        return None
    x_operand, lora_operand = operands
    config = work.config
    x = None
    if x_operand is not None:
        rows = cute.domain_offset((work.rows.first, 0), x_operand.tensor)
        x = partition_slots(
            TmaOperand(x_operand.atom, rows),
            shared + config.lora_down_slot_bytes,
            config.tokens,
            config,
        )
    lora_down = partition_slots(lora_operand, shared, config.rank_tile, config)
    return LoadRole(work, x, lora_down, rank_tile)


def partition_slots(
    operand: TmaOperand, first: Any, rows: int, config: WgmmaQuantizeConfig
) -> BlockLoad:
    """Return the loads of boxes of so many rows; place: the slot."""
    places = cute.make_layout(config.stages, stride=config.slot_bytes)
    boxes = make_box_tensor(first, FLOAT_TYPES[config.dtype], (rows, ROW_BYTES), places)
    return partition_boxes(operand, boxes, (rows, BLOCK_K))
