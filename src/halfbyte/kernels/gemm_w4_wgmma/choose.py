"""Which configuration, and which mode, computes a product best.

Where the shape, or one near it, was measured (`measured_choices`), the fastest one is taken.
Elsewhere candidates are ranked by `estimate_us`: tiles in waves over the SMs, each as long as its
slowest part. Nothing here changes what is compiled: table and rule may change without building
kernels again.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any, Final

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4_wgmma.config import (
    BLOCK_K,
    CHANNELS,
    CHUNK_RANKS,
    GPU,
    INTEGER_TOKENS,
    LORA_BLOCK_BYTES,
    MAX_SIZE,
    SPLITS,
    WEIGHT_BLOCK_BYTES,
    WgmmaGemmConfig,
    WgmmaGemmRequest,
    check_legal,
    plan_storage,
)
from halfbyte.kernels.gemm_w4_wgmma.measured_choices import find_nearest, read_choices

DENSE: Final = "bf16"  # the mode that is no kernel of ours
FEW_TOKENS: Final = (8, 16, 32, 48, 64)  # tiles that one tile row of tokens fits
MANY_TOKENS: Final = (64, 96, 128, 160, 192, 200, 208, 224, 240, 256)
MAX_STAGES: Final = 24
NUM_CANDIDATES: Final = 24
_SHARED_TOKENS: Final = 128  # of a tile, for which sharing activations is worth a cluster
_MOST_SPLIT_CTAS: Final = 132
_CONFIG_REACH: Final = 0.51  # octaves of m, n and k that a measured configuration is taken for
_MODE_REACH: Final = 2.0  # and a measured order of modes

# Cycles and rates of the rule, fitted to runs on an H200 (docs/kernels/gemm_w4_wgmma.md).
_CLOCK: Final = 1.55e9  # between 1.3 GHz under the power cap and 1.75 GHz of short runs
_PRODUCTS_PER_CYCLE: Final = {1: 4096, 2: 2048}  # multiply-adds of an SM, by bytes of an activation
_STEP_CYCLES: Final = {"fp8": 430, "exact": 700, "int8": 500}  # of a block with few products
_PAIRS_GAIN: Final = 1.25  # of two pairs over one, where decoding binds
_UNHIDDEN_CYCLES: Final = 290  # of a block's decoding, for no tokens; none at 384
_INGEST_BYTES_PER_CYCLE: Final = 41.0  # from L2, of an SM while all load
_MEMORY_BYTES_PER_S: Final = 4.0e12
_START_US: Final = 2.6  # of a launch with two blocks a tile
_EXCHANGE_US: Final = 0.4  # of a cluster's sum
_EXCHANGE_TOKEN_US: Final = 0.026  # and of each token of the tile
_EPILOGUE_CYCLES_PER_TOKEN: Final = 9.0
_GROUP_CYCLES_PER_TOKEN: Final = 8.0  # of a block: counted instructions, not measured
_SHARED_FACTORS: Final = (1.03, 0.985)  # of a cluster of two, with few waves and with more
_STAGING_CYCLES: Final = 300.0  # of each part that a tile is stored in
# Slots of a wide tile, at least: what the ring does not take stages more of a tile at once.
_FEWEST_SLOTS: Final = 4
_SLOT_CYCLES: Final = 60.0  # barriers of a slot, where they are not hidden

# A ring of few tokens holds what is on its way from memory; more only queues, and activations with
# it: measured, 88 to 144 KB were fastest, 220 KB cost 2 us.
_NARROW_RING_BYTES: Final = {32: 94_000, 128: 140_000}  # by tokens of a tile, at most
_FEW_TOKENS: Final = 64  # rows whose GEMM is not much longer than the quantizer before it
_PAIR_TOKENS: Final = 16  # of a tile for which two pairs decode float16 faster, and
_PAIR_BLOCKS: Final = 12  # blocks of a CTA


def list_request_problems(config: WgmmaGemmConfig, request: WgmmaGemmRequest) -> Iterator[str]:
    """Yield one sentence for each reason why a legal configuration does not compute a request."""
    for name in ("mode", "weight", "out_dtype", "has_bias", "has_alpha", "use_pdl"):
        has, wanted = getattr(config, name), getattr(request, name)
        if has != wanted:
            yield f"{name}: the kernel is compiled for {has!r}, {wanted!r} is asked for"
    wanted_dtype = request.lora_dtype if request.rank else None
    if config.lora_dtype != wanted_dtype:
        yield (
            f"lora_dtype: the kernel is compiled for {config.lora_dtype!r}, rank {request.rank} "
            f"asks for {wanted_dtype!r}"
        )
    largest = max(request.m, request.n, request.k, request.rank)
    if largest >= MAX_SIZE:
        yield f"size {largest}: sizes and strides are 32-bit in the kernel, below {MAX_SIZE}"
    if min(request.m, request.n, request.k) < 1:
        sizes = f"m {request.m}, n {request.n}, k {request.k}"
        yield f"{sizes}: there is nothing to multiply; the caller returns zeros or the bias"
    blocks = _count_blocks(request)
    if 0 < blocks < config.num_parties:
        yield (
            f"k {request.k}: {blocks} blocks of {BLOCK_K} for {config.num_parties} parts; "
            f"splits * pairs is at most {blocks}"
        )


def check_request(config: WgmmaGemmConfig, request: WgmmaGemmRequest) -> None:
    """Raise FormatError with every reason why `config` does not compute `request`."""
    problems = list(list_request_problems(config, request))
    if problems:
        raise FormatError("; ".join(problems))


@lru_cache(maxsize=4096)
def choose_config(request: WgmmaGemmRequest) -> WgmmaGemmConfig:
    """Return the configuration for a request: a measured one, else the first by `estimate_us`.

    Raises FormatError for sizes that none computes.
    """
    measured = _find_config(request)
    if measured is not None:
        return measured
    candidates = _rank_candidates(request)
    if not candidates:
        narrow = _make_config(request, 64, 1, 1)
        check_legal(narrow)
        check_request(narrow, request)
    return candidates[0]


@lru_cache(maxsize=4096)
def choose_mode(request: WgmmaGemmRequest, modes: tuple[str, ...]) -> str:
    """Return the fastest of `modes` for a shape, or "bf16" where that was faster than all.

    By the nearest measured shape; where none is near, the first of `modes`.

    Args:
        request: its mode is ignored.
        modes: kernel modes that the formats have, in order of preference.
    """
    times: dict[str, float] = {}
    dense: list[float] = []
    for mode in modes:
        rows = [row for row in read_choices() if (row.mode, row.weight) == (mode, request.weight)]
        row = find_nearest(rows, (request.m, request.n, request.k), _MODE_REACH)
        if row is not None:
            times[mode] = row.total_us
            dense.append(row.bf16_us)
    if not times:
        return modes[0] if modes else DENSE
    fastest = min(times, key=lambda mode: times[mode])
    return DENSE if min(dense) < times[fastest] else fastest


def list_candidates(request: WgmmaGemmRequest) -> list[WgmmaGemmConfig]:
    """Return the configurations worth timing, at most 24, the likely best first.

    Where a tile is of few tokens, each also with all weights that fit loaded ahead: what that gains
    depends on the kernel before, which no estimate knows.
    """
    ranked = _rank_candidates(request)
    if request.use_pdl and request.m <= _FEW_TOKENS:
        ranked = [one for config in ranked for one in _list_ahead(config)]
    return ranked[:NUM_CANDIDATES]


def _list_ahead(config: WgmmaGemmConfig) -> tuple[WgmmaGemmConfig, ...]:
    eager = replace(config, ahead=config.stages)
    return (config,) if eager == config else (config, eager)


def count_resident_clusters(config: WgmmaGemmConfig) -> int:
    """Return how many clusters of a configuration the GPU runs at once: the persistent grid."""
    return GPU.count_resident_clusters(config.cluster_size)


def estimate_us(request: WgmmaGemmRequest, config: WgmmaGemmConfig) -> float:
    """Return the predicted microseconds of a request: a rule to rank by, not a promise."""
    token_tiles = -(-request.m // config.tokens)
    channel_tiles = -(-request.n // CHANNELS)
    clusters = token_tiles * -(-channel_tiles // config.cluster)
    waves = -(-clusters // count_resident_clusters(config))
    blocks = -(-_count_blocks(request) // config.splits)
    chunks = -(-_count_chunks(request) // config.num_parties)
    cycles = blocks * _estimate_block(config) + chunks * _estimate_chunk(config)
    epilogue = config.tokens * _EPILOGUE_CYCLES_PER_TOKEN
    if not config.stores_straight:
        epilogue += config.tokens / plan_storage(config).chunk_tokens * _STAGING_CYCLES
    tile_us = (cycles + epilogue) / _CLOCK * 1e6
    if config.cluster > 1:  # CTAs that wait for one another, less power: measured
        tile_us *= _SHARED_FACTORS[waves > 2]
    weight_bytes = channel_tiles * _count_blocks(request) * WEIGHT_BLOCK_BYTES
    memory_us = (weight_bytes + _count_moved_bytes(request, config)) / _MEMORY_BYTES_PER_S * 1e6
    exchange = _EXCHANGE_US + _EXCHANGE_TOKEN_US * config.tokens if config.splits > 1 else 0.0
    return _START_US + max(waves * tile_us, memory_us) + exchange


def _estimate_block(config: WgmmaGemmConfig) -> float:
    """Return the cycles of a block: of its products, its decoding or its bytes."""
    products = CHANNELS * config.tokens * BLOCK_K / _PRODUCTS_PER_CYCLE[config.act_bytes]
    own_bytes = BLOCK_K * config.act_bytes * config.tokens / config.cluster
    loading = (WEIGHT_BLOCK_BYTES + own_bytes) / _INGEST_BYTES_PER_CYCLE
    if config.has_group_scales:  # conversion, one or two scales: of each sum of 64 columns
        products += config.tokens * _GROUP_CYCLES_PER_TOKEN
    decoding = _STEP_CYCLES[config.mode] / (_PAIRS_GAIN if config.pairs > 1 else 1.0)
    unhidden = _UNHIDDEN_CYCLES * (1 - config.tokens / 384)
    cycles = max(products + unhidden, decoding, loading)
    if config.tokens > max(_NARROW_RING_BYTES):  # a late load is seen; with more slots, less
        cycles += _SLOT_CYCLES * 4 / config.num_slots
    return cycles


def _estimate_chunk(config: WgmmaGemmConfig) -> float:
    """Return the cycles of a low-rank chunk, whose products are not overlapped."""
    products = CHANNELS * config.tokens * CHUNK_RANKS / _PRODUCTS_PER_CYCLE[2]
    loading = (LORA_BLOCK_BYTES + 2 * CHUNK_RANKS * config.tokens) / _INGEST_BYTES_PER_CYCLE
    return max(products, loading) + 2 * _SLOT_CYCLES


def _count_moved_bytes(request: WgmmaGemmRequest, config: WgmmaGemmConfig) -> int:
    """Return the bytes beside the weight that come from or go to memory once."""
    act = request.m * request.k * config.act_bytes
    low_rank = 2 * request.rank * (request.m + request.n)
    return act + low_rank + 2 * request.m * request.n


def _rank_candidates(request: WgmmaGemmRequest) -> list[WgmmaGemmConfig]:
    configs = list(_list_configs(request))
    return sorted(configs, key=lambda config: estimate_us(request, config))


def _list_configs(request: WgmmaGemmRequest) -> Iterator[WgmmaGemmConfig]:
    """Yield legal configurations of a request, each tile with some depths of its ring."""
    for tokens in _list_tokens(request):
        for cluster, splits in _list_clusters(request, tokens):
            tile = _make_config(request, tokens, cluster, splits)
            deepest = _find_stages(tile)
            depths = list(range(deepest, min(deepest, _FEWEST_SLOTS) - 1, -1))
            if tokens <= max(_NARROW_RING_BYTES):
                fitting = _fit_narrow_ring(tile)
                depths = [fitting, fitting * 2 // 3, fitting * 3 // 2]
            for stages in dict.fromkeys(min(depth, deepest) for depth in depths):
                config = replace(tile, stages=stages)
                if _is_legal(config) and not list(list_request_problems(config, request)):
                    yield config


def _list_clusters(request: WgmmaGemmRequest, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield (CTAs that share activations, CTAs that split K) worth comparing."""
    yield 1, 1
    if tokens >= _SHARED_TOKENS and request.n > CHANNELS:
        yield 2, 1
    tiles = -(-request.m // tokens) * -(-request.n // CHANNELS)
    for splits in SPLITS[1:]:
        if splits <= _count_blocks(request) and tiles * splits <= _MOST_SPLIT_CTAS:
            yield 1, splits


def _fit_narrow_ring(tile: WgmmaGemmConfig) -> int:
    """Return the slots of a ring that holds what is on its way from memory."""
    num_bytes = min(size for tokens, size in _NARROW_RING_BYTES.items() if tile.tokens <= tokens)
    act = tile.tokens * tile.slot_columns * tile.act_bytes
    weight = WEIGHT_BLOCK_BYTES * tile.slot_columns // BLOCK_K
    return max(3, num_bytes // ((act + weight) * tile.pairs))


def _list_tokens(request: WgmmaGemmRequest) -> list[int]:
    """Return the tile widths worth comparing."""
    sizes = sorted({*FEW_TOKENS, *MANY_TOKENS})
    if request.weight == "int4" and request.mode != "fp8":
        sizes = [size for size in sizes if size <= INTEGER_TOKENS]
    fitting = [size for size in sizes if size >= request.m]
    smallest = fitting[:1]
    others = [size for size in sizes if 64 <= size < request.m]
    return [*smallest, *others]


def _find_stages(tile: WgmmaGemmConfig) -> int:
    """Return the most ring slots that fit; 0 for none."""
    for stages in range(MAX_STAGES, 1, -1):
        if _is_legal(replace(tile, stages=stages)):
            return stages
    return 0


def _make_config(
    request: WgmmaGemmRequest, tokens: int, cluster: int, splits: int
) -> WgmmaGemmConfig:
    """Return a configuration of a tile, with a ring of two slots."""
    blocks = _count_blocks(request) // splits
    has_pairs = (
        (request.mode, request.weight) == ("exact", "e2m1")
        and tokens <= _PAIR_TOKENS
        and blocks >= _PAIR_BLOCKS
    )
    return WgmmaGemmConfig(
        mode=request.mode,
        weight=request.weight,
        out_dtype=request.out_dtype,
        lora_dtype=request.lora_dtype if request.rank else None,
        tokens=tokens,
        stages=2,
        cluster=cluster,
        splits=splits,
        pairs=2 if has_pairs else 1,
        has_bias=request.has_bias,
        has_alpha=request.has_alpha,
        use_pdl=request.use_pdl,
    )


def _find_config(request: WgmmaGemmRequest) -> WgmmaGemmConfig | None:
    """Return the configuration of the nearest measured shape, None where there is none near."""
    key = request.mode, request.weight
    rows = [row for row in read_choices() if (row.mode, row.weight) == key]
    row = find_nearest(rows, (request.m, request.n, request.k), _CONFIG_REACH)
    if row is None:
        return None
    tile = _make_config(request, row.tokens, row.cluster, row.splits)
    config = replace(tile, stages=row.stages)
    known = {field.name for field in fields(config)}
    extra: dict[str, Any] = {name: value for name, value in row.extra if name in known}
    config = replace(config, **extra)
    is_right = not list(list_request_problems(config, request))
    return config if is_right and _is_legal(config) else None


def _is_legal(config: WgmmaGemmConfig) -> bool:
    try:
        check_legal(config)
    except FormatError:
        return False
    return True


def _count_blocks(request: WgmmaGemmRequest) -> int:
    return -(-request.k // BLOCK_K)


def _count_chunks(request: WgmmaGemmRequest) -> int:
    return -(-request.rank // CHUNK_RANKS)
