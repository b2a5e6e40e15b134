"""Everything that is decided before a GEMM is compiled, as frozen records, and what is legal.

    request -> GemmConfig (tile, low-rank placement, epilogue, scheduler) -> StorageConfig

`check_legal` is the one place that knows which configurations the hardware and the kernel have;
the chooser, the compiler, the budget table and the tests all call it. Sizes count logical
elements, bytes say so. Sources: PTX ISA (tcgen05 shapes, tensor memory), arch/gpus.py (shared
memory).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from halfbyte.arch.gpus import GPUS, Gpu
from halfbyte.errors import FormatError
from halfbyte.formats.activation import get_activation_format

OUT_DTYPES: Final = ("float16", "bfloat16")
ACTIVATIONS: Final = ("none", "gelu", "gelu_tanh", "silu")
OUTPUTS: Final = ("dense", "nvfp4", "both")
# What the epilogue can quantize y with for the next layer: nothing that needs all of y first.
NEXT_ACTIVATIONS: Final = ("nvfp4_one_level", "nvfp4_nunchaku", "nvfp4_static")
BLOCK_SIZES: Final = {"nvfp4": 16, "mxfp4": 32}  # codes per block scale: E4M3 and E8M0
TARGETS: Final = {"sm_100a": "b200", "sm_103a": "b300"}

BLOCK_K: Final = 256  # codes of K per ring slot: 128 bytes a row, one swizzle span, one TMA box
CHUNK_BYTES: Final = 128  # a low-rank chunk is as wide as a main block, in bytes
ROWS_PER_CTA: Final = 128  # tensor memory lanes
SF_ATOM_ROWS: Final = 128  # rows of one 512-byte tile of block scales
EPILOGUE_WARPS: Final = 4
FEW_TOKENS: Final = (16, 32, 64)  # of a swapped tile; CuTe DSL has no block-scaled MMA below 16
SPLITS: Final = (1, 2, 4, 8)  # CTAs of a portable cluster
BARRIER_BYTES: Final = 1024  # barriers, tensor memory address, scheduler slots: one page
TMEM_COLUMNS: Final = 512
ALIGN_BYTES: Final = 1024  # of a 128-byte-swizzled buffer


@dataclass(frozen=True)
class TileConfig:
    """One output tile and who works on it.

    Attributes:
        m: rows of the product per tile: 128 with one CTA, 256 with two.
        n: columns per tile.
        num_ctas: CTAs that share one MMA (1 or 2).
        swap: the weight is the MMA's A operand and the activation its B: tiles of the transposed
            product, m counts output features and n tokens. For few tokens.
        num_splits: CTAs of a cluster that share one tile's K; their sums are added in order.
    """

    m: int
    n: int
    num_ctas: int
    swap: bool = False
    num_splits: int = 1

    def __str__(self) -> str:
        """Return e.g. `256x256x2cta` or `128x32x1cta-swap-split4`."""
        swap = "-swap" if self.swap else ""
        splits = f"-split{self.num_splits}" if self.num_splits > 1 else ""
        return f"{self.m}x{self.n}x{self.num_ctas}cta{swap}{splits}"


LARGE_TILES: Final = (
    TileConfig(256, 256, 2),
    TileConfig(256, 128, 2),
    TileConfig(128, 256, 1),
    TileConfig(128, 128, 1),
)


@dataclass(frozen=True)
class LowRankConfig:
    """The low-rank branch inside the GEMM.

    Attributes:
        dtype: of lora_act and lora_up, "float16" or "bfloat16".
        chunk: rank columns of one ring slot: 64, or 32 for small ranks.
        placement: "tail": all chunks after the last main block; "spread": chunks between main
            blocks at equal distances; "own_ring": a ring of its own, two slots, loaded ahead.
    """

    dtype: str
    chunk: int = 64
    placement: Literal["tail", "spread", "own_ring"] = "tail"


@dataclass(frozen=True)
class EpilogueConfig:
    """What happens to a finished tile, in this order.

    Attributes:
        has_column_scale: multiply by column_scale[n].
        has_alpha: multiply by the device scalar alpha (a dynamic global scale).
        has_bias: add bias[n].
        activation: applied to the sum, in float32.
        output: "dense" writes y; "nvfp4" writes it as codes and swizzled block scales for the next
            layer; "both" does both.
        has_next_smooth: y is divided by next_smooth[n] before it is quantized.
        next_activation: the next layer's activation format, one of NEXT_ACTIVATIONS; without a
            meaning for "dense".
    """

    has_column_scale: bool = False
    has_alpha: bool = False
    has_bias: bool = False
    activation: str = "none"
    output: Literal["dense", "nvfp4", "both"] = "dense"
    has_next_smooth: bool = False
    next_activation: str = "nvfp4_one_level"

    @property
    def has_vectors(self) -> bool:
        """Whether per-column vectors are staged in shared memory."""
        return self.has_column_scale or self.has_alpha or self.has_bias or self.has_next_smooth

    @property
    def num_vectors(self) -> int:
        """Staged vectors: scale, bias, smooth, and smooth's reciprocals."""
        if not self.has_vectors:
            return 0
        return 4 if self.has_next_smooth else 3

    @property
    def has_dense_output(self) -> bool:
        """Whether y is written."""
        return self.output in ("dense", "both")

    @property
    def has_quantized_output(self) -> bool:
        """Whether y is quantized for the next layer."""
        return self.output in ("nvfp4", "both")

    @property
    def has_next_global_scale(self) -> bool:
        """Whether the next layer's activations have a calibrated global scale."""
        if not self.has_quantized_output:
            return False
        return get_activation_format(self.next_activation).global_scale == "static"


