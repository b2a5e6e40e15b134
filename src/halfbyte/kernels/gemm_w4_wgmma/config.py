"""Everything that is decided before a Hopper GEMM is compiled, and what is legal.

    request -> WgmmaGemmConfig -> StorageConfig

`check_legal` is the one place that knows which configurations exist; the chooser, the compiler, the
budget and the tests all call it. Sources: PTX ISA (wgmma shapes, shared memory descriptors),
arch/gpus.py (shared memory, clusters).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from halfbyte.arch.gpus import GPUS
from halfbyte.errors import FormatError

TARGET: Final = "sm_90a"
GPU: Final = GPUS["h200"]
MODES: Final = ("fp8", "exact", "int8")
WEIGHTS: Final = ("e2m1", "int4")
OUT_DTYPES: Final = ("float16", "bfloat16")
SPLITS: Final = tuple(range(1, 9))  # CTAs of a portable cluster

CHANNELS: Final = 128  # output features of a tile
WARPGROUP_CHANNELS: Final = 64  # of one warpgroup: rows of a wgmma
CONSUMER_WARPGROUPS: Final = CHANNELS // WARPGROUP_CHANNELS
CONSUMER_WARPS: Final = 4 * CONSUMER_WARPGROUPS
BLOCK_K: Final = 128  # logical columns of one weight block
HALF_K: Final = 64  # columns of half a block: 16 codes of each of a thread's two rows
HALF_BYTES: Final = 2048  # codes of one warpgroup and half a block
SCALE_BYTES: Final = 512  # scales of one warpgroup and a block
WARPGROUP_BLOCK_BYTES: Final = 2 * HALF_BYTES + SCALE_BYTES
WEIGHT_BLOCK_BYTES: Final = CONSUMER_WARPGROUPS * WARPGROUP_BLOCK_BYTES
CHUNK_RANKS: Final = 32  # ranks of a low-rank chunk: 64 bytes of a row, one swizzle span
LORA_BLOCK_BYTES: Final = CHANNELS * CHUNK_RANKS * 2
ROW_BYTES: Final = 128  # of activations in a box: one swizzle span
SWIZZLE_ALIGN_BYTES: Final = 1024
BARRIER_BYTES: Final = 1024
STRAIGHT_TOKENS: Final = 32  # of a tile: what is stored from registers, without staging
INTEGER_TOKENS: Final = 128  # of a tile: sums of a group take as many registers again
SPLIT_TOKENS: Final = 128  # of a tile with split K: a cluster's partial sums fit shared memory
SHARED_BYTES: Final = GPU.shared_bytes_per_cta
# Registers after setmaxnreg, (producer, consumer) by pairs of consumer warpgroups: 128 * (40 + 2 *
# 232) of the 384 * 168 that a CTA starts with, 128 * (24 + 4 * 112) of 640 * 96.
REGISTERS: Final = {1: (40, 232), 2: (24, 112)}
PAIR_TOKENS: Final = 64  # of a tile of two pairs: accumulators that 112 registers leave room for
PIECE_BYTES: Final = 512  # float32 sums of 16 channels and 8 tokens (device/cluster_fragments.py)
MAX_SIZE: Final = 2**31


@dataclass(frozen=True)
class WgmmaGemmConfig:
    """One compiled GEMM: shapes stay dynamic, everything here is fixed.

    Attributes:
        mode: "fp8": E4M3 products; "exact": the products of the layer's own formats, in float16
            (INT4: integers); "int8": INT4 weights by INT8 activations.
        weight: "e2m1" (NVFP4, MXFP4) or "int4".
        out_dtype: of y, "float16" or "bfloat16".
        lora_dtype: of lora_act and lora_up, None for rank 0.
        tokens: of a tile, the N of a wgmma.
        stages: ring slots.
        cluster: CTAs that share the activations of a tile row by multicast (1 or 2).
        splits: CTAs of a cluster that share one tile's K; their sums are added in order.
        pairs: of consumer warpgroups that split a CTA's part of K, each with a ring of its own.
        ahead: slots of a ring whose weights are loaded before the previous kernel has ended; more
            keep the activations waiting behind them.
        raster_group: token tiles that are walked together: they share weights in L2, and the
            channel tiles that run beside them share activations.
        has_bias: add bias[n].
        has_alpha: multiply the product by the device scalar alpha.
        use_pdl: programmatic dependent launch: the previous kernel is waited for inside this one.
    """

    mode: Literal["fp8", "exact", "int8"]
    weight: Literal["e2m1", "int4"]
    out_dtype: str
    lora_dtype: str | None
    tokens: int
    stages: int
    cluster: int = 1
    splits: int = 1
    pairs: int = 1
    ahead: int = 2
    raster_group: int = 8
    has_bias: bool = False
    has_alpha: bool = False
    use_pdl: bool = False

    @property
    def act_bytes(self) -> int:
        """Bytes of an activation in memory: 2 for float16, 1 for E4M3 and INT8."""
        return 2 if (self.mode, self.weight) == ("exact", "e2m1") else 1

    @property
    def slot_columns(self) -> int:
        """Columns of K in a ring slot.

        One weight block; half of one for float16 activations of many tokens, whose 256 bytes a row
        would leave too few slots.
        """
        return HALF_K if self.act_bytes == 2 and self.tokens >= 128 else BLOCK_K

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster: they share activations, or split K."""
        return self.cluster * self.splits

    @property
    def num_slots(self) -> int:
        """Ring slots of a CTA."""
        return self.pairs * self.stages

    @property
    def num_parties(self) -> int:
        """Partial sums of a tile."""
        return self.pairs * self.splits

    @property
    def threads(self) -> int:
        """Threads of a CTA; the first warpgroup loads."""
        return 128 * (1 + CONSUMER_WARPGROUPS * self.pairs)

    @property
    def stores_straight(self) -> bool:
        """Whether y is stored from registers: narrow tiles, and sums of parts of K."""
        return self.num_parties > 1 or self.tokens <= STRAIGHT_TOKENS

    @property
    def has_token_scale(self) -> bool:
        """Whether activations have one scale a token."""
        return self.mode in ("fp8", "int8")

    @property
    def has_group_scales(self) -> bool:
        """Whether sums over 64 columns are scaled one by one: INT4 on integer tensor cores."""
        return self.weight == "int4" and self.mode in ("exact", "int8")

    @property
    def has_act_group_scale(self) -> bool:
        """Whether activations have one scale for each 64 columns."""
        return (self.mode, self.weight) == ("exact", "int4")


