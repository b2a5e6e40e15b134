"""Which configuration computes a request best: what fits it, and a cost rule to rank by.

Nothing here changes what is compiled: the rule may be retuned without building kernels again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from halfbyte.arch.gpus import BLACKWELL_MEMORY_BYTES_PER_S, BLACKWELL_SMS_BY_CLUSTER
from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    FEW_TOKENS,
    LARGE_TILES,
    ROWS_PER_CTA,
    SPLITS,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
    check_legal,
    list_operand_bytes,
    list_problems,
    plan_storage,
)

MAX_SIZE: Final = 2**31


@dataclass(frozen=True)
class GemmRequest:
    """One product as it is asked for.

    Attributes:
        m, n, k, rank: [m, k] activations, [n, k] weights, low rank.
        block_format: "nvfp4" or "mxfp4".
        out_dtype, lora_dtype: "float16" or "bfloat16".
        epilogue: see EpilogueConfig.
    """

    m: int
    n: int
    k: int
    rank: int
    block_format: str
    out_dtype: str
    lora_dtype: str
    epilogue: EpilogueConfig = field(default_factory=EpilogueConfig)


def list_request_problems(config: GemmConfig, request: GemmRequest) -> Iterator[str]:
    """Yield one sentence for each reason why a legal configuration does not compute a request."""
    tile = config.tile
    for name in ("block_format", "out_dtype", "epilogue"):
        has, wanted = getattr(config, name), getattr(request, name)
        if has != wanted:
            yield f"{name}: the kernel is compiled for {has!r}, {wanted!r} is asked for"
    if (config.low_rank is None) != (request.rank == 0):
        branch = "no" if config.low_rank is None else "a"
        yield f"rank {request.rank}: the kernel is compiled with {branch} low-rank branch"
    elif config.low_rank is not None and config.low_rank.dtype != request.lora_dtype:
        dtypes = f"{config.low_rank.dtype!r}, {request.lora_dtype!r} is asked for"
        yield f"lora_dtype: the kernel is compiled for {dtypes}"
    largest = max(request.m, request.n, request.k, request.rank)
    if largest >= MAX_SIZE:
        yield f"size {largest}: sizes and strides are 32-bit in the kernel, below {MAX_SIZE}"
    if min(request.m, request.n, request.k) < 1:
        sizes = f"m {request.m}, n {request.n}, k {request.k}"
        yield f"{sizes}: there is nothing to multiply; the caller returns zeros or the bias"
    if tile.swap and request.m > tile.n:
        # Block scales of B are copied in tiles of 128 rows: a second tile of tokens starts within.
        yield f"m {request.m}: tile {tile} has room for {tile.n} tokens; take a larger tile"
    blocks = _count_blocks(request)
    if 0 < blocks < tile.num_splits:
        yield (
            f"k {request.k}: {blocks} blocks of {BLOCK_K} for the {tile.num_splits} CTAs of tile "
            f"{tile}; take at most {blocks} splits"
        )


def check_request(config: GemmConfig, request: GemmRequest) -> None:
    """Raise FormatError with every reason why `config` does not compute `request`."""
    problems = list(list_request_problems(config, request))
    if problems:
        raise FormatError("; ".join(problems))


def choose_config(request: GemmRequest, target: str) -> GemmConfig:
    """Return the configuration for a request: the legal one with the lowest `estimate_cycles`."""
    low_rank = choose_low_rank(request)
    configs = [
        GemmConfig(
            target=target,
            block_format=request.block_format,
            out_dtype=request.out_dtype,
            tile=tile,
            low_rank=low_rank,
            epilogue=request.epilogue,
        )
        for tile in list_tiles(request)
    ]
    legal = [config for config in configs if not list(list_problems(config))]
    if not legal:
        check_legal(configs[0])
    return min(legal, key=lambda config: estimate_cycles(request, config))


def choose_low_rank(request: GemmRequest) -> LowRankConfig | None:
    """Return the low-rank configuration: chunks of 32 columns below rank 64, else of 64."""
    if request.rank == 0:
        return None
    return LowRankConfig(request.lora_dtype, chunk=64 if request.rank >= 64 else 32)


def list_tiles(request: GemmRequest) -> list[TileConfig]:
    """Return the tiles worth comparing: swapped ones with split K for at most 64 tokens."""
    if request.m > max(FEW_TOKENS) or request.epilogue.output != "dense":
        return list(LARGE_TILES)
    tokens = min(tokens for tokens in FEW_TOKENS if request.m <= tokens)
    return [
        TileConfig(ROWS_PER_CTA, tokens, 1, swap=True, num_splits=splits)
        for splits in SPLITS
        if splits <= max(1, _count_blocks(request))
    ]


# Cycles, from published B200 measurements (docs/kernels/gemm_w4a4.md names each source).
_FILL_CYCLES: Final = 820  # round trip of a lightly loaded TMA load
_INGEST_BYTES_PER_CYCLE: Final = 76  # of one SM while all SMs load
_EPILOGUE_CYCLES_PER_COLUMN: Final = 1071 / 128
_CLUSTER_CYCLES: Final = 2 * 370 + 200  # barrier.cluster at both ends, a store to another CTA


def count_resident_clusters(config: GemmConfig) -> int:
    """Return how many clusters of a configuration the GPU runs at once: the persistent grid."""
    cluster_size = config.tile.num_ctas * config.tile.num_splits
    return min(BLACKWELL_SMS_BY_CLUSTER[cluster_size], config.gpu.num_sms) // cluster_size


def estimate_cycles(request: GemmRequest, config: GemmConfig) -> float:
    """Return the predicted cycles of a request: a rule to rank tiles by, not a promise.

    Tiles run in waves over the GPU's SMs; a block takes as long as its products or its bytes,
    whichever is longer; the last tile's epilogue and the first loads are not hidden.
    """
    if config.tile.swap:
        return _estimate_few_tokens(request, config)
    tile = config.tile
    tiles = -(-request.m // tile.m) * -(-request.n // tile.n)
    waves = -(-tiles // count_resident_clusters(config))
    blocks = _count_blocks(request) + _count_chunks(request, config)
    epilogue = tile.n * _EPILOGUE_CYCLES_PER_COLUMN
    return _FILL_CYCLES + waves * blocks * _estimate_block(config) + epilogue


def _estimate_block(config: GemmConfig) -> float:
    """Return the cycles of one block: N/2 for each 64 codes of K, or those of its bytes."""
    tile = config.tile
    product = 4 * max(tile.n / 2, (128 + tile.n / tile.num_ctas) * 32 / 128)
    return max(product, plan_storage(config).slot_bytes / _INGEST_BYTES_PER_CYCLE)


def _estimate_few_tokens(request: GemmRequest, config: GemmConfig) -> float:
    """Return the predicted cycles of a swapped tile: how long its weight takes to arrive.

    Each weight byte is used for at most 64 tokens: the 22 KB of a block take an SM 290 cycles, its
    products 144. A wave of tiles takes as long as one SM's part at what an SM takes in, or all
    parts at what HBM gives (25 bytes a cycle and SM, a third of it), whichever is longer. With few
    tiles the first is longer, and K is split until the second is; more splits only cost, since
    clusters start and end together, and large ones leave SMs idle. Activations come from L2.
    """
    blocks, chunks = _count_blocks(request), _count_chunks(request, config)
    splits = config.tile.num_splits
    # The last CTA has all chunks and a block at least (`work.split_k`).
    longest = max(-(-(blocks + chunks) // splits), chunks + 1)
    sizes = dict(list_operand_bytes(config))
    weight_bytes = (blocks + chunks) * (sizes["a"] + sizes["sfa"])
    memory_cycles = weight_bytes * config.gpu.clock / BLACKWELL_MEMORY_BYTES_PER_S
    full_waves, rest = divmod(-(-request.n // config.tile.m), count_resident_clusters(config))
    waves = [count_resident_clusters(config)] * full_waves + [rest] * (rest > 0)
    cycles = sum(max(longest * _estimate_block(config), tiles * memory_cycles) for tiles in waves)
    exchange = _CLUSTER_CYCLES if splits > 1 else 0
    return _FILL_CYCLES + cycles + exchange + config.tile.n * _EPILOGUE_CYCLES_PER_COLUMN


def _count_blocks(request: GemmRequest) -> int:
    return -(-request.k // BLOCK_K)


def _count_chunks(request: GemmRequest, config: GemmConfig) -> int:
    return 0 if config.low_rank is None else -(-request.rank // config.low_rank.chunk)