@dataclass(frozen=True)
class GemmConfig:
    """One compiled GEMM: shapes stay dynamic, everything here is fixed.

    Attributes:
        target: "sm_100a" or "sm_103a".
        block_format: "nvfp4" (E4M3 scales, 16 codes) or "mxfp4" (E8M0 scales, 32 codes).
        out_dtype: of y.
        tile, low_rank, epilogue: see their records; low_rank None for rank 0.
        scheduler: "static" (persistent grid) or "clc" (cluster launch control).
        raster_group: tile rows that are walked together, for reuse in L2.
        use_pdl: programmatic dependent launch: wait for the previous kernel inside this one.
    """

    target: str
    block_format: str
    out_dtype: str
    tile: TileConfig
    low_rank: LowRankConfig | None = None
    epilogue: EpilogueConfig = EpilogueConfig()
    scheduler: Literal["static", "clc"] = "static"
    raster_group: int = 8
    use_pdl: bool = False

    @property
    def gpu(self) -> Gpu:
        """The GPU record of the target."""
        return GPUS[TARGETS[self.target]]

    @property
    def block_size(self) -> int:
        """Codes per block scale."""
        return BLOCK_SIZES[self.block_format]


@dataclass(frozen=True)
class StorageConfig:
    """Shared memory of one CTA and tensor memory of one SM, in bytes and columns.

    Attributes:
        operand_bytes: (name, bytes of one ring slot) of each operand of a main block.
        low_rank_bytes: (name, bytes of one chunk); they share the slots unless placed apart.
        slot_bytes: of one ring slot.
        num_stages: ring slots.
        own_ring_bytes: of the low-rank branch's own ring, 0 where it rides the main one.
        output_slot_bytes: of one output staging slot of one epilogue warp.
        num_output_slots: staging slots of each epilogue warp.
        vector_bytes: per-column factors of one tile.
        exchange_bytes: partial sums that other CTAs of a split read.
        barrier_bytes: barriers, scheduler and addresses.
        capacity_bytes: what a CTA can have.
        accumulator_columns, scale_columns: tensor memory.
        accumulator_offsets: first column of each accumulator buffer.
        overlap_columns: columns that the two accumulator buffers share.
    """

    operand_bytes: tuple[tuple[str, int], ...]
    low_rank_bytes: tuple[tuple[str, int], ...]
    slot_bytes: int
    num_stages: int
    own_ring_bytes: int
    output_slot_bytes: int
    num_output_slots: int
    vector_bytes: int
    exchange_bytes: int
    barrier_bytes: int
    capacity_bytes: int
    accumulator_columns: int
    scale_columns: int
    accumulator_offsets: tuple[int, int]
    overlap_columns: int

    @property
    def output_bytes(self) -> int:
        """Bytes of the output staging of all epilogue warps."""
        return EPILOGUE_WARPS * self.num_output_slots * self.output_slot_bytes

    @property
    def used_bytes(self) -> int:
        """Shared memory of one CTA."""
        fixed = self.barrier_bytes + self.vector_bytes + self.exchange_bytes + self.own_ring_bytes
        return fixed + self.output_bytes + self.num_stages * self.slot_bytes

    @property
    def slack_bytes(self) -> int:
        """Shared memory left over."""
        return self.capacity_bytes - self.used_bytes


