"""What `quantize_act_wgmma` is asked, what it is compiled for, and which of that is legal. No CuTe.

A cluster of `cluster_k` CTAs owns up to `tokens` rows of x. For lora_act each CTA multiplies all of
these rows by its slice of K; what is quantized is a share of whole rows. Both read x, one from HBM
and the other from L2, and neither waits for the other before the end.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from halfbyte.arch.gpus import GPUS
from halfbyte.errors import UsageError
from halfbyte.formats.activation import ACTIVATION_FORMATS, ActivationFormat, get_activation_format

TARGET: Final = "sm_90a"
GPU: Final = GPUS["h200"]
TOKEN_MODES: Final = ("fp8", "int8")  # one scale a row; any other mode is an activation format
BLOCK_K: Final = 64  # columns of a ring slot: 128 bytes of x, one swizzle span
ROW_BYTES: Final = 2 * BLOCK_K
K_ALIGNMENT: Final = 128  # columns of act and lora_down
RANK_ALIGNMENT: Final = 32
PRODUCT_RANKS: Final = 64  # of a warpgroup: rows of a wgmma
WIDTH: Final = 16  # neighbouring columns that one thread quantizes
QUANTIZE_THREADS: Final = (256, 512)
ROW_GROUPS: Final = (1, 2)
# Quantizing threads -> units whose factors fit beside three batches of rows in their registers.
_FACTOR_UNITS: Final = {256: 2, 512: 1}

RANK_TILES: Final = (0, 16, 32, 64, 128)
CLUSTERS: Final = (1, 2, 4, 8)
MAX_TOKENS: Final = 256  # the N of a wgmma
LOAD_REGISTERS: Final = 24  # of the warpgroup that loads
_WGMMA_REGISTERS: Final = 26  # that ptxas wants beside the accumulators at the launch's count
_ADDRESS_REGISTERS: Final = 32  # of a product thread, beside its accumulators
MAX_UNITS: Final = 8
MAX_STAGES: Final = 8
# Of the rule that chooses, from measurements.
_FEW_ROWS: Final = 120  # 8 a cluster of 4, two rank tiles
_SOME_ROWS: Final = 512
_MANY_ROWS: Final = 1536
_LONG_ROW: Final = 4096  # columns of 256 threads with one unit each
_STAGES_FOR_MANY_ROWS: Final = 4
_MOST_TOKENS: Final = 72  # 66 of 4352 rows in each of 66 clusters
_BARRIER_BYTES: Final = 256
_MAXIMA_BYTES: Final = 2 * 4 * 8 * 4  # two buffers of each row's and warp's, however they split
_SWIZZLE_ALIGN_BYTES: Final = 1024


@dataclass(frozen=True)
class WgmmaQuantizeRequest:
    """One call: which product it feeds, and its sizes.

    Attributes:
        mode: "fp8" or "int8", one scale a row; or the name of an activation format, whose values
            are written exactly.
        dtype: of x, lora_down and lora_act, "float16" or "bfloat16".
        m, k: rows and columns of x.
        rank: rows of lora_down before padding; 0 where there is no low-rank branch.
        has_smooth: fp8 and int8 multiply by 1 / smooth, other modes divide by smooth.
        shift: what fp8 and int8 add to x before; other modes take their format's.
        x_is_aligned: every row of x starts at a multiple of 16 bytes.
        use_pdl: launched with programmatic dependent launch.
    """

    mode: str
    dtype: Literal["float16", "bfloat16"]
    m: int
    k: int
    rank: int
    has_smooth: bool = True
    shift: float = 0.0
    x_is_aligned: bool = True
    use_pdl: bool = False


@dataclass(frozen=True)
class WgmmaQuantizeConfig:
    """All compile-time choices; M and R stay dynamic, and K up to `units` spans.

    Attributes:
        mode, dtype, has_smooth, shift, x_is_aligned, use_pdl: as in the request.
        rank_tile: ranks of one cluster, 0 for no low-rank branch; a larger rank takes more clusters
            for the same rows, of which the first writes act.
        tokens: rows of a cluster at most, the N of a wgmma.
        cluster_k: CTAs that share rows and split K of the product.
        stages: ring slots.
        quantize_threads: threads that quantize.
        row_groups: groups of them, each with rows of its own.
        units: sixteens of columns of a thread in a row; K is at most `columns`.
        rows_at_once: rows of x that a group quantizes between two barriers.
    """

    mode: str
    dtype: Literal["float16", "bfloat16"]
    has_smooth: bool = True
    shift: float = 0.0
    x_is_aligned: bool = True
    use_pdl: bool = False
    rank_tile: int = 128
    tokens: int = 72
    cluster_k: int = 2
    stages: int = 4
    quantize_threads: int = 256
    row_groups: int = 1
    units: int = 1
    rows_at_once: int = 1

    @property
    def has_token_scale(self) -> bool:
        """Whether a row has one scale."""
        return self.mode in TOKEN_MODES

    @property
    def activation(self) -> ActivationFormat:
        """The record of an exact mode."""
        return get_activation_format(self.mode)

    @property
    def has_group_scales(self) -> bool:
        """Whether act holds integers with a float16 scale for 64 columns."""
        return not self.has_token_scale and self.activation.block_format.element != "e2m1"

    @property
    def act_bytes(self) -> int:
        """Bytes of an element of act: 1 for E4M3 and integers, 2 for float16."""
        return 1 if self.has_token_scale or self.has_group_scales else 2

    @property
    def act_dtype(self) -> str:
        """Torch's name of act's elements."""
        if self.act_bytes == 2:
            return "float16"
        return "float8_e4m3fn" if self.mode == "fp8" else "int8"

    @property
    def block_size(self) -> int:
        """Elements that share a scale in an exact mode: 16, 32 or 64."""
        return self.activation.block_format.block_size

    @property
    def target(self) -> str:
        """The PTX target."""
        return TARGET

    @property
    def product_warpgroups(self) -> int:
        """Warpgroups that multiply, 64 ranks each."""
        return -(-self.rank_tile // PRODUCT_RANKS)

    @property
    def product_threads(self) -> int:
        """Threads that multiply; the quantizing ones follow, then the warpgroup that loads."""
        return 128 * self.product_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.product_threads + self.quantize_threads + 128 * (self.rank_tile > 0)

    @property
    def row_threads(self) -> int:
        """Quantizing threads that share a row."""
        return self.quantize_threads // self.row_groups

    @property
    def span(self) -> int:
        """Columns of a row that its threads hold, a unit each."""
        return WIDTH * self.row_threads

    @property
    def columns(self) -> int:
        """The largest K."""
        return self.span * self.units

    @property
    def launch_registers(self) -> int:
        """Registers of a thread before they are shared out by role."""
        return GPU.registers_per_sm // self.threads // 8 * 8

    @property
    def product_registers(self) -> int:
        """Registers of a product thread: accumulators and addresses."""
        return max(56, -(-(self.tokens // 2 + _ADDRESS_REGISTERS) // 8) * 8)

    @property
    def quantize_registers(self) -> int:
        """Registers of a quantizing thread: what the others leave."""
        others = 128 * LOAD_REGISTERS + self.product_threads * self.product_registers
        left = self.launch_registers * self.threads - others
        return min(240, left // self.quantize_threads // 8 * 8)

    @property
    def has_shared_smooth(self) -> bool:
        """Whether factors lie in shared memory, and not in registers."""
        return self.has_smooth and self.units > _FACTOR_UNITS[self.quantize_threads]

    @property
    def lora_down_slot_bytes(self) -> int:
        """Shared memory of a block of lora_down; a wgmma reads 64 rows, however many are loaded."""
        return self.product_warpgroups * PRODUCT_RANKS * ROW_BYTES

    @property
    def loaded_bytes(self) -> int:
        """Bytes that are loaded into one slot."""
        return (self.tokens + self.rank_tile) * ROW_BYTES

    @property
    def slot_bytes(self) -> int:
        """Shared memory of one slot: lora_down, then x."""
        x_bytes = -(-self.tokens * ROW_BYTES // _SWIZZLE_ALIGN_BYTES) * _SWIZZLE_ALIGN_BYTES
        return (self.lora_down_slot_bytes + x_bytes) * (self.rank_tile > 0)

    @property
    def sum_pitch(self) -> int:
        """Float32 from one row of partial sums to the next: 4 more than needed avoid conflicts."""
        return self.rank_tile + 4

    @property
    def sums_offset(self) -> int:
        """Where partial sums lie in shared memory: float32 [row of the cluster, rank]."""
        return self.stages * self.slot_bytes

    @property
    def scales_offset(self) -> int:
        """Where scales of this CTA's rows lie, float32."""
        return self.sums_offset + 4 * self.tokens * self.sum_pitch * (self.rank_tile > 0)

    @property
    def maxima_offset(self) -> int:
        """Where maxima of rows meet: float32 [buffer, row, warp]."""
        return self.scales_offset + -(-4 * self.tokens // 16) * 16

    @property
    def barrier_offset(self) -> int:
        """Where the barriers start."""
        return self.maxima_offset + _MAXIMA_BYTES

    @property
    def smooth_offset(self) -> int:
        """Where factors lie, float32, if they do."""
        return self.barrier_offset + _BARRIER_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.smooth_offset + 4 * self.columns * self.has_shared_smooth

    def __str__(self) -> str:
        """Return the configuration in one line."""
        return (
            f"{self.mode} {self.dtype}: {self.tokens} tokens, rank tile {self.rank_tile}, cluster "
            f"{self.cluster_k}, {self.stages} stages, "
            f"{self.quantize_threads} / {self.row_groups} "
            f"quantizing threads x {self.units} units, "
            f"{self.shared_bytes} B shared"
        )


def check_legal(config: WgmmaQuantizeConfig) -> None:
    """Raise UsageError with every reason, a line each, why `config` cannot be compiled or run."""
    reasons = list(_find_reasons(config))
    if reasons:
        raise UsageError(
            f"quantize_act_wgmma cannot be built for {config!r}:\n" + "\n".join(reasons)
        )


def _find_reasons(config: WgmmaQuantizeConfig) -> Iterator[str]:
    modes = (*TOKEN_MODES, *ACTIVATION_FORMATS)
    for name, value, known in (
        ("mode", config.mode, modes),
        ("dtype", config.dtype, ("float16", "bfloat16")),
        ("rank_tile", config.rank_tile, RANK_TILES),
        ("cluster_k", config.cluster_k, CLUSTERS),
        ("stages", config.stages, tuple(range(2, MAX_STAGES + 1))),
        ("quantize_threads", config.quantize_threads, QUANTIZE_THREADS),
        ("row_groups", config.row_groups, ROW_GROUPS),
        ("units", config.units, tuple(range(1, MAX_UNITS + 1))),
        ("tokens", config.tokens, tuple(range(8, MAX_TOKENS + 1, 8))),
    ):
        if value not in known:
            yield f"{name} is {value!r}, must be one of {known}"
            return  # the sizes below need legal values
    needed = config.tokens // 2 + _WGMMA_REGISTERS
    if config.rank_tile and needed > config.launch_registers:
        yield (
            f"tokens is {config.tokens}: a product needs {needed} registers a thread, "
            f"{config.threads} threads start with {config.launch_registers}"
        )
    if config.rows_at_once * config.quantize_threads > _MAXIMA_BYTES * 4:
        yield (f"rows_at_once is {config.rows_at_once}: {_MAXIMA_BYTES // 8} maxima of warps fit")
    if config.shift and not config.has_token_scale:
        yield f"shift is {config.shift}: mode {config.mode} has its format's"
    if config.shared_bytes > GPU.shared_bytes_per_cta:
        yield (
            f"shared memory: {config.stages} slots of {config.slot_bytes} B, sums and factors need "
            f"{config.shared_bytes} B, {GPU.name} has {GPU.shared_bytes_per_cta} B a CTA"
        )


def choose_config(request: WgmmaQuantizeRequest) -> WgmmaQuantizeConfig:
    """Return the configuration for a request, by what an H200 took (docs/kernels).

    Few rows: what a CTA reads of lora_down decides, so K and ranks are split. Many rows: shared
    memory does, so a cluster has as many as its accumulators hold. K beyond one unit a thread takes
    all threads for a row, and whole rows of K for the product.
    """
    config = WgmmaQuantizeConfig(
        mode=request.mode,
        dtype=request.dtype,
        has_smooth=request.has_smooth,
        shift=request.shift,
        x_is_aligned=request.x_is_aligned,
        use_pdl=request.use_pdl,
    )
    rank_tile = next((tile for tile in RANK_TILES if tile >= request.rank), RANK_TILES[-1])
    if not rank_tile:
        config = dataclasses.replace(config, rank_tile=0, cluster_k=1)
    elif request.m <= _FEW_ROWS:
        config = dataclasses.replace(config, rank_tile=min(rank_tile, PRODUCT_RANKS), cluster_k=4)
    elif request.m <= _SOME_ROWS:
        config = dataclasses.replace(config, rank_tile=rank_tile, cluster_k=4)
    else:
        is_long = request.m > _MANY_ROWS and padded_k(request.k) > _LONG_ROW
        cluster_k = 1 if is_long and config.has_token_scale else 2
        config = dataclasses.replace(config, rank_tile=rank_tile, cluster_k=cluster_k)
    config = _share_threads(config, request)
    config = dataclasses.replace(config, tokens=_choose_tokens(config, request))
    config = dataclasses.replace(config, stages=_choose_stages(config, request))
    check_legal(config)
    return config


def _share_threads(
    config: WgmmaQuantizeConfig, request: WgmmaQuantizeRequest
) -> WgmmaQuantizeConfig:
    """Return the configuration with its quantizing threads: more where there are rows for them.

    Exact modes need registers more than threads.
    """
    columns = padded_k(request.k)
    is_long = columns > _LONG_ROW
    has_many = request.m > _MANY_ROWS or (not config.rank_tile and request.m > _SOME_ROWS)
    threads = 512 if config.has_token_scale and has_many else 256
    groups = 2 if threads == 512 and not is_long else 1
    units = -(-columns // (WIDTH * threads // groups))
    return dataclasses.replace(
        config,
        quantize_threads=threads,
        row_groups=groups,
        units=units,
        rows_at_once=2 if units == 1 and not config.has_token_scale else 1,
    )


def _choose_tokens(config: WgmmaQuantizeConfig, request: WgmmaQuantizeRequest) -> int:
    """Return the rows of a cluster where all are resident at once, or the most there can be."""
    resident = max(
        1, GPU.count_resident_clusters(config.cluster_k) // count_rank_tiles(config, request.rank)
    )
    rows = -(-request.m // resident)
    return max(8, min(-(-rows // 8) * 8, _MOST_TOKENS))


def _choose_stages(config: WgmmaQuantizeConfig, request: WgmmaQuantizeRequest) -> int:
    if not config.slot_bytes:
        return 2
    most = _STAGES_FOR_MANY_ROWS if request.m > _MANY_ROWS else MAX_STAGES
    room = GPU.shared_bytes_per_cta - dataclasses.replace(config, stages=0).shared_bytes
    blocks = -(-request.k // BLOCK_K)
    return max(2, min(most, room // config.slot_bytes, -(-blocks // config.cluster_k)))


def count_rank_tiles(config: WgmmaQuantizeConfig, rank: int) -> int:
    """Return the clusters that share rows, each with its ranks."""
    return -(-padded_rank(rank) // config.rank_tile) if config.rank_tile else 1


def padded_k(k: int) -> int:
    """Return the columns of act and of lora_down: K rounded up to 128."""
    return -(-k // K_ALIGNMENT) * K_ALIGNMENT


def padded_rank(rank: int) -> int:
    """Return the columns of lora_act: R rounded up to 32."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT
