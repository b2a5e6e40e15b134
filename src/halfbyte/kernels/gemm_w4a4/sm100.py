"""The W4A4 GEMM for sm_100a and sm_103a: scaled 4-bit product and low rank in one accumulator.

One tile, from memory to memory:

    load warp      TMA: blocks of A, B and their scales, and low-rank chunks -> ring slots
    MMA warp       tcgen05.cp scales -> tensor memory; tcgen05.mma both products -> accumulator
    epilogue warps tcgen05.ld -> scale, bias, activation -> staging -> TMA store
                                                         -> codes and block scales

Every role is a function; the kernel allocates, initialises barriers and hands out roles. All blocks
of a tile, low-rank chunks included, go through one ring: a chunk of 64 fp16 columns is as wide as a
block of 256 codes. docs/kernels/gemm_w4a4.md has the barrier table and the figures.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from halfbyte.device.accumulator_pair import (
    AccumulatorPair,
    load_columns,
    make_accumulator_layout,
    wait_for_columns,
)
from halfbyte.device.epilogue_values import ColumnVectors, VectorTensors, apply_activation
from halfbyte.device.output_store import WIDTH, RowPlace, make_output_operand, make_output_store
from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.scale_copy import ScaleOperands, make_scale_copies
from halfbyte.device.scaled_product import add_low_rank, multiply_scaled
from halfbyte.device.tile_scheduler import CLC_STAGES, ClcMailbox, Raster, TileScheduler
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.gemm_w4a4.buffers import (
    allocate_buffers,
    init_rings,
    make_cluster_sum,
    make_rings,
    prefetch_descriptors,
    sync_cluster,
)
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    EPILOGUE_WARPS,
    OWN_RING_STAGES,
    GemmConfig,
    check_legal,
)
from halfbyte.kernels.gemm_w4a4.layouts import TileLayouts, partition_loads
from halfbyte.kernels.gemm_w4a4.quantized_store import (
    QuantizedTensors,
    invert_smooth,
    make_quantized_store,
)
from halfbyte.kernels.gemm_w4a4.sm100_few_tokens import FewTokensEpilogue
from halfbyte.kernels.gemm_w4a4.work import (
    EPILOGUE_THREADS,
    LOAD_WARP,
    MMA_WARP,
    SCHEDULER_WARP,
    Work,
    split_k,
)

EPILOGUE_BARRIER = 1  # named barrier of the epilogue warps


class LoadRole(TracedRecord):
    """The load warp: fills ring slots, tile by tile."""

    def __init__(self, layouts: TileLayouts, work: Work, loads: Any) -> None:
        """Keep what a block's load needs: `loads` are (main operands, low-rank operands)."""
        self.layouts = layouts
        self.work = work
        self.block_loads, self.chunk_loads = loads

    @cute.jit
    def load_role(self) -> None:
        """Load every block of every tile, then wait until the last ones were used."""
        work, layouts = self.work, self.layouts
        blocks = RingPosition.producer(work.rings.blocks.stages)
        chunks = RingPosition.producer(OWN_RING_STAGES)
        tile = work.scheduler.start()
        while tile.is_valid:
            m, n = tile.place
            block = work.k.first_block
            for segment in cutlass.range(work.num_segments, unroll=1):
                end = work.segment_end(segment)
                for index in cutlass.range(block, end, unroll=1):
                    blocks = self.load_block(blocks, (m, n, index))
                block = end
                if segment < work.k.num_chunks:
                    blocks, chunks = self.load_chunk(blocks, chunks, (m, n, segment))
            tile = tile.next()
        self.drain(work.rings.blocks, blocks)
        if cutlass.const_expr(layouts.has_own_ring):
            self.drain(work.rings.chunks, chunks)

    @cute.jit
    def load_block(self, blocks: RingPosition, place: Any) -> RingPosition:
        """Load the main block at `place`, (tile_m, tile_n, block of K), into the next slot."""
        ring = self.work.rings.blocks
        self.fill(ring, blocks, self.block_loads, self.layouts.block_bytes, place)
        return blocks.next()

    @cute.jit
    def load_chunk(
        self, blocks: RingPosition, chunks: RingPosition, place: Any
    ) -> tuple[RingPosition, RingPosition]:
        """Load a low-rank chunk into the next slot of the ring that chunks ride."""
        rings, num_bytes = self.work.rings, self.layouts.chunk_bytes
        if cutlass.const_expr(self.layouts.has_own_ring):
            self.fill(rings.chunks, chunks, self.chunk_loads, num_bytes, place)
            chunks = chunks.next()
        elif cutlass.const_expr(self.layouts.config.low_rank is not None):
            self.fill(rings.blocks, blocks, self.chunk_loads, num_bytes, place)
            blocks = blocks.next()
        return blocks, chunks

    @cute.jit
    def fill(
        self, ring: Ring, position: RingPosition, loads: Any, num_bytes: int, place: Any
    ) -> None:
        """Start the loads of one slot; its full barrier counts the bytes of all CTAs of the MMA."""
        tile_m, tile_n, block = place
        ring.wait_empty(position)
        if self.work.is_leader:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full(position), num_bytes)
        for index, load in enumerate(loads):
            row = tile_m if index % 2 == 0 else tile_n  # A, B, A's scales, B's scales
            load.copy(row, block, position.index, ring.full(position))

    @cute.jit
    def drain(self, ring: Ring, position: RingPosition) -> None:
        """Wait until every slot is free: the MMA's arrivals must find this CTA alive."""
        for _ in cutlass.range_constexpr(ring.stages):
            ring.wait_empty(position)
            position = position.next()


