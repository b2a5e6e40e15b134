"""Which rows and columns a CTA has, and where everything lies; every role gets one record of it."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64

from halfbyte.device.ring_position import Ring
from halfbyte.device.traced_record import TracedRecord
from halfbyte.kernels.quantize_act_lora.tile_load import Matrix
from halfbyte.kernels.quantize_act_wgmma.config import BLOCK_K


@dataclass(frozen=True)
class Rows(TracedRecord):
    """The rows of a cluster and of this CTA.

    Attributes:
        first, count: of the cluster: multiplied by this CTA's slice of K.
        own, own_count: from the cluster's first row on: quantized by this CTA, which also adds up
            their sums.
        share: rows of every CTA of the cluster, but the last ones.
    """

    first: Int32
    count: Int32
    own: Int32
    own_count: Int32
    share: Int32


def share_rows(rows: Int32, clusters: Int32, cluster: Int32, rank: Int32, cluster_k: int) -> Rows:
    """Return the rows of one of so many clusters, and of CTA `rank` of it."""
    most = (rows + clusters - 1) // clusters
    first = cluster * most
    count = _clamp(rows - first, most)
    share = (most + (cluster_k - 1)) // cluster_k
    own = rank * share
    return Rows(first, count, own, _clamp(count - own, share), share)


def _clamp(value: Int32, most: Int32) -> Int32:
    value = cutlass.select_(value < most, value, most)
    return Int32(cutlass.select_(value < 0, Int32(0), value))


@dataclass(frozen=True)
class Blocks(TracedRecord):
    """This CTA's slice of K, in blocks of 64 columns."""

    first: Int32
    count: Int32


def share_blocks(columns: Int32, rank: Int32, cluster_k: int) -> Blocks:
    """Return the slice of CTA `rank`; the last ones may have fewer blocks, or none."""
    total = (columns + (BLOCK_K - 1)) // BLOCK_K
    most = (total + (cluster_k - 1)) // cluster_k
    first = rank * most
    return Blocks(first, _clamp(total - first, most))


@dataclass(frozen=True)
class Outputs(TracedRecord):
    """Addresses of what is written, None for what the configuration does not have.

    Attributes:
        act, act_pitch: of row 0; bytes from one row to the next.
        act_columns: K_pad.
        token_scale: float32 [M].
        group_scale, group_pitch: float16 [M, groups]; elements from one row to the next.
        lora_act, lora_pitch: of row 0 at this cluster's first rank; elements from row to row.
        lora_columns: ranks of this cluster that lora_act has.
    """

    act: Int64
    act_pitch: Int64
    act_columns: Int32
    token_scale: Any
    group_scale: Any
    group_pitch: Any
    lora_act: Any
    lora_pitch: Any
    lora_columns: Any


@dataclass(frozen=True)
class Work(TracedRecord):
    """What all roles of a CTA know.

    Attributes:
        rows, blocks: this CTA's part.
        x: by address.
        smooth: address of float32 [K], None without.
        is_writing: whether this cluster writes act, and not only its ranks of lora_act.
        rank: of this CTA in its cluster.
        ring: of blocks of x and lora_down, None without rank; full: 1 arrival and the bytes of a
            slot, empty: one thread of each product warpgroup.
        shared: shared address of all storage.
        outputs: what is written.
        factor: the power of two that sums are multiplied by.
        global_scale: what sums are divided by, None for none.
        config: the configuration.
    """

    rows: Rows
    blocks: Blocks
    x: Matrix
    smooth: Any
    is_writing: Boolean
    rank: Int32
    ring: Ring | None
    shared: Int32
    outputs: Outputs
    factor: Float32
    global_scale: Any
    config: cutlass.Constexpr

    def slot_address(self, index: Int32) -> Int32:
        """Return the shared address of a slot: lora_down, then x."""
        return self.shared + index * self.config.slot_bytes
