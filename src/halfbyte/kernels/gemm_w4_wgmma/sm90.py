"""The W4A4 GEMM for sm_90a: weights decoded in registers are the A operand of `wgmma`.

It computes y transposed, y^T = W x^T, so that the decoded weights go from registers into the
product and never to shared memory. One tile is 128 channels by `tokens` tokens:

    load warp            TMA, bulk copies: activations, packed weights, low-rank chunks -> slots
    2 consumer           ld.shared packed weights -> decode -> wgmma with activations from the slot
    warpgroups           -> scale, bias -> staging -> TMA store

While one step's products run, a warpgroup reads and decodes the next step's weights into the other
half of its operand registers; while a tile's last products run, the next tile's first weights.
Low-rank chunks come last, through the same slots into the same accumulator.
docs/kernels/gemm_w4_wgmma.md has the barrier table and the figures.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from halfbyte.device.cluster_fragments import FragmentSum
from halfbyte.device.memory_access import ld_shared_v4
from halfbyte.device.ring_position import RingPosition
from halfbyte.device.tile_scheduler import Raster, TileScheduler
from halfbyte.device.traced_record import TracedRecord
from halfbyte.device.warpgroup_product import (
    STEP_UNITS,
    commit_products,
    fence_products,
    make_accumulator,
    make_descriptor,
    multiply_from_registers,
    wait_for_products,
)
from halfbyte.kernels.gemm_w4_wgmma.buffers import (
    CHUNK_ROW_BYTES,
    SharedBuffers,
    allocate_buffers,
    init_rings,
    make_exchange_ring,
    make_ring,
)
from halfbyte.kernels.gemm_w4_wgmma.config import (
    BLOCK_K,
    CONSUMER_WARPGROUPS,
    CONSUMER_WARPS,
    HALF_BYTES,
    REGISTERS,
    ROW_BYTES,
    SCALE_BYTES,
    WARPGROUP_BLOCK_BYTES,
    WARPGROUP_CHANNELS,
    WgmmaGemmConfig,
    check_legal,
    plan_storage,
)
from halfbyte.kernels.gemm_w4_wgmma.decode import STEP_WORDS, make_decoder, make_words
from halfbyte.kernels.gemm_w4_wgmma.epilogue import (
    Factors,
    TileEpilogue,
    make_output_operand,
)
from halfbyte.kernels.gemm_w4_wgmma.few_tokens_epilogue import FewTokensEpilogue, count_units
from halfbyte.kernels.gemm_w4_wgmma.loading import LoadRole, lora_blocks_address, make_sources
from halfbyte.kernels.gemm_w4_wgmma.work import Work, split_k

FIRST_CONSUMER_WARP = 4
INSTRUCTIONS = 4  # of a step
CHUNK_INSTRUCTIONS = 2  # of a low-rank chunk
CHUNK_WORDS = 4 * CHUNK_INSTRUCTIONS  # of a thread's part of a chunk's lora_up
LORA_BLOCK_WARPGROUP_BYTES = WARPGROUP_CHANNELS * 16 * 2  # of one instruction


@dataclass(frozen=True)
class MultiplyRole(TracedRecord):
    """One consumer warpgroup.

    Attributes:
        config: of the kernel. work: of this CTA. buffers: shared memory.
        warpgroup: 0 or 1. thread: of the warpgroup.
        accumulator: float32 [tokens / 2] in registers.
        operands: two operands of a step, Uint32 [16] each, in registers.
        words: packed weights of the next step, in registers.
        fragments: two parts of lora_up, Uint32 [8] each, in registers.
    """

    config: cutlass.Constexpr
    work: Work
    buffers: SharedBuffers
    warpgroup: Int32
    thread: Int32
    accumulator: Any
    operands: tuple[Any, Any]
    words: Any
    fragments: tuple[Any, Any]

    @property
    def decoder(self) -> Any:
        """How packed weights become operands."""
        return make_decoder(self.config)

    @property
    def steps_per_slot(self) -> int:
        """Steps of four instructions in one slot: 1 or 2."""
        return self.config.slot_columns // self.decoder.columns

    @cute.jit
    def multiply_role(self, epilogue: TileEpilogue) -> None:
        """Multiply and store every tile."""
        position = self.work.consumer()
        tile = self.work.scheduler.start()
        token_tile, group = tile.place
        self.prepare_tile(position)
        while tile.is_valid:
            place = token_tile, group
            factors = epilogue.load_factors(*place)
            position = self.multiply_blocks(position)
            if cutlass.const_expr(self.config.lora_dtype is not None):
                position = self.multiply_chunks(position)
            tile = tile.next()
            following = position.next()
            if tile.is_valid:  # while the last products run
                token_tile, group = tile.place
                self.prepare_tile(following)
            wait_for_products(0, self.accumulator)
            self.release(position)
            epilogue.store_tile(self.accumulator, factors, *place)
            position = following
        epilogue.finish_role()

    def prepare_tile(self, position: RingPosition) -> None:
        """Read and decode a tile's first step into the first operand."""
        self.work.ring.wait_full(position)
        self.load_words(position, 0)
        self.decoder.decode(self.words, self.operands[0], 0)

    @property
    def num_steps(self) -> Int32:
        """Steps of a tile."""
        return self.work.k.num_blocks * (BLOCK_K // self.decoder.columns)

    @cute.jit
    def multiply_blocks(self, position: RingPosition) -> RingPosition:
        """Multiply all main blocks of a tile that is prepared; return the last one's position.

        Steps go in pairs, one for each operand. The last pair, or the last step where their number
        is odd, has no next step to read. The last step is still running afterwards, unless it has
        the first operand, which the next tile is prepared in.
        """
        num_steps = self.num_steps
        previous = position
        num_pairs = (num_steps - 1) // 2
        for pair in cutlass.range(num_pairs, unroll=1):
            position, previous = self.step(0, position, previous, pair)
            position, previous = self.step(1, position, previous, Int32(1))
        if num_steps % 2 == 0:
            position, previous = self.step(0, position, previous, num_pairs)
            self.last_step(1, position, previous, Int32(1))
        else:
            self.last_step(0, position, previous, num_pairs)
            wait_for_products(0, self.accumulator)
        return position

    @cute.jit
    def step(
        self, parity: cutlass.Constexpr, position: Any, previous: Any, accumulate: Int32
    ) -> tuple[RingPosition, RingPosition]:
        """Multiply one step, and read and decode the next; return (next, this) position."""
        self.multiply(parity, position, accumulate)
        self.finish_previous(parity, previous, accumulate)
        following = position
        if cutlass.const_expr(parity == 1 or self.steps_per_slot == 1):
            following = position.next()
            self.work.ring.wait_full(following)
        self.load_words(following, 1 - parity)
        self.decoder.decode(self.words, self.operands[1 - parity], 1 - parity)
        return following, position

    @cute.jit
    def last_step(
        self, parity: cutlass.Constexpr, position: Any, previous: Any, accumulate: Int32
    ) -> None:
        """Multiply a tile's last step."""
        self.multiply(parity, position, accumulate)
        self.finish_previous(parity, previous, accumulate)

    @cute.jit
    def finish_previous(self, parity: cutlass.Constexpr, previous: Any, accumulate: Int32) -> None:
        """Wait for the step before this one: its operand is free, and its slot if it was the last.

        The slot goes back before anything else is waited for: the load warp may be behind.
        """
        wait_for_products(1, self.words)
        if cutlass.const_expr(parity == 0 or self.steps_per_slot == 1):
            self.release_if(previous, accumulate)

    def multiply(self, parity: int, position: RingPosition, accumulate: Int32) -> None:
        """Issue the products of one step as one group."""
        operand = self.operands[parity]
        half = parity if self.steps_per_slot == 2 else 0
        address = self.slot_address(position) + half * self.config.tokens * ROW_BYTES
        descriptor = make_descriptor(address, ROW_BYTES)
        kind = "e4m3" if self.config.mode == "fp8" else "float16"
        fence_products(operand)
        for index in range(INSTRUCTIONS):
            multiply_from_registers(
                self.accumulator,
                tuple(operand[4 * index + word] for word in range(4)),
                descriptor + STEP_UNITS * index,
                accumulate if index == 0 else Int32(1),
                kind,
            )
        commit_products()

    def slot_address(self, position: RingPosition) -> Int32:
        """Return the shared address of a slot's activations."""
        return self.buffers.act.toint() + position.index * plan_storage(self.config).act_slot_bytes

    def load_words(self, position: RingPosition, half: int) -> None:
        """Read the packed weights of a step."""
        storage = plan_storage(self.config)
        slot = self.buffers.weights.toint() + position.index * storage.weight_slot_bytes
        if self.config.slot_columns == BLOCK_K:
            block = slot + self.warpgroup * WARPGROUP_BLOCK_BYTES
            skipped = half * HALF_BYTES if self.steps_per_slot == 2 else 0
            codes, scales = block + skipped, block + 2 * HALF_BYTES
        else:
            codes = slot + self.warpgroup * (HALF_BYTES + SCALE_BYTES)
            scales = codes + HALF_BYTES
        self.decoder.load(self.words, codes, scales, self.thread, half)

    @cute.jit
    def release(self, position: Any) -> None:
        """Give a slot back to all CTAs that load into it; each warp arrives once at each."""
        self.release_if(position, Int32(1))

    @cute.jit
    def release_if(self, position: Any, is_used: Int32) -> None:
        """Give a slot back where `is_used` is not 0: a tile's first step has none before it."""
        lane = cute.arch.lane_idx()
        empty = self.work.ring.empty(position)
        if (lane < self.config.cluster) & (is_used != 0):
            if cutlass.const_expr(self.config.cluster == 1):
                cute.arch.mbarrier_arrive(empty)
            else:
                cute.arch.mbarrier_arrive(empty, lane)

    @cute.jit
    def multiply_chunks(self, position: RingPosition) -> RingPosition:
        """Add all low-rank chunks of a tile; return the last slot's position.

        Products of the slot at `position` may be running; those of the last chunk are, afterwards.
        While a chunk's products run, the next one's fragments are read: chunks go in pairs, each
        with registers of its own.
        """
        num_chunks = self.work.k.num_chunks
        if num_chunks > 0:
            self.load_fragments(position.next(), 0)
            for _ in cutlass.range((num_chunks - 1) // 2, unroll=1):
                position = self.follow_by_chunk(position, 0)
                self.load_fragments(position.next(), 1)
                position = self.follow_by_chunk(position, 1)
                self.load_fragments(position.next(), 0)
            position = self.follow_by_chunk(position, 0)
            if num_chunks % 2 == 0:
                self.load_fragments(position.next(), 1)
                position = self.follow_by_chunk(position, 1)
        return position

    def load_fragments(self, position: RingPosition, parity: int) -> None:
        """Wait for a chunk and read this thread's part of lora_up."""
        self.work.ring.wait_full(position)
        blocks = lora_blocks_address(self.config, self.buffers, position.index)
        for index in range(CHUNK_INSTRUCTIONS):
            place = blocks + (2 * index + self.warpgroup) * LORA_BLOCK_WARPGROUP_BYTES
            words = ld_shared_v4(place + self.thread * 16)
            for word in range(4):
                self.fragments[parity][4 * index + word] = words[word]

    def follow_by_chunk(self, previous: RingPosition, parity: int) -> RingPosition:
        """Multiply the chunk behind the slot at `previous`, once all before are complete."""
        wait_for_products(0, self.accumulator)
        self.release(previous)
        position = previous.next()
        self.multiply_chunk(position, parity)
        return position

    def multiply_chunk(self, position: RingPosition, parity: int) -> None:
        """Issue the products of one low-rank chunk whose fragments have been read."""
        operand = self.fragments[parity]
        descriptor = make_descriptor(self.slot_address(position), CHUNK_ROW_BYTES)
        fence_products(operand)
        for index in range(CHUNK_INSTRUCTIONS):
            multiply_from_registers(
                self.accumulator,
                tuple(operand[4 * index + word] for word in range(4)),
                descriptor + STEP_UNITS * index,
                Int32(1),
                self.config.lora_dtype,
            )
        commit_products()


class GemmTensors(NamedTuple):
    """The tensors of a launch; None where the kernel has none.

    Attributes:
        act: [M, K_pad]. weight_blocks: uint8 [N / 128, K / 128, 9216].
        token_scale: float32 [M]. act_group_scale: float16 [M, K_pad / 64].
        channel_scale: float32 [N_pad]. lora_act: [M, R_pad].
        lora_blocks: uint8 [N / 128, R / 32, 8192]. bias: float32 [N_pad]. alpha: float32 [1].
        y: [M, N].
    """

    act: Any
    weight_blocks: Any
    token_scale: Any
    act_group_scale: Any
    channel_scale: Any
    lora_act: Any
    lora_blocks: Any
    bias: Any
    alpha: Any
    y: Any


class GemmProgram:
    """Host function and kernel of one configuration."""

    def __init__(self, config: WgmmaGemmConfig) -> None:
        """Keep the configuration; everything else is made while tracing."""
        check_legal(config)
        self.config = config

    @cute.jit
    def launch(self, tensors: Any, max_clusters: Int32, stream: Any) -> None:
        """Launch on `stream` over at most `max_clusters` clusters."""
        config = self.config
        sources = make_sources(config, tensors)
        output = tensors.y
        if cutlass.const_expr(not config.stores_straight):
            output = make_output_operand(config, tensors.y)
        factors = Factors(
            tensors.channel_scale,
            tensors.token_scale,
            tensors.act_group_scale,
            tensors.bias,
            tensors.alpha,
        )
        token_tiles = cute.ceil_div(tensors.act.shape[0], config.tokens)
        channel_tiles = Int32(tensors.weight_blocks.shape[0])
        groups = cute.ceil_div(channel_tiles, config.cluster)
        num_chunks = Int32(0)
        if cutlass.const_expr(config.lora_dtype is not None):
            num_chunks = Int32(tensors.lora_blocks.shape[1])
        sizes = (
            Int32(token_tiles),
            Int32(groups),
            channel_tiles,
            Int32(tensors.weight_blocks.shape[1]),
            num_chunks,
            Int32(tensors.act.shape[0]),
        )
        num_clusters = cutlass.min(token_tiles * groups, max_clusters)
        self.kernel(sources, output, factors, sizes).launch(
            grid=(num_clusters * config.cluster_size, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(self, sources: Any, output: Any, factors: Any, sizes: Any) -> None:
        """Allocate, initialise barriers, hand out roles."""
        config = self.config
        token_tiles, groups, channel_tiles, num_blocks, num_chunks, num_tokens = sizes
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.block_idx()[0] % config.cluster_size
        buffers = allocate_buffers(config)
        ring = make_ring(config, buffers)
        if warp == 0:
            with cute.arch.elect_one():
                init_rings(config, buffers)
            cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        if cutlass.const_expr(config.use_pdl):
            # The next kernel may take its place as soon as there is room: it waits for this grid.
            cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(
            Raster(token_tiles, groups, config.raster_group),
            cute.arch.block_idx()[0] // config.cluster_size,
            cute.arch.grid_dim()[0] // config.cluster_size,
        )
        # The CTAs of a cluster share activations, or they split K, as the pairs of a CTA do.
        consumer = warp - FIRST_CONSUMER_WARP
        pair = Int32(0)
        if cutlass.const_expr(config.pairs > 1):
            pair = warp % config.pairs  # of the load warps, the first ones
            if warp >= FIRST_CONSUMER_WARP:
                pair = consumer // CONSUMER_WARPS
        part = rank // config.cluster * config.pairs + pair
        k = split_k(num_blocks, num_chunks, config.num_parties, part)
        sharer, first_slot = rank % config.cluster, pair * config.stages
        work = Work(
            scheduler, ring, k, channel_tiles, config.cluster, sharer, config.stages, first_slot
        )
        producer_registers, consumer_registers = REGISTERS[config.pairs]
        if warp < FIRST_CONSUMER_WARP:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp < config.pairs:
                LoadRole(config, work, sources, buffers).load_role()
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            if cutlass.const_expr(config.use_pdl):
                cute.arch.griddepcontrol_wait()
            warpgroup = consumer // 4 % CONSUMER_WARPGROUPS
            thread = cute.arch.thread_idx()[0] % 128
            if cutlass.const_expr(config.stores_straight):
                exchange = self.make_exchange(buffers, rank, pair, consumer % CONSUMER_WARPS)
                turn = cute.make_rmem_tensor((1,), Int32)
                turn[0] = Int32(0)
                epilogue: Any = FewTokensEpilogue(
                    config, work, factors, output, exchange, turn, warpgroup, thread
                )
            else:
                epilogue = TileEpilogue(
                    config, work, buffers, factors, output, num_tokens, warpgroup, thread
                )
            role = self.make_multiply_role(work, buffers, factors, warpgroup, thread)
            role.multiply_role(epilogue)
        if cutlass.const_expr(config.cluster > 1):
            self.sync_cluster()  # arrivals from the other CTA find this one's barriers

    def make_multiply_role(
        self,
        work: Work,
        buffers: SharedBuffers,
        factors: Factors,
        warpgroup: Int32,
        thread: Int32,
    ) -> MultiplyRole:
        """Return the role of a consumer warpgroup."""
        config = self.config
        accumulator = make_accumulator(config.tokens)
        operands = make_words(STEP_WORDS), make_words(STEP_WORDS)
        words = make_words(make_decoder(config).num_words)
        fragments = make_words(CHUNK_WORDS), make_words(CHUNK_WORDS)
        held = accumulator, operands, words, fragments
        parts = (config, work, buffers, warpgroup, thread, *held)
        if not config.has_group_scales:
            return MultiplyRole(*parts)
        from halfbyte.kernels.gemm_w4_wgmma.integer_products import make_integer_role

        return make_integer_role(parts, factors.act_group_scale)

    def make_exchange(
        self, buffers: SharedBuffers, rank: Int32, pair: Int32, warp: Int32
    ) -> FragmentSum | None:
        """Return the sum of partial sums for a consumer warp, None where one pair has all of K."""
        config = self.config
        if buffers.exchange is None:
            return None
        return FragmentSum(
            make_exchange_ring(config, buffers),
            buffers.exchange[0],
            rank,
            pair,
            warp,
            cute.arch.lane_idx(),
            count_units(config),
            CONSUMER_WARPS,
            config.pairs,
            config.splits,
        )

    @cute.jit
    def sync_cluster(self) -> None:
        """Wait for all threads of the cluster, or of the CTA where it is alone."""
        if cutlass.const_expr(self.config.cluster_size > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