@dataclass(frozen=True)
class StorageConfig:
    """Shared memory of one CTA, in bytes.

    Attributes:
        act_slot_bytes, weight_slot_bytes: of one ring slot; a low-rank chunk uses the same slots.
        lora_in_weights: whether lora_blocks lie in the weight part of a slot, else behind lora_act.
        num_stages: ring slots.
        chunk_tokens, num_chunk_buffers: output staging of each consumer warpgroup.
        token_scale_bytes: of both warpgroups.
        group_scale_bytes: activation scales of two blocks, both warpgroups, INT4 in mode "exact".
        exchange_bytes: partial sums that arrive at a CTA, with split K.
        capacity_bytes: what a CTA can have.
    """

    act_slot_bytes: int
    weight_slot_bytes: int
    lora_in_weights: bool
    num_stages: int
    chunk_tokens: int
    num_chunk_buffers: int
    token_scale_bytes: int
    group_scale_bytes: int
    exchange_bytes: int
    capacity_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one staging buffer: 64 channels of `chunk_tokens` tokens."""
        return self.chunk_tokens * WARPGROUP_CHANNELS * 2

    @property
    def output_bytes(self) -> int:
        """Bytes of all staging buffers."""
        return CONSUMER_WARPGROUPS * self.num_chunk_buffers * self.chunk_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one ring slot."""
        return self.act_slot_bytes + self.weight_slot_bytes

    @property
    def used_bytes(self) -> int:
        """Shared memory of one CTA."""
        scales = self.token_scale_bytes + self.group_scale_bytes
        fixed = BARRIER_BYTES + scales + self.output_bytes + self.exchange_bytes
        return fixed + self.num_stages * self.slot_bytes


def plan_storage(config: WgmmaGemmConfig) -> StorageConfig:
    """Return the shared memory of a configuration.

    The output staging gets what the ring leaves: a whole tile at once, else the largest part of one
    in two buffers, else in one. Narrow tiles and those with split K have none.
    Raises FormatError with the arithmetic where nothing fits.
    """
    act = config.tokens * config.slot_columns * config.act_bytes
    weight = _weight_slot_bytes(config)
    has_staged_scales = config.has_token_scale and not config.stores_straight
    scales = 4 * CONSUMER_WARPGROUPS * config.tokens if has_staged_scales else 0
    # Two buffers, two groups of a block, a float32 each.
    group_scales = 16 * CONSUMER_WARPGROUPS * config.tokens if config.has_act_group_scale else 0
    exchange = _exchange_bytes(config)
    ring = config.num_slots * (act + weight)
    room = SHARED_BYTES - BARRIER_BYTES - scales - group_scales - exchange - ring
    chunk, buffers = (0, 0) if config.stores_straight else _choose_chunk(config.tokens, room)
    if room < 0 or not (buffers or config.stores_straight):
        raise FormatError(
            f"{config.num_slots} ring slots of {act} + {weight} = {ring} bytes leave {room} of "
            f"{SHARED_BYTES} for the output of {config.tokens} tokens; take fewer stages"
        )
    return StorageConfig(
        act_slot_bytes=act,
        weight_slot_bytes=weight,
        lora_in_weights=weight >= LORA_BLOCK_BYTES,
        num_stages=config.num_slots,
        chunk_tokens=chunk,
        num_chunk_buffers=buffers,
        token_scale_bytes=scales,
        group_scale_bytes=group_scales,
        exchange_bytes=exchange,
        capacity_bytes=SHARED_BYTES,
    )