def list_operand_bytes(config: GemmConfig) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) of what one CTA holds of one main block.

    Block scales of B are needed whole by both CTAs of a pair, everything else is halved.
    """
    tile = config.tile
    rows_b = tile.n // tile.num_ctas
    sf_row_bytes = BLOCK_K // config.block_size
    sf_rows_b = -(-tile.n // SF_ATOM_ROWS) * SF_ATOM_ROWS
    return (
        ("a", ROWS_PER_CTA * BLOCK_K // 2),
        ("b", rows_b * BLOCK_K // 2),
        ("sfa", ROWS_PER_CTA * sf_row_bytes),
        ("sfb", sf_rows_b * sf_row_bytes),
    )


def list_low_rank_bytes(config: GemmConfig) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) of what one CTA holds of one low-rank chunk; () for rank 0."""
    if config.low_rank is None:
        return ()
    row_bytes = config.low_rank.chunk * 2
    rows_b = config.tile.n // config.tile.num_ctas
    return (("lora_a", ROWS_PER_CTA * row_bytes), ("lora_b", rows_b * row_bytes))


OWN_RING_STAGES: Final = 2


def plan_storage(config: GemmConfig) -> StorageConfig:
    """Return the shared and tensor memory of a configuration.

    As many ring slots as fit are taken, after the output staging: the widest store that leaves
    room for the stages that `_wanted_stages` asks for. Raises FormatError with the arithmetic where
    not even two slots fit.
    """
    operands = list_operand_bytes(config)
    low_rank = list_low_rank_bytes(config)
    slot = sum(size for _, size in operands)
    has_own_ring = config.low_rank is not None and config.low_rank.placement == "own_ring"
    own_ring = OWN_RING_STAGES * sum(size for _, size in low_rank) if has_own_ring else 0
    capacity = config.gpu.shared_bytes_per_cta
    vectors = 0 if config.tile.swap else 4 * config.tile.n * config.epilogue.num_vectors
    exchange = _exchange_bytes(config.tile)
    fixed = BARRIER_BYTES + vectors + exchange + own_ring
    slot_bytes, num_slots = _choose_output_slots(config, capacity - fixed, slot)
    left = capacity - fixed - EPILOGUE_WARPS * num_slots * slot_bytes
    stages = left // slot
    if stages < 2:
        raise FormatError(
            f"{config.tile}: {capacity} - {fixed} (barriers, vectors, exchange, own ring) - "
            f"{EPILOGUE_WARPS * num_slots * slot_bytes} (output staging) = {left} bytes, wanted "
            f"2 ring slots of {slot}; take a smaller tile"
        )
    accumulator, scales, offsets, overlap = _plan_tensor_memory(config)
    return StorageConfig(
        operand_bytes=operands,
        low_rank_bytes=low_rank,
        slot_bytes=slot,
        num_stages=stages,
        own_ring_bytes=own_ring,
        output_slot_bytes=slot_bytes,
        num_output_slots=num_slots,
        vector_bytes=vectors,
        exchange_bytes=exchange,
        barrier_bytes=BARRIER_BYTES,
        capacity_bytes=capacity,
        accumulator_columns=accumulator,
        scale_columns=scales,
        accumulator_offsets=offsets,
        overlap_columns=overlap,
    )


# Columns of a row that are quantized at once: their four block scales are one word of the layout.
QUANTIZED_COLUMNS: Final = 64

# Output staging of one epilogue warp, (columns, slots), widest first. 64 columns of 2 bytes are one
# 128-byte swizzle span; 32 columns halve the bytes at half the rows per TMA cycle.
_OUTPUT_CHOICES: Final = ((64, 2), (32, 3), (32, 2))


def _choose_output_slots(config: GemmConfig, room: int, slot: int) -> tuple[int, int]:
    """Return (bytes, slots) of an epilogue warp's staging, which is not to cost a ring slot."""
    if config.tile.swap:
        return 0, 0  # a thread owns an output feature: rows are written straight to global memory
    if not config.epilogue.has_dense_output:
        return 0, 0  # codes and scales go to global memory from registers
    sizes = [(32 * columns * 2, slots) for columns, slots in _OUTPUT_CHOICES]
    if config.epilogue.has_quantized_output:
        sizes = sizes[:1]  # QUANTIZED_COLUMNS wide
    smallest = EPILOGUE_WARPS * sizes[-1][0] * sizes[-1][1]
    wanted = (room - smallest) // slot
    for size, slots in sizes:
        if (room - EPILOGUE_WARPS * size * slots) // slot >= wanted:
            return size, slots
    return sizes[-1]