class MultiplyRole(TracedRecord):
    """The MMA warp of the leading CTA: both products of every tile into an accumulator."""

    def __init__(
        self, layouts: TileLayouts, work: Work, accumulators: AccumulatorPair, buffers: Any
    ) -> None:
        """Make the fragments and scale copies; `buffers` is the record of shared memory."""
        self.layouts = layouts
        self.work = work
        self.accumulators = accumulators
        mma = layouts.make_scaled_mma()
        self.fragments = mma.make_fragment_A(buffers.a), mma.make_fragment_B(buffers.b)
        scales = ScaleOperands(
            mma, layouts.tiler, layouts.config.block_size, layouts.scale_type, layouts.shape.group
        )
        column = accumulators.pointer + layouts.storage.accumulator_columns
        self.scale_copies = make_scale_copies(
            scales,
            (buffers.sfa, buffers.sfb),
            (column, column + layouts.sfa_columns),
        )
        if layouts.config.low_rank is not None:
            low_rank_mma = layouts.make_low_rank_mma()
            self.chunk_fragments = (
                low_rank_mma.make_fragment_A(buffers.lora_a),
                low_rank_mma.make_fragment_B(buffers.lora_b),
            )

    @cute.jit
    def release(self, barrier: Any) -> None:
        """Arrive at `barrier`, in both CTAs of a pair, when all products so far are complete."""
        with cute.arch.elect_one():
            if cutlass.const_expr(self.layouts.shape.num_ctas == 2):
                tcgen05.commit(barrier, 0b11, self.layouts.shape.group)
            else:
                tcgen05.commit(barrier, None, self.layouts.shape.group)

    @cute.jit
    def mma_role(self) -> None:
        """Multiply every tile, block after block in the order in which they were loaded."""
        work = self.work
        blocks = RingPosition.consumer(work.rings.blocks.stages)
        chunks = RingPosition.consumer(OWN_RING_STAGES)
        output = RingPosition.producer(self.accumulators.stages)
        tile = work.scheduler.start()
        while tile.is_valid:
            accumulator = self.accumulators.tensor(self.accumulators.filled_by(output))
            work.rings.accumulators.wait_empty(output)
            block = work.k.first_block
            for segment in cutlass.range(work.num_segments, unroll=1):
                end = work.segment_end(segment)
                for index in cutlass.range(block, end, unroll=1):
                    blocks = self.multiply_block(blocks, accumulator, index)
                block = end
                if segment < work.k.num_chunks:
                    blocks, chunks = self.multiply_chunk(blocks, chunks, accumulator)
            self.release(work.rings.accumulators.full(output))
            output = output.next()
            tile = tile.next()

    @cute.jit
    def multiply_block(self, blocks: RingPosition, accumulator: Any, block: Int32) -> RingPosition:
        """Multiply one main block; the first one of a tile starts the accumulator."""
        ring = self.work.rings.blocks
        ring.wait_full(blocks)
        a, b = self.fragments
        sfa, sfb = self.scale_copies
        sfa.run(blocks.index)
        sfb.run(blocks.index)
        slot = (None, None, None, blocks.index)
        multiply_scaled(
            self.layouts.make_scaled_mma(),
            accumulator,
            (a[slot], sfa.fragment),
            (b[slot], sfb.fragment),
            block != self.work.k.first_block,
        )
        self.release(ring.empty(blocks))
        return blocks.next()

    @cute.jit
    def multiply_chunk(
        self, blocks: RingPosition, chunks: RingPosition, accumulator: Any
    ) -> tuple[RingPosition, RingPosition]:
        """Add one low-rank chunk from the ring that chunks ride; it is never a tile's first."""
        rings = self.work.rings
        if cutlass.const_expr(self.layouts.has_own_ring):
            self.multiply_slot(rings.chunks, chunks, accumulator)
            chunks = chunks.next()
        elif cutlass.const_expr(self.layouts.config.low_rank is not None):
            self.multiply_slot(rings.blocks, blocks, accumulator)
            blocks = blocks.next()
        return blocks, chunks

    @cute.jit
    def multiply_slot(self, ring: Ring, position: RingPosition, accumulator: Any) -> None:
        """Add the low-rank chunk of one slot."""
        ring.wait_full(position)
        a, b = self.chunk_fragments
        slot = (None, None, None, position.index)
        add_low_rank(self.layouts.make_low_rank_mma(), accumulator, a[slot], b[slot])
        self.release(ring.empty(position))


