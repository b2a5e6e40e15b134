"""Shared memory and barriers of one CTA: what is allocated, and who arrives how often.

ring    full: 1 arrival (expect_tx) and the bytes of one slot; empty: 8 consumer warps of each CTA
        that shares the activations
sums    full: 1 arrival (expect_tx) and the bytes of all partial sums; empty: 8 consumer warps of
        each pair that has a part of K
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int8, Int64, Uint8
from cutlass.memory import SmemAllocator

from halfbyte.device.ring_position import Ring
from halfbyte.device.scaled_product import FLOAT_TYPES
from halfbyte.device.swizzled_box import make_box_tensor
from halfbyte.kernels.gemm_w4_wgmma.config import (
    CHUNK_RANKS,
    CONSUMER_WARPGROUPS,
    CONSUMER_WARPS,
    ROW_BYTES,
    SWIZZLE_ALIGN_BYTES,
    WgmmaGemmConfig,
    plan_storage,
)

CHUNK_ROW_BYTES = 2 * CHUNK_RANKS


@dataclass(frozen=True)
class SharedBuffers:
    """Shared memory of a CTA.

    Attributes:
        act, weights: pointers to the ring's slots, bytes.
        output: pointer to the output staging, bytes; None without.
        token_scales: float32 [warpgroup, tokens], None without.
        group_scales: float32 [warpgroup, buffer, group, tokens], None without.
        barriers: pointer to the ring's mbarriers.
        exchange: pointer to partial sums of the cluster, and to their mbarriers; None without.
    """

    act: Any
    weights: Any
    output: Any
    token_scales: Any
    group_scales: Any
    barriers: Any
    exchange: tuple[Any, Any] | None


def act_type(config: WgmmaGemmConfig) -> Any:
    """Return the element type of the activations."""
    if config.act_bytes == 2:
        return Float16
    return Float8E4M3FN if config.mode == "fp8" else Int8


def act_box(config: WgmmaGemmConfig) -> tuple[int, int]:
    """Return (tokens, columns) of one TMA box of activations: a CTA's share of a slot's rows."""
    return config.tokens // config.cluster, ROW_BYTES // config.act_bytes


def allocate_buffers(config: WgmmaGemmConfig) -> SharedBuffers:
    """Allocate what the budget lists."""
    memory, storage = SmemAllocator(), plan_storage(config)

    def allocate(num_bytes: int, alignment: int) -> Any:
        return memory.allocate_array(Uint8, num_bytes, byte_alignment=alignment)

    act = allocate(storage.num_stages * storage.act_slot_bytes, SWIZZLE_ALIGN_BYTES)
    output = None
    if storage.output_bytes:
        output = allocate(storage.output_bytes, SWIZZLE_ALIGN_BYTES)
    weights = allocate(storage.num_stages * storage.weight_slot_bytes, 128)
    token_scales = group_scales = exchange = None
    if storage.token_scale_bytes:
        token_scales = memory.allocate_array(
            Float32, CONSUMER_WARPGROUPS * config.tokens, byte_alignment=16
        )
    if storage.group_scale_bytes:
        group_scales = allocate(storage.group_scale_bytes, 16)
    barriers = memory.allocate_array(Int64, 2 * storage.num_stages)
    if storage.exchange_bytes:
        sums = allocate(storage.exchange_bytes, 16)
        exchange = sums, memory.allocate_array(Int64, 2 * config.pairs)
    return SharedBuffers(act, weights, output, token_scales, group_scales, barriers, exchange)


def make_ring(config: WgmmaGemmConfig, buffers: SharedBuffers) -> Ring:
    """Return the ring of slots."""
    return Ring(buffers.barriers, config.num_slots)


def make_exchange_ring(config: WgmmaGemmConfig, buffers: SharedBuffers) -> Ring:
    """Return the slots for partial sums, one of each pair of consumer warpgroups."""
    assert buffers.exchange is not None
    return Ring(buffers.exchange[1], config.pairs)


def init_rings(config: WgmmaGemmConfig, buffers: SharedBuffers) -> None:
    """Initialise the barriers with the arrivals of the table above; one thread calls it."""
    make_ring(config, buffers).init(1, CONSUMER_WARPS * config.cluster)
    if buffers.exchange is not None:
        make_exchange_ring(config, buffers).init(1, CONSUMER_WARPS * config.num_parties)


def view_act_boxes(config: WgmmaGemmConfig, buffers: SharedBuffers) -> Any:
    """Return the boxes of all slots, (tokens, columns, (sharer, box of a slot, slot))."""
    rows = config.tokens // config.cluster
    storage = plan_storage(config)
    box_bytes = rows * ROW_BYTES
    boxes = storage.act_slot_bytes // (config.tokens * ROW_BYTES)
    places = cute.make_layout(
        (config.cluster, boxes, config.num_slots),
        stride=(box_bytes, config.tokens * ROW_BYTES, storage.act_slot_bytes),
    )
    return make_box_tensor(buffers.act, act_type(config), (rows, ROW_BYTES), places)


def view_chunk_boxes(config: WgmmaGemmConfig, buffers: SharedBuffers) -> Any:
    """Return the low-rank activations of all slots, (tokens, ranks, (sharer, slot))."""
    rows = config.tokens // config.cluster
    places = cute.make_layout(
        (config.cluster, config.num_slots),
        stride=(rows * CHUNK_ROW_BYTES, plan_storage(config).act_slot_bytes),
    )
    assert config.lora_dtype is not None
    element = FLOAT_TYPES[config.lora_dtype]
    return make_box_tensor(buffers.act, element, (rows, CHUNK_ROW_BYTES), places)


def view_output_boxes(config: WgmmaGemmConfig, buffers: SharedBuffers) -> Any:
    """Return the output staging, (tokens, channels, (buffer, warpgroup))."""
    storage = plan_storage(config)
    places = cute.make_layout(
        (storage.num_chunk_buffers, CONSUMER_WARPGROUPS),
        stride=(storage.chunk_bytes, storage.num_chunk_buffers * storage.chunk_bytes),
    )
    element = FLOAT_TYPES[config.out_dtype]
    return make_box_tensor(buffers.output, element, (storage.chunk_tokens, ROW_BYTES), places)
