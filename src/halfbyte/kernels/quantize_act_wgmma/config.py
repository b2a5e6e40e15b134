"""What `quantize_act_wgmma` is asked, what it is compiled for, and which of that is legal. No CuTe.

A *team* of CTAs owns a range of rows of x; each CTA of it owns a slice of K, `blocks` blocks of 64
columns, for all of them. The slice of lora_down stays in shared memory for the whole kernel, x
streams through a ring, 64 rows at a time and warpgroup, and is kept in registers from its product
until the scale of its row is known. A team is one cluster, or `groups` of them.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from halfbyte.arch.gpus import GPUS
from halfbyte.errors import UsageError
from halfbyte.formats.activation import ACTIVATION_FORMATS, ActivationFormat, get_activation_format

TARGET: Final = "sm_90a"
GPU: Final = GPUS["h200"]
TOKEN_MODES: Final = ("fp8", "int8")  # one scale a row; any other mode is an activation format
BLOCK_K: Final = 64  # columns of a block: 128 bytes of x, one swizzle span
K_ALIGNMENT: Final = 128  # columns of act and lora_down
RANK_ALIGNMENT: Final = 32
TILE_ROWS: Final = 64  # rows of one warpgroup: of a wgmma
BOX_ROWS: Final = 16  # rows of one load of x, and what ranges of rows are multiples of
BOXES: Final = TILE_ROWS // BOX_ROWS
SLOT_BYTES: Final = TILE_ROWS * BLOCK_K * 2
CONSUMER_WARPGROUPS: Final = 2
CONSUMER_THREADS: Final = 128 * CONSUMER_WARPGROUPS
THREADS: Final = 128 + CONSUMER_THREADS  # the first warpgroup loads
# Registers after setmaxnreg: 128 * (24 + 2 * 240) of the 384 * 168 that a CTA starts with.
PRODUCER_REGISTERS: Final = 24
CONSUMER_REGISTERS: Final = 240

RANK_TILES: Final = (0, 16, 32, 64, 128)
CLUSTERS: Final = (1, 2, 4, 8)
MAX_GROUPS: Final = 16
MAX_STAGES: Final = 8
MAX_BLOCKS: Final = 8  # blocks of 64 rows that a thread keeps: 16 registers each
_BARRIER_BYTES: Final = 896
_SCRATCH_BYTES: Final = 128  # a word a warp


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
    """All compile-time choices; M, K and R stay dynamic, as far as the slices of K reach.

    Attributes:
        mode, dtype, has_smooth, shift, x_is_aligned, use_pdl: as in the request.
        rank_tile: ranks of one CTA, 0 for no low-rank branch; a larger rank takes more teams for
            the same rows, of which the first writes act.
        blocks: blocks of 64 columns of one CTA.
        cluster_k: CTAs of a cluster, which split K.
        groups: clusters of a team.
        stages: ring slots of each warpgroup.
    """

    mode: str
    dtype: Literal["float16", "bfloat16"]
    has_smooth: bool = True
    shift: float = 0.0
    x_is_aligned: bool = True
    use_pdl: bool = False
    rank_tile: int = 128
    blocks: int = 8
    cluster_k: int = 8
    groups: int = 1
    stages: int = 3

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
    def threads(self) -> int:
        """Threads of a CTA."""
        return THREADS

    @property
    def team(self) -> int:
        """CTAs that share rows and split K."""
        return self.cluster_k * self.groups

    @property
    def columns(self) -> int:
        """The largest padded K."""
        return self.team * self.blocks * BLOCK_K

    @property
    def share(self) -> int:
        """Rows of a tile whose sums one CTA of a cluster adds up."""
        return TILE_ROWS // self.cluster_k

    @property
    def lora_down_bytes(self) -> int:
        """Shared memory of the slice of lora_down."""
        return self.blocks * self.rank_tile * BLOCK_K * 2

    @property
    def ring_offset(self) -> int:
        """Where the slots of x start in shared memory, behind lora_down."""
        return self.lora_down_bytes

    @property
    def sums_offset(self) -> int:
        """Where partial sums arrive: float32 [sender, row of the share, rank]."""
        return self.ring_offset + CONSUMER_WARPGROUPS * self.stages * SLOT_BYTES

    @property
    def maxima_offset(self) -> int:
        """Where maxima arrive: float32 [sender, pair of rows, 2]."""
        return self.sums_offset + 4 * TILE_ROWS * self.rank_tile

    @property
    def smooth_offset(self) -> int:
        """Where the slice of smooth lies, float32."""
        return self.maxima_offset + self.cluster_k * TILE_ROWS * 4 * self.has_token_scale

    @property
    def barrier_offset(self) -> int:
        """Where the barriers start."""
        return self.smooth_offset + self.blocks * BLOCK_K * 4 * self.has_smooth

    @property
    def scratch_offset(self) -> int:
        """Where the maxima of warps meet on the way to a dynamic global scale."""
        return self.barrier_offset + _BARRIER_BYTES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.scratch_offset + _SCRATCH_BYTES

    @property
    def kept_registers(self) -> int:
        """Registers of a thread that hold x and accumulators."""
        kept = 16 * self.blocks if self.has_token_scale else 16
        return kept + self.rank_tile // 2

    def __str__(self) -> str:
        """Return the configuration in one line."""
        return (
            f"{self.mode} {self.dtype}: {self.blocks} blocks a CTA, cluster {self.cluster_k} x "
            f"{self.groups}, rank tile {self.rank_tile}, {self.stages} stages, "
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
        ("groups", config.groups, tuple(range(1, MAX_GROUPS + 1))),
        ("stages", config.stages, tuple(range(1, MAX_STAGES + 1))),
    ):
        if value not in known:
            yield f"{name} is {value!r}, must be one of {known}"
            return  # the sizes below need legal values
    if config.blocks < 1 or (config.has_token_scale and config.blocks > MAX_BLOCKS):
        yield f"blocks is {config.blocks}: a thread keeps 1 to {MAX_BLOCKS} blocks of its rows"
    if config.groups > 1 and config.share % config.groups:
        yield f"{config.groups} groups do not divide the {config.share} rows of a CTA's share"
    if config.shift and not config.has_token_scale:
        yield f"shift is {config.shift}: mode {config.mode} has its format's"
    if config.shared_bytes > GPU.shared_bytes_per_cta:
        yield (
            f"shared memory: {config.lora_down_bytes} B of lora_down, 2 x {config.stages} slots of "
            f"{SLOT_BYTES} B, sums and scales need {config.shared_bytes} B, "
            f"{GPU.name} has {GPU.shared_bytes_per_cta} B a CTA"
        )


def choose_config(request: WgmmaQuantizeRequest) -> WgmmaQuantizeConfig:
    """Return the legal configuration of fewest `estimate_ns`."""
    blocks_of_k = padded_k(request.k) // BLOCK_K
    candidates = []
    for cluster_k, groups, rank_tile in itertools.product(
        CLUSTERS, (1, 2, 4, 8), _list_rank_tiles(request.rank)
    ):
        config = WgmmaQuantizeConfig(
            mode=request.mode,
            dtype=request.dtype,
            has_smooth=request.has_smooth,
            shift=request.shift,
            x_is_aligned=request.x_is_aligned,
            use_pdl=request.use_pdl,
            rank_tile=rank_tile,
            blocks=-(-blocks_of_k // (cluster_k * groups)),
            cluster_k=cluster_k,
            groups=groups,
            stages=1,
        )
        config = dataclasses.replace(config, stages=_choose_stages(config))
        if not any(_find_reasons(config)) and count_teams(config, request) >= 1:
            candidates.append(config)
    if not candidates:
        raise UsageError(f"quantize_act_wgmma has no legal configuration for {request!r}")
    return min(candidates, key=lambda one: (estimate_ns(request, one), one.groups, one.cluster_k))


def _list_rank_tiles(rank: int) -> tuple[int, ...]:
    if rank == 0:
        return (0,)
    return tuple(tile for tile in RANK_TILES if 0 < tile <= max(16, padded_rank(rank)))


def _choose_stages(config: WgmmaQuantizeConfig) -> int:
    room = GPU.shared_bytes_per_cta - config.shared_bytes
    most = min(MAX_STAGES, 1 + room // (CONSUMER_WARPGROUPS * SLOT_BYTES))
    return max(1, min(most, 2 * config.blocks))


def count_rank_tiles(config: WgmmaQuantizeConfig, rank: int) -> int:
    """Return the teams that share rows, each with its ranks."""
    return -(-padded_rank(rank) // config.rank_tile) if config.rank_tile else 1


def count_teams(config: WgmmaQuantizeConfig, request: WgmmaQuantizeRequest) -> int:
    """Return the teams side by side along the rows; 0 where not even one is resident."""
    resident = GPU.num_sms // config.cluster_k
    room = resident // (config.groups * count_rank_tiles(config, request.rank))
    return min(room, -(-request.m // TILE_ROWS))


# Figures of the rule below, for an H200 at 1.7 GHz; docs/kernels/quantize_act_wgmma.md.
_MEMORY_BYTES_PER_NS: Final = 4300.0
_L2_BYTES_PER_NS: Final = 5500.0
_FILL_BYTES_PER_NS: Final = 100.0  # what one SM takes in
_BLOCK_NS: Final = 110.0  # of one warpgroup and block: product, maximum, quantization
_TILE_NS: Final = 900.0  # from the last block of a tile to its last store
_LAUNCH_NS: Final = 2000.0
_GROUP_NS: Final = 1500.0  # an exchange over global memory


def estimate_ns(request: WgmmaQuantizeRequest, config: WgmmaQuantizeConfig) -> float:
    """Return the modelled time of a call; a rule to rank configurations, not a measurement."""
    teams = count_teams(config, request)
    rank_tiles = count_rank_tiles(config, request.rank)
    ctas = teams * rank_tiles * config.team
    row_units = -(-request.m // BOX_ROWS)
    tiles = -(-(-(-row_units // teams) * BOX_ROWS) // TILE_ROWS)
    columns = config.blocks * BLOCK_K
    x_bytes = 2.0 * request.m * request.k
    memory = (x_bytes + request.m * (request.k * config.act_bytes + 2 * request.rank)) / (
        _MEMORY_BYTES_PER_NS
    )
    l2 = (rank_tiles * x_bytes + ctas * config.lora_down_bytes) / _L2_BYTES_PER_NS
    fill = (2.0 * columns * tiles * TILE_ROWS + config.lora_down_bytes) / _FILL_BYTES_PER_NS
    work = -(-tiles // CONSUMER_WARPGROUPS) * (config.blocks * _BLOCK_NS + _TILE_NS)
    first = config.lora_down_bytes / _FILL_BYTES_PER_NS
    exchange = _GROUP_NS * (config.groups > 1)
    return max(memory, l2, fill, work + first) + _LAUNCH_NS + _TILE_NS + exchange


def padded_k(k: int) -> int:
    """Return the columns of act and of lora_down: K rounded up to 128."""
    return -(-k // K_ALIGNMENT) * K_ALIGNMENT


def padded_rank(rank: int) -> int:
    """Return the columns of lora_act: R rounded up to 32."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT


def count_mailbox_words(config: WgmmaQuantizeConfig, m: int, rank: int) -> int:
    """Return the 32-bit words of the mailbox through which the groups of a team meet; 0 for one.

    Each CTA has, for each tile and each other group, the maxima of 64 rows and its share of sums.
    """
    if config.groups == 1:
        return 0
    teams = GPU.num_sms // config.team
    tiles = -(-m // TILE_ROWS) + teams  # each team's last tile may be a part of one
    sums = config.share // config.groups * config.rank_tile
    words = TILE_ROWS * config.has_token_scale + sums
    return tiles * count_rank_tiles(config, rank) * config.team * config.groups * words
