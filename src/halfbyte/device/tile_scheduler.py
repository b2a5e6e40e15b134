"""Which output tile a CTA works on next: two schedulers behind one interface.

    work = scheduler.start(...)
    while work.is_valid:
        ... work.tile_m, work.tile_n ...
        work = work.next()

`StaticWork` strides over the tiles: as many clusters are launched as fit on the GPU. `ClcWork`
launches a cluster for each tile; a running one takes over the tile of one that has not started yet
(cluster launch control, PTX ISA clusterlaunchcontrol.try_cancel), so that late SMs do less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from halfbyte.device.ring_position import Ring, RingPosition
from halfbyte.device.traced_record import TracedRecord

CLC_STAGES = 2
CLC_RESPONSE_BYTES = 16


@dataclass(frozen=True)
class Raster(TracedRecord):
    """The order of tiles: `group` tile rows at a time, column by column within them.

    Tiles that run at the same time then share rows of A and columns of B in L2.

    Attributes:
        tiles_m, tiles_n: number of tiles.
        group: tile rows walked together.
    """

    tiles_m: Int32
    tiles_n: Int32
    group: cutlass.Constexpr

    @property
    def num_tiles(self) -> Int32:
        """Number of tiles."""
        return self.tiles_m * self.tiles_n

    def place(self, index: Int32) -> tuple[Int32, Int32]:
        """Return (tile_m, tile_n) of tile number `index`."""
        per_group = self.tiles_n * self.group
        group_index = index // per_group
        within = index - group_index * per_group
        first_m = group_index * self.group
        rows = cutlass.min(self.tiles_m - first_m, self.group)
        tile_n = within // rows
        return first_m + within - tile_n * rows, tile_n


class StaticWork:
    """A tile of a persistent grid: tile number, and the stride to the next one.

    Attributes:
        raster: the order of tiles.
        index: tile number.
        stride: number of clusters.
    """

    def __init__(self, raster: Raster, index: Int32, stride: Int32) -> None:
        """Stand at tile `index`."""
        self.raster = raster
        self.index = index
        self.stride = stride

    @property
    def is_valid(self) -> Boolean:
        """Whether there is such a tile."""
        return self.index < self.raster.num_tiles

    @property
    def place(self) -> tuple[Int32, Int32]:
        """(tile_m, tile_n)."""
        return self.raster.place(self.index)

    def next(self) -> "StaticWork":
        """Return this cluster's next tile."""
        return StaticWork(self.raster, self.index + self.stride, self.stride)

    def __extract_mlir_values__(self) -> list[Any]:
        """Return the values that a dynamic loop carries."""
        return [self.index.ir_value()]

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> "StaticWork":
        """Return the tile of those values."""
        return StaticWork(self.raster, Int32(values[0]), self.stride)


@dataclass(frozen=True)
class ClcMailbox(TracedRecord):
    """Where responses of cluster launch control arrive, in the shared memory of each CTA.

    Attributes:
        ring: full: the response has landed; empty: all readers of the cluster have read it.
        responses: pointer to CLC_STAGES responses, Int128.
        ctas_per_cluster: CTAs of one cluster, all along x.
    """

    ring: Ring
    responses: Any
    ctas_per_cluster: cutlass.Constexpr

    @cute.jit
    def request(self, position: RingPosition) -> None:
        """Ask for another tile; one warp of the cluster's first CTA calls it.

        The response is written to every CTA of the cluster, and counts 16 bytes at its barrier.
        """
        self.ring.wait_empty(position)
        lane = cute.arch.lane_idx()
        if lane < self.ctas_per_cluster:
            cute.arch.mbarrier_arrive_and_expect_tx(
                self.ring.full(position), CLC_RESPONSE_BYTES, lane
            )
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(self.ring.full(position), self.responses + position.index)

    @cute.jit
    def read(self, position: RingPosition) -> tuple[Int32, Int32]:
        """Return (tile number, 1 or 0 for whether there is one); a whole warp calls it."""
        self.ring.wait_full(position)
        x, _, _, is_valid = cute.arch.clc_response(self.responses + position.index)
        # The next response is written by the async proxy: order this read before it.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ring.empty(position), 0)
        return x // self.ctas_per_cluster, is_valid


class ClcWork:
    """A tile that was handed to this cluster.

    Attributes:
        raster: the order of tiles.
        mailbox: where the next one arrives.
        index: tile number.
        valid: 1 where there is such a tile, else 0.
        position: of this warp in the mailbox.
    """

    def __init__(
        self, raster: Raster, mailbox: ClcMailbox, index: Int32, valid: Int32, position: Any
    ) -> None:
        """Stand at tile `index`."""
        self.raster = raster
        self.mailbox = mailbox
        self.index = index
        self.valid = valid
        self.position = position

    @property
    def is_valid(self) -> Boolean:
        """Whether there is such a tile."""
        return self.valid != 0

    @property
    def place(self) -> tuple[Int32, Int32]:
        """(tile_m, tile_n)."""
        return self.raster.place(self.index)

    def next(self) -> "ClcWork":
        """Return the next tile, once its number has arrived."""
        index, valid = self.mailbox.read(self.position)
        return ClcWork(self.raster, self.mailbox, index, valid, self.position.next())

    def __extract_mlir_values__(self) -> list[Any]:
        """Return the values that a dynamic loop carries."""
        carried = self.position.__extract_mlir_values__()
        return [self.index.ir_value(), self.valid.ir_value(), *carried]

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> "ClcWork":
        """Return the tile of those values."""
        position = self.position.__new_from_mlir_values__(values[2:])
        index, valid = Int32(values[0]), Int32(values[1])
        return ClcWork(self.raster, self.mailbox, index, valid, position)


@dataclass(frozen=True)
class TileScheduler(TracedRecord):
    """How the warps of a CTA come by their tiles.

    Attributes:
        raster: the order of tiles.
        cluster: this cluster's number in the grid.
        num_clusters: clusters launched.
        mailbox: of cluster launch control; None for the static scheduler.
    """

    raster: Raster
    cluster: Int32
    num_clusters: Int32
    mailbox: ClcMailbox | None = None

    def start(self) -> StaticWork | ClcWork:
        """Return this cluster's first tile."""
        if self.mailbox is None:
            return StaticWork(self.raster, self.cluster, self.num_clusters)
        position = RingPosition.consumer(CLC_STAGES)
        return ClcWork(self.raster, self.mailbox, self.cluster, Int32(1), position)
