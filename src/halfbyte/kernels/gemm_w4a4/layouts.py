"""Layouts of one configuration: MMAs, ring slots, TMA descriptors, and how a CTA's loads are cut.

Sizes are taken from the layouts themselves and compared with the budget of `config.plan_storage`: a
difference stops the compilation with both figures.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float4E2M1FN, Int16
from cutlass.cute.nvgpu import cpasync, make_tiled_tma_atom_A, make_tiled_tma_atom_B

from halfbyte.device.operand_load import (
    BlockLoad,
    TmaOperand,
    make_code_tensor,
    make_scale_tensor,
    partition_block_load,
)
from halfbyte.device.scaled_product import (
    FLOAT_TYPES,
    SCALE_TYPES,
    MmaShape,
    check_same_accumulator,
    make_low_rank_mma,
    make_operand_layouts,
    make_scale_layouts,
    make_scaled_mma,
    with_slots,
)
from halfbyte.device.traced_record import TracedRecord
from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    OWN_RING_STAGES,
    QUANTIZED_COLUMNS,
    GemmConfig,
    plan_storage,
)


class Operands(NamedTuple):
    """TMA descriptors of all loads; the low-rank ones are None for rank 0."""

    a: TmaOperand
    b: TmaOperand
    sfa: TmaOperand
    sfb: TmaOperand
    lora_a: TmaOperand | None
    lora_b: TmaOperand | None


class TileLayouts(TracedRecord):
    """Everything that a configuration fixes at trace time; made anew on host and device.

    Attributes:
        config, storage: the configuration and its budget.
        shape: of the MMAs. tiler: (m, n, codes of K) of a block. chunk_tiler: of a chunk.
        a, b, sfa, sfb: shared memory layouts with a slot mode.
        block_bytes, chunk_bytes: what a full barrier counts for a block or chunk, in all CTAs of
            the MMA.
    """

    def __init__(self, config: GemmConfig) -> None:
        """Make all layouts; raise FormatError where they differ from the budget."""
        self.config = config
        self.storage = plan_storage(config)
        tile = config.tile
        self.shape = MmaShape(tile.m, tile.n, tile.num_ctas)
        self.scale_type, self.block_size = SCALE_TYPES[config.block_format]
        self.out_type = FLOAT_TYPES[config.out_dtype]
        self.tiler = (tile.m, tile.n, BLOCK_K)
        stages = self.storage.num_stages
        mma = self.make_scaled_mma()
        self.slot_a, self.slot_b = make_operand_layouts(mma, self.tiler, Float4E2M1FN)
        self.a = sm100.make_smem_layout_a(mma, self.tiler, Float4E2M1FN, stages)
        self.b = sm100.make_smem_layout_b(mma, self.tiler, Float4E2M1FN, stages)
        self.sfa, self.sfb = make_scale_layouts(mma, self.tiler, self.block_size, stages)
        self._check_budget(self.storage.operand_bytes, self._measure_block())
        self.block_bytes = sum(self._measure_block()) * tile.num_ctas
        self.chunk_bytes = 0
        if config.low_rank is not None:
            self._make_low_rank_layouts()

    def _make_low_rank_layouts(self) -> None:
        low_rank, tile = self.config.low_rank, self.config.tile
        self.low_rank_type = FLOAT_TYPES[low_rank.dtype]
        self.chunk_tiler = (tile.m, tile.n, low_rank.chunk)
        mma = self.make_low_rank_mma()
        check_same_accumulator(self.make_scaled_mma(), mma, self.tiler[:2])
        self.chunk_a, self.chunk_b = make_operand_layouts(mma, self.chunk_tiler, self.low_rank_type)
        measured = [
            cute.size_in_bytes(self.low_rank_type, layout)
            for layout in (self.chunk_a, self.chunk_b)
        ]
        self._check_budget(self.storage.low_rank_bytes, measured)
        self.chunk_bytes = sum(measured) * tile.num_ctas

    def _measure_block(self) -> list[int]:
        def one(layout: Any) -> Any:
            return cute.filter_zeros(cute.slice_(layout, (None, None, None, 0)))

        return [
            cute.size_in_bytes(Float4E2M1FN, self.slot_a),
            cute.size_in_bytes(Float4E2M1FN, self.slot_b),
            cute.size_in_bytes(self.scale_type, one(self.sfa)),
            cute.size_in_bytes(self.scale_type, one(self.sfb)),
        ]

    @staticmethod
    def _check_budget(declared: tuple[tuple[str, int], ...], measured: list[int]) -> None:
        for (name, budget), size in zip(declared, measured, strict=True):
            if budget != size:
                raise FormatError(
                    f"budget of {name}: declared {budget} bytes, its layout takes {size}"
                )

    def make_scaled_mma(self) -> Any:
        """Return the 4-bit MMA; a fresh value, so that no flag of it outlives one use."""
        return make_scaled_mma(self.shape, self.config.block_format)

    def make_low_rank_mma(self) -> Any:
        """Return the low-rank MMA, likewise fresh."""
        assert self.config.low_rank is not None
        return make_low_rank_mma(self.shape, self.config.low_rank.dtype)

    @property
    def has_own_ring(self) -> bool:
        """Whether low-rank chunks have a ring of their own."""
        low_rank = self.config.low_rank
        return low_rank is not None and low_rank.placement == "own_ring"

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.config.tile.num_ctas * self.config.tile.num_splits

    @property
    def output_columns(self) -> int:
        """Columns that the epilogue finishes at a time: a staging slot where there is one."""
        return self.storage.output_slot_bytes // (32 * 2) or QUANTIZED_COLUMNS

    @property
    def sfa_columns(self) -> int:
        """Tensor memory columns of A's block scales; B's follow."""
        return 128 // 32 * (BLOCK_K // (4 * self.block_size))

    def view_low_rank(self, memory: Any, a: Any, b: Any) -> tuple[Any, Any]:
        """Return shared memory of the low-rank chunks: the slots of `a` and `b` seen as 16-bit.

        With a ring of their own it is allocated from `memory`; (None, None) for rank 0.
        """
        if self.config.low_rank is None:
            return None, None
        views = []
        for slots, layout, slot_layout in (
            (a, self.chunk_a, self.slot_a),
            (b, self.chunk_b, self.slot_b),
        ):
            if self.has_own_ring:
                size = cute.size_in_bytes(self.low_rank_type, layout)
                outer = with_slots(layout, OWN_RING_STAGES, size // 2)
                view = memory.allocate_tensor(
                    self.low_rank_type, outer, byte_alignment=1024, swizzle=layout.inner
                )
            else:
                slot_elements = cute.size_in_bytes(Float4E2M1FN, slot_layout) // 2
                outer = with_slots(layout, self.storage.num_stages, slot_elements)
                pointer = cute.recast_ptr(slots.iterator, layout.inner, dtype=self.low_rank_type)
                view = cute.make_tensor(pointer, outer)
            views.append(view)
        return views[0], views[1]

    def make_operands(self, tensors: Any) -> Operands:
        """Return the TMA descriptors of a launch.

        Args:
            tensors: record with a_codes, a_sf, b_codes, b_sf, lora_a, lora_b of the MMA's A and B.
        """
        load = cpasync.CopyBulkTensorTileG2SOp(self.shape.group)
        main = _Descriptors(self, load, self.make_scaled_mma(), self.tiler)
        sfb = _Descriptors(self, self.sfb_load(), self.make_sfb_mma(), self.sfb_tiler)
        a, b = (
            make_code_tensor(codes, Float4E2M1FN) for codes in (tensors.a_codes, tensors.b_codes)
        )
        scales_a, scales_b = (
            make_scale_tensor(scales, codes.shape, self.block_size, self.scale_type)
            for scales, codes in ((tensors.a_sf, a), (tensors.b_sf, b))
        )
        lora_a = lora_b = None
        if self.config.low_rank is not None:
            chunks = _Descriptors(self, load, self.make_low_rank_mma(), self.chunk_tiler)
            lora_a = chunks.make("A", tensors.lora_a, self.chunk_a)
            lora_b = chunks.make("B", tensors.lora_b, self.chunk_b)
        return Operands(
            main.make("A", a, self.slot_a),
            main.make("B", b, self.slot_b),
            main.make("A", scales_a, self.sfa, Int16),
            sfb.make("B", scales_b, self.sfb, Int16),
            lora_a,
            lora_b,
        )

    def sfb_load(self) -> Any:
        """Return how B's scales are loaded: each CTA of a pair loads half for both."""
        if self.shape.num_ctas == 2:
            return cpasync.CopyBulkTensorTileG2SMulticastOp(self.shape.group)
        return cpasync.CopyBulkTensorTileG2SOp(self.shape.group)

    @property
    def sfb_tiler(self) -> tuple[int, int, int]:
        """(m, n, k) of the part of B whose scales a CTA holds: all columns, in whole tiles."""
        return (128, -(-self.shape.n // 128) * 128, BLOCK_K)

    def make_sfb_mma(self) -> Any:
        """Return the MMA that cuts B's scales: one CTA's, since both CTAs need all of them."""
        return make_scaled_mma(MmaShape(128, self.sfb_tiler[1], 1), self.config.block_format)

    def cluster_layout(self, mma: Any) -> Any:
        """Return the layout of the CTAs of one MMA pair as `mma` groups them, (V, M, N, K)."""
        return cute.tiled_divide(cute.make_layout((self.shape.num_ctas, 1, 1)), (mma.thr_id.shape,))


class _Descriptors(NamedTuple):
    """What the descriptors of one MMA's operands have in common."""

    layouts: TileLayouts
    load: Any
    mma: Any
    tiler: tuple[int, int, int]

    def make(self, side: str, tensor: Any, layout: Any, internal_type: Any = None) -> TmaOperand:
        """Return the descriptor of operand "A" or "B" for one slot of `layout`.

        Block scales are loaded as 16-bit words (`internal_type`): a box has at most 256 elements a
        side.
        """
        make = make_tiled_tma_atom_A if side == "A" else make_tiled_tma_atom_B
        slot = cute.slice_(layout, (None, None, None, 0))
        cluster = self.layouts.cluster_layout(self.mma).shape
        atom, coordinates = make(
            self.load, tensor, slot, self.tiler, self.mma, cluster, internal_type=internal_type
        )
        return TmaOperand(atom, coordinates)


def partition_loads(
    layouts: TileLayouts, operands: Operands, buffers: Any, rank: Any
) -> tuple[tuple[BlockLoad, ...], tuple[BlockLoad, ...]]:
    """Return (loads of a main block, loads of a chunk) of the CTA `rank` of a pair."""
    mma, sfb_mma = layouts.make_scaled_mma(), layouts.make_sfb_mma()
    tiler, sfb_tiler = layouts.tiler, layouts.sfb_tiler
    alone = cute.make_layout(1)
    main = [
        _partition(mma.get_slice(rank), "A", operands.a, tiler, buffers.a, (0, alone)),
        _partition(mma.get_slice(rank), "B", operands.b, tiler, buffers.b, (0, alone)),
        _partition(mma.get_slice(rank), "A", operands.sfa, tiler, buffers.sfa, (0, alone)),
    ]
    cluster = layouts.cluster_layout(sfb_mma)
    place = cluster.get_flat_coord(rank)
    share = cute.make_layout(cute.slice_(cluster, (0, None, 0, 0)).shape)
    sfb = _partition(
        sfb_mma.get_slice(0), "B", operands.sfb, sfb_tiler, buffers.sfb, (place[1], share)
    )
    if layouts.shape.num_ctas == 2:
        mask = cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=1)
        sfb = BlockLoad(sfb.atom, sfb.source, sfb.target, mask)
    main.append(sfb)
    if layouts.config.low_rank is None:
        return tuple(main), ()
    chunk_mma = layouts.make_low_rank_mma().get_slice(rank)
    chunks = (
        _partition(
            chunk_mma, "A", operands.lora_a, layouts.chunk_tiler, buffers.lora_a, (0, alone)
        ),
        _partition(
            chunk_mma, "B", operands.lora_b, layouts.chunk_tiler, buffers.lora_b, (0, alone)
        ),
    )
    return tuple(main), chunks


def _partition(
    thread_mma: Any, side: str, operand: Any, tiler: Any, target: Any, share: tuple[Any, Any]
) -> BlockLoad:
    """Cut an operand's coordinates into tiles, take this CTA's part, and pair it with the slots."""
    m, n, k = tiler
    tiles = cute.local_tile(operand.tensor, (m if side == "A" else n, k), (None, None))
    part = thread_mma.partition_A(tiles) if side == "A" else thread_mma.partition_B(tiles)
    return partition_block_load(operand, part, target, *share)
