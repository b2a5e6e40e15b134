"""The budget of one GEMM configuration as a table: bytes per operand and CTA, columns, stages."""

from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.checks.finding import CheckFinding
from halfbyte.checks.shared_budget import compare_declared
from halfbyte.checks.tensor_memory_budget import TensorBuffer
from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.choose import GemmRequest, count_resident_clusters
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    EPILOGUE_WARPS,
    OWN_RING_STAGES,
    ROWS_PER_CTA,
    TMEM_COLUMNS,
    GemmConfig,
    StorageConfig,
    plan_storage,
)

# What the MMA's operands are called outside; with swapped operands A is the weight.
_OPERANDS = ("act_codes", "weight_codes", "act_sf", "weight_sf")
_SWAPPED_OPERANDS = ("weight_codes", "act_codes", "weight_sf", "act_sf")
_CHUNKS = ("lora_act", "lora_up")


@dataclass(frozen=True)
class BudgetRow:
    """One line: `num_slots` of `slot_bytes` each, in the shared memory of one CTA.

    `shares` is what the bytes are part of already, "" where they count: a low-rank chunk lies in
    the slots of a main block.
    """

    name: str
    slot_bytes: int
    num_slots: int
    shares: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots; 0 where they share others'."""
        return 0 if self.shares else self.slot_bytes * self.num_slots


@dataclass(frozen=True)
class GemmBudget:
    """The budget of one configuration.

    Attributes:
        config, storage: the records it was read from.
        rows: shared memory of one CTA.
        tensor_buffers: columns of tensor memory; accumulators may share some.
        num_tiles: output tiles of the request.
        num_blocks, num_chunks: ring slots that one tile takes of the main product and of the low
            rank, in each CTA that works on it: the most of any, where K is split.
        num_waves: rounds in which all SMs work on a tile each.
    """

    config: GemmConfig
    storage: StorageConfig
    rows: tuple[BudgetRow, ...]
    tensor_buffers: tuple[TensorBuffer, ...]
    num_tiles: int
    num_blocks: int
    num_chunks: int
    num_waves: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        storage = self.storage
        return {
            "config": asdict(self.config),
            "shared": [{**asdict(row), "total_bytes": row.total_bytes} for row in self.rows],
            "stages": storage.num_stages,
            "slot_bytes": storage.slot_bytes,
            "used_bytes": storage.used_bytes,
            "capacity_bytes": storage.capacity_bytes,
            "slack_bytes": storage.slack_bytes,
            "tensor_memory": [asdict(buffer) for buffer in self.tensor_buffers],
            "tensor_columns": TMEM_COLUMNS,
            "overlap_columns": storage.overlap_columns,
            "tiles": self.num_tiles,
            "blocks_per_tile": self.num_blocks,
            "chunks_per_tile": self.num_chunks,
            "waves": self.num_waves,
        }

    def compare(self, declared: dict[str, int]) -> tuple[CheckFinding, ...]:
        """Return where declared bytes per slot are not those of the layouts.

        Raises UsageError for a name that the table does not have.
        """
        measured: dict[str, int | None] = {row.name: row.slot_bytes for row in self.rows}
        return tuple(compare_declared(declared, measured, f"gemm_w4a4 {self.config.tile}"))


def make_budget(request: GemmRequest, config: GemmConfig) -> GemmBudget:
    """Return the budget; FormatError with the arithmetic where the configuration does not fit."""
    storage = plan_storage(config)
    tile = config.tile
    rows, columns = (request.n, request.m) if tile.swap else (request.m, request.n)
    num_tiles = -(-rows // tile.m) * -(-columns // tile.n)
    blocks = -(-request.k // BLOCK_K)
    chunks = 0 if config.low_rank is None else -(-request.rank // config.low_rank.chunk)
    return GemmBudget(
        config=config,
        storage=storage,
        rows=_list_rows(config, storage),
        tensor_buffers=_list_tensor_buffers(config, storage),
        num_tiles=num_tiles,
        num_blocks=min(blocks, -(-(blocks + chunks) // tile.num_splits)),
        num_chunks=chunks,
        num_waves=-(-num_tiles // count_resident_clusters(config)),
    )


def check_stages(storage: StorageConfig, wanted: int) -> None:
    """Raise FormatError with the arithmetic where fewer than `wanted` ring slots fit."""
    if wanted <= storage.num_stages:
        return
    ring = storage.num_stages * storage.slot_bytes
    fixed = storage.used_bytes - ring
    room = storage.capacity_bytes - fixed
    over = wanted * storage.slot_bytes - room
    raise FormatError(
        f"{wanted} ring slots of {storage.slot_bytes} = {wanted * storage.slot_bytes} bytes; "
        f"{storage.capacity_bytes} - {fixed} (output staging, vectors, barriers) = {room} are "
        f"there ({over} too many): {storage.num_stages} slots fit"
    )


def _list_rows(config: GemmConfig, storage: StorageConfig) -> tuple[BudgetRow, ...]:
    names = _SWAPPED_OPERANDS if config.tile.swap else _OPERANDS
    chunks = tuple(reversed(_CHUNKS)) if config.tile.swap else _CHUNKS
    stages = storage.num_stages
    rows = [
        BudgetRow(name, size, stages)
        for name, (_, size) in zip(names, storage.operand_bytes, strict=True)
    ]
    for name, host, (_, size) in zip(chunks, names, storage.low_rank_bytes, strict=False):
        if storage.own_ring_bytes:
            rows.append(BudgetRow(name, size, OWN_RING_STAGES))
        else:
            rows.append(BudgetRow(name, size, stages, shares=host))
    rows += [
        BudgetRow(
            "output staging", storage.output_slot_bytes * EPILOGUE_WARPS, storage.num_output_slots
        ),
        BudgetRow("column vectors", storage.vector_bytes, 1),
        BudgetRow("partial sums", storage.exchange_bytes, 1),
        BudgetRow("barriers", storage.barrier_bytes, 1),
    ]
    return tuple(row for row in rows if row.slot_bytes and row.num_slots)


def _list_tensor_buffers(config: GemmConfig, storage: StorageConfig) -> tuple[TensorBuffer, ...]:
    first, second = storage.accumulator_offsets
    per_row_group = config.block_size * 4
    scales_a = ROWS_PER_CTA // 32 * (BLOCK_K // per_row_group)
    start = storage.accumulator_columns
    return (
        TensorBuffer("accumulator 0", first, config.tile.n),
        TensorBuffer("accumulator 1", second, config.tile.n),
        TensorBuffer("scales of A", start, scales_a),
        TensorBuffer("scales of B", start + scales_a, storage.scale_columns - scales_a),
    )