def _exchange_bytes(tile: TileConfig) -> int:
    return ROWS_PER_CTA * tile.n * 4 if tile.num_splits > 1 else 0


def _plan_tensor_memory(config: GemmConfig) -> tuple[int, int, tuple[int, int], int]:
    """Return (accumulator columns, scale columns, offsets of the two buffers, shared columns).

    Scales: 4 columns hold 4 scales of each of 128 rows, of A and of B. Where two accumulators of
    256 columns leave no room for the scales, the second starts early by as many columns, and the
    epilogue reads the shared ones first.
    """
    tile = config.tile
    atoms = BLOCK_K // (4 * config.block_size)
    scales = atoms * (ROWS_PER_CTA // 32 + -(-tile.n // SF_ATOM_ROWS) * SF_ATOM_ROWS // 32)
    overlap = max(0, 2 * tile.n + scales - TMEM_COLUMNS)
    return 2 * tile.n - overlap, scales, (0, tile.n - overlap), overlap


def list_problems(config: GemmConfig) -> Iterator[str]:
    """Yield one sentence for each reason why a configuration cannot be compiled."""
    tile, low_rank, epilogue = config.tile, config.low_rank, config.epilogue
    if config.target not in TARGETS:
        yield f"target {config.target!r}: tcgen05 block scaling exists on {', '.join(TARGETS)}"
    if config.block_format not in BLOCK_SIZES:
        yield (
            f"block format {config.block_format!r}: Blackwell's tensor cores scale NVFP4 and MXFP4 "
            "blocks, they have no INT4 kind; the cpu backend runs INT4"
        )
    if config.out_dtype not in OUT_DTYPES:
        yield f"out_dtype {config.out_dtype!r}: wanted one of {OUT_DTYPES}"
    if epilogue.activation not in ACTIVATIONS:
        yield f"activation {epilogue.activation!r}: wanted one of {ACTIVATIONS}"
    if tile.m != ROWS_PER_CTA * tile.num_ctas or tile.num_ctas not in (1, 2):
        yield f"tile {tile}: an MMA of one CTA has 128 rows, of two CTAs 256"
    yield from _list_tile_problems(config)
    if low_rank is not None:
        if low_rank.dtype not in OUT_DTYPES:
            yield f"low-rank dtype {low_rank.dtype!r}: wanted one of {OUT_DTYPES}"
        if low_rank.chunk not in (32, 64):
            yield f"low-rank chunk {low_rank.chunk}: 64 or 32 columns fill a swizzle span"
    yield from _list_output_problems(config)
    if config.scheduler == "clc" and tile.num_splits > 1:
        yield "a split tile is one cluster: its CTAs cannot be handed tiles one by one"


def _list_output_problems(config: GemmConfig) -> Iterator[str]:
    epilogue = config.epilogue
    if epilogue.output not in OUTPUTS:
        yield f"output {epilogue.output!r}: wanted one of {OUTPUTS}"
    if not epilogue.has_quantized_output:
        if epilogue.has_next_smooth:
            yield 'next_smooth divides what is quantized: output "dense" has no use for it'
        return
    if epilogue.next_activation == "nvfp4_dynamic":
        yield (
            "next_activation 'nvfp4_dynamic': its global scale is the largest |y| of all tiles, "
            "which the first tile does not know; write y and run quantize_act_lora on it"
        )
    elif epilogue.next_activation not in NEXT_ACTIVATIONS:
        yield f"next_activation {epilogue.next_activation!r}: wanted one of {NEXT_ACTIVATIONS}"
    if config.tile.swap:
        yield "a swapped tile has its columns in different threads: it cannot quantize its output"


def _list_tile_problems(config: GemmConfig) -> Iterator[str]:
    tile = config.tile
    if tile.swap:
        if tile.n not in FEW_TOKENS or tile.num_ctas != 1:
            yield f"tile {tile}: swapped tiles are 128 features by {FEW_TOKENS} tokens, one CTA"
        if tile.num_splits not in SPLITS:
            yield f"tile {tile}: K is split by {SPLITS}, the CTAs of a portable cluster"
    else:
        if tile.n not in (128, 256):
            yield f"tile {tile}: tiles are 128 or 256 columns wide"
        if tile.num_splits != 1:
            yield f"tile {tile}: K is split for swapped tiles only"


def check_legal(config: GemmConfig) -> None:
    """Raise FormatError with every reason why `config` cannot be compiled."""
    problems = list(list_problems(config))
    if problems:
        raise FormatError("; ".join(problems))
    plan_storage(config)
