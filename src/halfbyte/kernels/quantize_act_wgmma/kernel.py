"""The kernel: one read of x gives act, its scales and the low-rank product."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint8

from halfbyte.device.memory_access import ld_global_f32, st_shared_f32
from halfbyte.device.operand_load import TmaOperand
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
from halfbyte.kernels.quantize_act_wgmma.block_rows import BlockConsumer
from halfbyte.kernels.quantize_act_wgmma.config import (
    BLOCK_K,
    BOX_ROWS,
    BOXES,
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    PRODUCER_REGISTERS,
    SLOT_BYTES,
    THREADS,
    TILE_ROWS,
    WgmmaQuantizeConfig,
)
from halfbyte.kernels.quantize_act_wgmma.consumer import Consumer
from halfbyte.kernels.quantize_act_wgmma.exchange import TileExchange
from halfbyte.kernels.quantize_act_wgmma.fragment import ROW_BYTES, make_fragment_place
from halfbyte.kernels.quantize_act_wgmma.load_roles import LoadRoles
from halfbyte.kernels.quantize_act_wgmma.token_rows import TokenConsumer
from halfbyte.kernels.quantize_act_wgmma.work import Outputs, Work, share_rows

LORA_DOWN_WARP = CONSUMER_WARPGROUPS  # behind the warps that load x
_SWIZZLE_ALIGN = 1024


class QuantizeActWgmma:
    """The host function of one configuration; `cute.compile` takes an instance."""

    def __init__(self, config: WgmmaQuantizeConfig) -> None:
        """Keep the compile-time choices."""
        self.config = config

    @cute.jit
    def __call__(
        self,
        tensors: Any,
        scales: GlobalScales,
        max_clusters: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel on `stream`, behind the first pass where the mode is dynamic.

        Args:
            tensors: (x, smooth, lora_down, act, token_scale, act_group_scale, lora_act, mailbox);
                see `source.make_source`.
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
        lora_operand = None
        if cutlass.const_expr(config.rank_tile > 0):
            rank_tiles = cute.ceil_div(lora_down.shape[0], config.rank_tile)
            lora_operand = make_load_operand(lora_down, config.rank_tile, ROW_BYTES, False)
        x_operand = None
        if cutlass.const_expr(config.x_is_aligned):
            x_operand = make_load_operand(x, BOX_ROWS, ROW_BYTES, False)
        tiles = cute.ceil_div(x.shape[0], TILE_ROWS)
        resident = max_clusters // (rank_tiles * config.groups)
        teams = cutlass.select_(resident < tiles, resident, tiles)
        teams = Int32(cutlass.select_(teams < 1, Int32(1), teams))
        self.kernel(tensors, scales, x_operand, lora_operand).launch(
            grid=(teams * config.team, rank_tiles, 1),
            block=(THREADS, 1, 1),
            cluster=(config.cluster_k, 1, 1),
            smem=config.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        tensors: Any,
        scales: GlobalScales,
        x_operand: TmaOperand | None,
        lora_operand: TmaOperand | None,
    ) -> None:
        """Run one CTA: the rows of its team, its slice of K, its ranks."""
        config = self.config
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, rank_tile, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        shared = cutlass.memory.SmemAllocator().allocate_array(
            Uint8, config.shared_bytes, byte_alignment=_SWIZZLE_ALIGN
        )
        slice_of_k = block % config.team
        first_block = slice_of_k * config.blocks
        rings = make_rings(shared, config)
        init_barriers(rings, shared, thread, config)
        if cutlass.const_expr(config.has_smooth):
            copy_smooth(tensors.smooth, first_block, shared.toint(), thread, config)
        global_scale = None
        if cutlass.const_expr(not config.has_token_scale):
            if cutlass.const_expr(config.use_pdl):
                cute.arch.griddepcontrol_wait()  # its scale may be the previous kernel's
            global_scale = read_global_scale(
                scales, shared.toint() + config.scratch_offset, thread, config
            )
            if cutlass.const_expr(has_dynamic_scale(config)):
                is_first = (thread == 0) & (block == 0) & (rank_tile == 0)
                store_global_scale(scales, global_scale, is_first)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        divisor = global_scale if has_dynamic_scale(config) else None
        work = Work(
            rows=share_rows(tensors.x.shape[0], block // config.team, ctas // config.team),
            num_rows=Int32(tensors.x.shape[0]),
            num_columns=Int32(tensors.x.shape[1]),
            first_block=first_block,
            slice=slice_of_k,
            is_writing=rank_tile == 0,
            x_rings=rings[0].barriers,
            lora_barriers=locate_lora_barriers(shared, config),
            shared=shared.toint(),
            exchange=make_exchange(rings, shared, block % config.cluster_k, config),
            outputs=make_outputs(tensors, first_block, rank_tile, config),
            factor=scales.lora_act,
            global_scale=divisor,
            config=config,
        )
        roles = LoadRoles(
            work=work,
            x=partition_x(x_operand, shared, config),
            matrix=make_matrix(tensors.x, work),
            lora_down=partition_lora_down(lora_operand, shared, config),
            rank_tile=rank_tile,
        )
        run_roles(roles, work, global_scale, thread, config)
        cute.arch.cluster_arrive()  # nobody leaves while a peer may still send to it
        cute.arch.cluster_wait()


@cute.jit
def run_roles(
    roles: LoadRoles, work: Work, global_scale: Any, thread: Int32, config: cutlass.Constexpr
) -> None:
    """Give each warp its role."""
    warp = cute.arch.make_warp_uniform(thread // 32)
    if warp < 4:
        cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
        if warp < CONSUMER_WARPGROUPS:
            if cutlass.const_expr(config.use_pdl):
                cute.arch.griddepcontrol_wait()
            roles.x_role(warp, thread % 32)
        if cutlass.const_expr(config.rank_tile > 0):  # noqa: SIM102 - one is compile-time
            if warp == LORA_DOWN_WARP:
                roles.lora_down_role()
    else:
        cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()  # act may still be read by the kernel before
        thread_of_warpgroup = thread % 128
        place = make_fragment_place(thread_of_warpgroup)
        if cutlass.const_expr(config.has_token_scale):
            TokenConsumer(work, warp // 4 - 1, thread_of_warpgroup, place).run()
        else:
            consumer = Consumer(work, warp // 4 - 1, thread_of_warpgroup, place)
            BlockConsumer(consumer, global_scale).run()


def has_dynamic_scale(config: WgmmaQuantizeConfig) -> bool:
    """Return whether a first pass over x finds a global scale."""
    return not config.has_token_scale and config.activation.global_scale == "dynamic"


def make_rings(shared: Any, config: WgmmaQuantizeConfig) -> tuple[Ring, ...]:
    """Return the rings of x of each consumer warpgroup, and that of the sums."""
    barriers = cute.recast_ptr(shared + config.barrier_offset, dtype=Int64)
    step = 2 * config.stages
    x_rings = [Ring(barriers + index * step, config.stages) for index in range(CONSUMER_WARPGROUPS)]
    return (*x_rings, Ring(barriers + CONSUMER_WARPGROUPS * step, 1))


def locate_lora_barriers(shared: Any, config: WgmmaQuantizeConfig) -> Any:
    """Return the first full barrier of lora_down: one for each block."""
    barriers = cute.recast_ptr(shared + config.barrier_offset, dtype=Int64)
    return barriers + CONSUMER_WARPGROUPS * 2 * config.stages + 2


@cute.jit
def init_barriers(rings: Any, shared: Any, thread: Int32, config: cutlass.Constexpr) -> None:
    """Initialise all barriers."""
    if thread == 0:
        for ring in rings[:CONSUMER_WARPGROUPS]:
            ring.init(full_arrivals=1, empty_arrivals=4)
        warps = 4 * config.cluster_k
        rings[CONSUMER_WARPGROUPS].init(full_arrivals=warps, empty_arrivals=warps)
        lora_barriers = locate_lora_barriers(shared, config)
        for index in cutlass.range_constexpr(config.blocks):
            cute.arch.mbarrier_init(lora_barriers + index, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def copy_smooth(
    smooth: cute.Tensor,
    first_block: Int32,
    shared: Int32,
    thread: Int32,
    config: cutlass.Constexpr,
) -> None:
    """Copy the slice of smooth to shared memory.

    Beyond K lie factors 0, whatever is added to x before, or divisors 1.
    """
    for item in cutlass.range(thread, config.blocks * BLOCK_K, THREADS, unroll=1):
        column = first_block * BLOCK_K + item
        value = Float32(0.0 if config.has_token_scale else 1.0)
        if column < smooth.shape[0]:
            value = ld_global_f32(smooth.iterator.toint() + Int64(column) * 4)
        st_shared_f32(shared + config.smooth_offset + item * 4, value)


def make_exchange(
    rings: tuple[Ring, ...], shared: Any, rank: Int32, config: WgmmaQuantizeConfig
) -> TileExchange:
    """Return the exchange with the other CTAs of the cluster."""
    address = shared.toint()
    return TileExchange(
        ring=rings[CONSUMER_WARPGROUPS],
        maxima=address + config.maxima_offset,
        sums=address + config.sums_offset,
        rank=rank,
        config=config,
    )


def make_outputs(
    tensors: Any, first_block: Int32, rank_tile: Int32, config: WgmmaQuantizeConfig
) -> Outputs:
    """Return where this CTA writes."""
    act, lora_act = tensors.act, tensors.lora_act
    group_scale, token_scale = tensors.act_group_scale, tensors.token_scale
    first_rank = rank_tile * config.rank_tile
    column_bytes = Int64(first_block) * (BLOCK_K * config.act_bytes)
    return Outputs(
        act=act.iterator.toint() + column_bytes,
        act_pitch=Int64(act.stride[0]) * config.act_bytes,
        act_blocks=Int32(act.shape[1]) // BLOCK_K - first_block,
        token_scale=None if token_scale is None else token_scale.iterator.toint(),
        group_scale=None
        if group_scale is None
        else group_scale.iterator.toint() + Int64(first_block) * 2,
        group_pitch=None if group_scale is None else Int64(group_scale.stride[0]),
        lora_act=None if lora_act is None else lora_act.iterator.toint() + Int64(first_rank) * 2,
        lora_pitch=None if lora_act is None else Int64(lora_act.stride[0]),
        lora_columns=None if lora_act is None else Int32(lora_act.shape[1]) - first_rank,
    )


def make_matrix(x: cute.Tensor, work: Work) -> Matrix:
    """Return x by address, cut after the rows of the team."""
    return Matrix(
        address=x.iterator.toint(),
        rows=work.rows.first + work.rows.count,
        columns=Int32(x.shape[1]),
        pitch=Int64(x.stride[0]),
    )


def partition_x(operand: TmaOperand | None, shared: Any, config: WgmmaQuantizeConfig) -> Any:
    """Return the loads of boxes of x; place: box + BOXES * slot. None without TMA."""
    if operand is None:
        return None
    slots = CONSUMER_WARPGROUPS * config.stages
    places = cute.make_layout(slots * BOXES, stride=SLOT_BYTES // BOXES)
    element = FLOAT_TYPES[config.dtype]
    boxes = make_box_tensor(shared + config.ring_offset, element, (BOX_ROWS, ROW_BYTES), places)
    return partition_boxes(operand, boxes, (BOX_ROWS, BLOCK_K))


def partition_lora_down(
    operand: TmaOperand | None, shared: Any, config: WgmmaQuantizeConfig
) -> Any:
    """Return the loads of blocks of lora_down; place: the block. None without rank."""
    if operand is None:
        return None
    places = cute.make_layout(config.blocks, stride=config.rank_tile * ROW_BYTES)
    element = FLOAT_TYPES[config.dtype]
    boxes = make_box_tensor(shared, element, (config.rank_tile, ROW_BYTES), places)
    return partition_boxes(operand, boxes, (config.rank_tile, BLOCK_K))
