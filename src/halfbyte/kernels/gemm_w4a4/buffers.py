"""Shared memory and barriers of one CTA: what is allocated, and who arrives how often.

ring           full: 1 arrival (expect_tx) and the bytes; empty: 1 tcgen05.commit
accumulators   full: 1 tcgen05.commit; empty: 4 epilogue warps of each CTA
mailbox        full: 1 arrival (expect_tx) and 16 bytes; empty: every reading warp of the cluster
partial_sums   full: 1 arrival (expect_tx) and the bytes; empty: 4 epilogue warps of each CTA
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float4E2M1FN, Float32, Int32, Int64, Int128
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from halfbyte.device.accumulator_pair import num_accumulator_slots
from halfbyte.device.cluster_sum import ClusterSum
from halfbyte.device.output_store import make_output_layout
from halfbyte.device.ring_position import Ring
from halfbyte.device.tile_scheduler import CLC_STAGES
from halfbyte.kernels.gemm_w4a4.config import EPILOGUE_WARPS, OWN_RING_STAGES
from halfbyte.kernels.gemm_w4a4.layouts import Operands, TileLayouts


@dataclass(frozen=True)
class SharedBuffers:
    """Shared memory of a CTA; lora_a and lora_b look at the slots of a and b, or have their own."""

    barriers: Any
    tmem_address: Any
    clc_responses: Any
    a: Any
    b: Any
    sfa: Any
    sfb: Any
    lora_a: Any
    lora_b: Any
    vectors: Any
    output: Any
    partial_sums: Any


def allocate_buffers(layouts: TileLayouts) -> SharedBuffers:
    """Allocate what the budget lists, in its order of alignment."""
    memory = SmemAllocator()
    storage, config = layouts.storage, layouts.config
    a = memory.allocate_tensor(
        Float4E2M1FN, layouts.a.outer, byte_alignment=1024, swizzle=layouts.a.inner
    )
    b = memory.allocate_tensor(
        Float4E2M1FN, layouts.b.outer, byte_alignment=1024, swizzle=layouts.b.inner
    )
    lora_a, lora_b = layouts.view_low_rank(memory, a, b)
    sfa = memory.allocate_tensor(layouts.scale_type, layouts.sfa, byte_alignment=1024)
    sfb = memory.allocate_tensor(layouts.scale_type, layouts.sfb, byte_alignment=1024)
    output = None
    if storage.num_output_slots:
        layout = make_output_layout(
            layouts.out_type, layouts.output_columns, EPILOGUE_WARPS * storage.num_output_slots
        )
        output = memory.allocate_tensor(
            layouts.out_type, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
    partial_sums = None
    if storage.exchange_bytes:
        partial_sums = memory.allocate_array(
            Float32, storage.exchange_bytes // 4, byte_alignment=16
        )
    barriers = memory.allocate_array(Int64, 2 * sum(list_ring_stages(layouts)))
    clc = None
    if config.scheduler == "clc":
        clc = memory.allocate_array(Int128, CLC_STAGES, byte_alignment=16)
    tmem_address = memory.allocate_array(Int32, 4, byte_alignment=16)
    vectors = None
    if storage.vector_bytes:
        vectors = memory.allocate_tensor(
            Float32,
            cute.make_layout((config.tile.n, config.epilogue.num_vectors)),
            byte_alignment=16,
        )
    return SharedBuffers(
        barriers, tmem_address, clc, a, b, sfa, sfb, lora_a, lora_b, vectors, output, partial_sums
    )


class Rings(NamedTuple):
    """All rings of a CTA; the last three are None where there is none."""

    blocks: Any
    accumulators: Any
    chunks: Any
    mailbox: Any
    partial_sums: Any


def list_ring_stages(layouts: TileLayouts) -> tuple[int, ...]:
    """Return the slots of the rings in the order of `Rings`, 0 where there is none."""
    return (
        layouts.storage.num_stages,
        num_accumulator_slots(layouts.storage.overlap_columns),
        OWN_RING_STAGES if layouts.has_own_ring else 0,
        CLC_STAGES if layouts.config.scheduler == "clc" else 0,
        1 if layouts.config.tile.num_splits > 1 else 0,
    )


def make_rings(layouts: TileLayouts, barriers: Any) -> Rings:
    """Return the rings over `barriers`, one after the other."""
    rings, first = [], 0
    for stages in list_ring_stages(layouts):
        rings.append(Ring(barriers + first, stages) if stages else None)
        first += 2 * stages
    return Rings(*rings)


def init_rings(layouts: TileLayouts, rings: Rings) -> None:
    """Initialise all barriers with the arrivals of the table above; one thread calls it."""
    num_ctas = layouts.shape.num_ctas
    rings.blocks.init(1, 1)
    rings.accumulators.init(1, EPILOGUE_WARPS * num_ctas)
    if rings.chunks is not None:
        rings.chunks.init(1, 1)
    if rings.mailbox is not None:
        # Load and epilogue warps of every CTA, MMA and scheduler warp of the first.
        rings.mailbox.init(1, (EPILOGUE_WARPS + 1) * num_ctas + 2)
    if rings.partial_sums is not None:
        rings.partial_sums.init(1, EPILOGUE_WARPS * layouts.cluster_size)


def make_cluster_sum(
    layouts: TileLayouts, rings: Rings, buffers: SharedBuffers
) -> ClusterSum | None:
    """Return how the CTAs that split K add up a tile, None where one CTA has all of K."""
    tile = layouts.config.tile
    if tile.num_splits == 1:
        return None
    return ClusterSum(rings.partial_sums, buffers.partial_sums, tile.n, tile.num_splits)


def prefetch_descriptors(operands: Operands, output: Any) -> None:
    """Fetch the TMA descriptors before they are needed."""
    for operand in operands:
        if operand is not None:
            cpasync.prefetch_descriptor(operand.atom)
    if output is not None:
        cpasync.prefetch_descriptor(output[0])


@cute.jit
def sync_cluster(layouts: cutlass.Constexpr) -> None:
    """Wait for all threads of the cluster, or of the CTA where it is alone."""
    if cutlass.const_expr(layouts.cluster_size > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