class EpilogueRole(TracedRecord):
    """The four epilogue warps: from accumulator to outputs."""

    def __init__(
        self,
        layouts: TileLayouts,
        work: Work,
        accumulators: AccumulatorPair,
        vectors: ColumnVectors,
        outputs: tuple[Any, ...],
    ) -> None:
        """Keep what a tile's epilogue needs; `outputs` are stores with `put` and `finish`."""
        self.layouts = layouts
        self.work = work
        self.accumulators = accumulators
        self.vectors = vectors
        self.outputs = outputs
        self.slots = max(1, layouts.storage.num_output_slots)

    @cute.jit
    def release(self, position: RingPosition) -> None:
        """Give the accumulator back to the MMA warp of the leading CTA; each warp arrives once."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.layouts.shape.num_ctas == 2):
                cute.arch.mbarrier_arrive(self.work.rings.accumulators.empty(position), 0)
            else:
                cute.arch.mbarrier_arrive(self.work.rings.accumulators.empty(position))

    @cute.jit
    def epilogue_role(self) -> None:
        """Store every tile."""
        work, config = self.work, self.layouts.config
        thread = cute.arch.thread_idx()[0]
        input_position = RingPosition.consumer(self.accumulators.stages)
        slot_position = RingPosition.consumer(self.slots)
        tile = work.scheduler.start()
        while tile.is_valid:
            m, n = tile.place
            if cutlass.const_expr(config.epilogue.has_vectors):
                # The previous tile's factors are read by all warps before they are replaced.
                cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_THREADS)
                self.vectors.stage(n * config.tile.n, thread, EPILOGUE_THREADS)
                cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_THREADS)
            work.rings.accumulators.wait_full(input_position)
            slot_position = self.store_tile(m, n, input_position, slot_position)
            input_position = input_position.next()
            tile = tile.next()
        for output in self.outputs:
            output.finish(cute.arch.lane_idx())

    @cute.jit
    def store_tile(
        self, m: Int32, n: Int32, input_position: RingPosition, slot_position: RingPosition
    ) -> RingPosition:
        """Store one tile, `output_columns` columns at a time."""
        pair, tile = self.accumulators, self.layouts.config.tile
        columns = self.layouts.output_columns
        num_parts = tile.n // columns
        thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffer = pair.read_by(input_position)
        accumulator = pair.tensor(buffer)
        row_block = (m * tile.num_ctas + self.work.rank) * EPILOGUE_WARPS + warp
        for step in cutlass.range(num_parts, unroll=1):
            part = pair.part(buffer, step, columns, num_parts)
            values = load_columns(accumulator, part * columns, columns, thread)
            wait_for_columns()
            if pair.is_free_after(step, columns, num_parts):
                self.release(input_position)
            row = self.finish_row(values, part * columns)
            slot = warp * self.slots + slot_position.index
            place = RowPlace(row_block, n * num_parts + part, part * columns, slot, lane)
            for output in self.outputs:
                output.put(row, place)
            slot_position = slot_position.next()
        return slot_position

    def finish_row(self, values: Any, column: Int32) -> Any:
        """Return the output values of a part of a row, rounded, from its accumulator values."""
        columns = self.layouts.output_columns
        parts = cute.flat_divide(cute.make_tensor(values.iterator, columns), (WIDTH,))
        finished = cute.make_rmem_tensor((columns,), self.layouts.out_type)
        finished_parts = cute.flat_divide(finished, (WIDTH,))
        for half in range(columns // WIDTH):
            row = parts[(None, half)].load()
            row = self.vectors.apply(row, column + half * WIDTH, WIDTH)
            row = apply_activation(row, self.layouts.config.epilogue.activation)
            finished_parts[(None, half)].store(row.to(self.layouts.out_type))
        return finished


@cute.jit
def scheduler_role(work: Work) -> None:
    """Ask for the next tile while there is one; the cluster's first CTA does it for all.

    Cluster launch control alone has such a warp.
    """
    if cutlass.const_expr(work.scheduler.mailbox is not None):
        position = RingPosition.producer(CLC_STAGES)
        tile = work.scheduler.start()
        while tile.is_valid:
            work.scheduler.mailbox.request(position)
            position = position.next()
            tile = tile.next()


class GemmTensors(NamedTuple):
    """The tensors of a launch, as the MMA sees them; with swapped operands A is the weight.

    Attributes:
        a_codes, b_codes: uint8 [rows, bytes]. a_sf, b_sf: uint8, flat, swizzled.
        lora_a, lora_b: [rows, rank] or None.
        scale, bias, smooth: [N] float32 or None. alpha: [1] float32 or None.
        output: [M, N] or None.
        next_codes: uint8 [M, bytes] or None. next_sf: uint8, flat, swizzled, or None.
        next_global_scale: [1] float32 or None.
    """

    a_codes: Any
    a_sf: Any
    b_codes: Any
    b_sf: Any
    lora_a: Any
    lora_b: Any
    scale: Any
    bias: Any
    smooth: Any
    alpha: Any
    output: Any
    next_codes: Any
    next_sf: Any
    next_global_scale: Any


class GemmProgram:
    """Host function and kernel of one configuration."""

    def __init__(self, config: GemmConfig) -> None:
        """Keep the configuration; everything else is made while tracing."""
        check_legal(config)
        self.config = config
        self.num_warps = EPILOGUE_WARPS + (3 if config.scheduler == "clc" else 2)

    @cute.jit
    def launch(self, tensors: Any, max_clusters: Int32, stream: Any) -> None:
        """Launch on `stream` over at most `max_clusters` clusters."""
        layouts, config = TileLayouts(self.config), self.config
        tile = config.tile
        operands = layouts.make_operands(tensors)
        output = quantized = None
        if cutlass.const_expr(tile.swap):
            output = tensors.output
        elif cutlass.const_expr(config.epilogue.has_dense_output):
            output = make_output_operand(tensors.output, layouts.output_columns)
        if cutlass.const_expr(config.epilogue.has_quantized_output):
            quantized = QuantizedTensors(
                tensors.next_codes, tensors.next_sf, tensors.next_global_scale
            )
        m, n = tensors.a_codes.shape[0], tensors.b_codes.shape[0]
        tiles_m, tiles_n = cute.ceil_div(m, tile.m), cute.ceil_div(n, tile.n)
        num_tiles = tiles_m * tiles_n
        num_clusters = num_tiles
        if cutlass.const_expr(config.scheduler == "static"):
            num_clusters = cutlass.min(num_tiles, max_clusters)
        num_blocks = cute.ceil_div(tensors.a_codes.shape[1] * 2, BLOCK_K)
        num_chunks = Int32(0)
        if cutlass.const_expr(config.low_rank is not None):
            num_chunks = cute.ceil_div(tensors.lora_a.shape[1], config.low_rank.chunk)
        sizes = (tiles_m, tiles_n, num_blocks, num_chunks, Int32(m), Int32(n))
        vectors = VectorTensors(tensors.scale, tensors.bias, tensors.smooth, tensors.alpha)
        self.kernel(operands, (output, quantized), vectors, sizes).launch(
            grid=(num_clusters * layouts.cluster_size, 1, 1),
            block=(32 * self.num_warps, 1, 1),
            cluster=(layouts.cluster_size, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=config.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Any, outputs: Any, vectors: Any, sizes: Any) -> None:
        """Allocate, initialise barriers, hand out roles."""
        layouts, config = TileLayouts(self.config), self.config
        tiles_m, tiles_n, num_blocks, num_chunks, num_rows, num_columns = sizes
        output, quantized = outputs
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # From blockIdx, not from %cluster_ctarank: a branch on the latter is not uniform to ptxas,
        # and each tensor core instruction behind it becomes a loop over lanes (docs/gotchas).
        rank = cute.arch.block_idx()[0] % layouts.cluster_size
        # CTAs that split K are no pair: each one leads its own MMAs.
        pair_rank = rank % config.tile.num_ctas
        buffers = allocate_buffers(layouts)
        rings = make_rings(layouts, buffers.barriers)
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                init_rings(layouts, rings)
            cute.arch.mbarrier_init_fence()
            prefetch_descriptors(operands, None if config.tile.swap else output)
        if warp == 0:
            cute.arch.alloc_tmem(512, buffers.tmem_address, layouts.shape.num_ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(layouts.shape.num_ctas == 2)
        sync_cluster(layouts)
        if cutlass.const_expr(config.use_pdl):
            cute.arch.griddepcontrol_wait()

        cluster = cute.arch.block_idx()[0] // layouts.cluster_size
        num_clusters = cute.arch.grid_dim()[0] // layouts.cluster_size
        mailbox = None
        if cutlass.const_expr(config.scheduler == "clc"):
            mailbox = ClcMailbox(rings.mailbox, buffers.clc_responses, layouts.cluster_size)
        work = Work(
            TileScheduler(
                Raster(tiles_m, tiles_n, config.raster_group), cluster, num_clusters, mailbox
            ),
            rings,
            split_k(num_blocks, num_chunks, rank, config.tile.num_splits),
            config.low_rank is not None and config.low_rank.placement == "spread",
            pair_rank == 0,
            rank,
        )
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, buffers.tmem_address)
        storage = layouts.storage
        accumulators = AccumulatorPair(
            pointer,
            make_accumulator_layout(layouts.make_scaled_mma(), layouts.tiler[:2]),
            storage.accumulator_offsets[1],
            storage.overlap_columns,
        )
        if warp == LOAD_WARP:
            loads = partition_loads(layouts, operands, buffers, pair_rank)
            LoadRole(layouts, work, loads).load_role()
            if cutlass.const_expr(config.use_pdl):
                cute.arch.griddepcontrol_launch_dependents()
        if warp == MMA_WARP and work.is_leader:
            MultiplyRole(layouts, work, accumulators, buffers).mma_role()
        if cutlass.const_expr(config.tile.swap):
            if warp < EPILOGUE_WARPS:
                cluster_sum = make_cluster_sum(layouts, rings, buffers)
                FewTokensEpilogue(
                    config, work, accumulators, vectors, output, cluster_sum
                ).epilogue_role()
        elif warp < EPILOGUE_WARPS:
            column_vectors = ColumnVectors(vectors, buffers.vectors, num_columns, invert_smooth)
            stores: list[Any] = []
            if cutlass.const_expr(output is not None):
                stores.append(
                    make_output_store(
                        output, buffers.output, storage.num_output_slots, layouts.output_columns
                    )
                )
            if cutlass.const_expr(quantized is not None):
                shape = num_rows, num_columns
                stores.append(make_quantized_store(config, quantized, column_vectors, shape))
            EpilogueRole(layouts, work, accumulators, column_vectors, tuple(stores)).epilogue_role()
        if warp == SCHEDULER_WARP and work.is_leader:
            scheduler_role(work)
        # Arrivals from the other CTA of the pair, and its reads of tensor memory, are over.
        sync_cluster(layouts)
        if warp == 0:
            cute.arch.dealloc_tmem(pointer, 512, layouts.shape.num_ctas == 2)