def _exchange_bytes(config: WgmmaGemmConfig) -> int:
    """Return the bytes of partial sums that arrive at one CTA: 512 for 16 channels by 8 tokens."""
    parties = config.num_parties
    if parties == 1:
        return 0
    pieces = CONSUMER_WARPS * config.tokens // 8
    return config.pairs * parties * -(-pieces // parties) * PIECE_BYTES


def _weight_slot_bytes(config: WgmmaGemmConfig) -> int:
    """Return the bytes of weights in a slot; half a block comes with the scales of all of it."""
    if config.slot_columns == BLOCK_K:
        return WEIGHT_BLOCK_BYTES
    return CONSUMER_WARPGROUPS * (HALF_BYTES + SCALE_BYTES)


def _choose_chunk(tokens: int, room: int) -> tuple[int, int]:
    """Return (tokens, buffers) of the output staging, (0, 0) where there is no room."""
    # Buffers are swizzled in steps of 8 rows.
    sizes = [size for size in range(tokens, 0, -8) if tokens % size == 0]
    token_bytes = CHANNELS * 2
    if tokens * token_bytes <= room:
        return tokens, 1
    for buffers in (2, 1):
        for size in sizes:
            if size < tokens and buffers * size * token_bytes <= room:
                return size, buffers
    return 0, 0


def list_problems(config: WgmmaGemmConfig) -> Iterator[str]:
    """Yield one sentence for each reason why a configuration cannot be compiled."""
    if config.mode not in MODES:
        yield f"mode {config.mode!r}: wanted one of {MODES}"
    if config.weight not in WEIGHTS:
        yield f"weight {config.weight!r}: wanted one of {WEIGHTS}"
    if config.mode == "int8" and config.weight != "int4":
        yield f"mode 'int8' multiplies integers: weight {config.weight!r} has none; take fp8"
    if config.out_dtype not in OUT_DTYPES:
        yield f"out_dtype {config.out_dtype!r}: wanted one of {OUT_DTYPES}"
    if config.lora_dtype not in (None, *OUT_DTYPES):
        yield f"lora_dtype {config.lora_dtype!r}: wanted None or one of {OUT_DTYPES}"
    if config.cluster not in (1, 2):
        yield f"cluster {config.cluster}: activations are shared by 1 or 2 CTAs"
    if config.splits not in SPLITS:
        yield f"splits {config.splits}: 1 to {max(SPLITS)}, the CTAs of a portable cluster"
    yield from _list_split_problems(config)
    unit = 8 * config.cluster
    if config.tokens % unit or not unit <= config.tokens <= 256:
        yield (
            f"tokens {config.tokens}: wanted a multiple of {unit} up to 256, eight for each of the "
            f"{config.cluster} CTAs that share them"
        )
    if config.stages < 2:
        yield f"stages {config.stages}: a ring has two slots at least"


def _list_split_problems(config: WgmmaGemmConfig) -> Iterator[str]:
    """Yield what forbids a part of K, or a second accumulator, in a configuration."""
    if config.splits > 1 and config.cluster > 1:
        yield "a cluster shares activations or splits K, not both"
    if config.has_group_scales and config.tokens > INTEGER_TOKENS:
        yield f"tokens {config.tokens}: a tile of integer products has at most {INTEGER_TOKENS}"
    if config.pairs not in REGISTERS:
        yield f"pairs {config.pairs}: 1 or 2 pairs of consumer warpgroups have registers"
    if config.pairs > 1 and (config.cluster > 1 or config.has_group_scales):
        yield "two pairs split K: no shared activations, no sums of groups"
    if config.pairs > 1 and config.tokens > PAIR_TOKENS:
        yield f"tokens {config.tokens}: a tile of two pairs has at most {PAIR_TOKENS}"
    if config.ahead < 1:
        yield f"ahead {config.ahead}: at least one slot is loaded first"
    if config.splits > 1 and config.tokens > SPLIT_TOKENS:
        yield f"tokens {config.tokens}: with split K a tile has at most {SPLIT_TOKENS}"


def check_legal(config: WgmmaGemmConfig) -> None:
    """Raise FormatError with every reason why `config` cannot be compiled."""
    problems = list(list_problems(config))
    if problems:
        raise FormatError("; ".join(problems))
    plan_storage(config)


@dataclass(frozen=True)
class WgmmaGemmRequest:
    """One product as it is asked for.

    Attributes:
        m, n, k, rank: [m, k] activations, [n, k] weights, low rank.
        mode, weight, out_dtype, lora_dtype, has_bias, has_alpha, use_pdl: see WgmmaGemmConfig.
    """

    m: int
    n: int
    k: int
    rank: int
    mode: Literal["fp8", "exact", "int8"]
    weight: Literal["e2m1", "int4"]
    out_dtype: str
    lora_dtype: str | None
    has_bias: bool = False
    has_alpha: bool = False
    use_pdl: bool = False
