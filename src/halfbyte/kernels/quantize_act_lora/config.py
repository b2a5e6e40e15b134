"""What `quantize_act_lora` is asked, what it is compiled for, and which of that is legal. No CuTe.

A CTA owns `rows` rows of x and walks over K in tiles of 64 columns. It brings each tile to shared
memory once, quantizes it from there and multiplies it by `rank_tile` rows of lora_down. A cluster
of `cluster_k` CTAs shares the rows and splits K; their partial sums meet in rank order.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from halfbyte.arch.gpus import GPUS, Gpu
from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.formats.activation import ActivationFormat, get_activation_format
from halfbyte.formats.scale_layout import padded_scale_shape

K_TILE = 64  # columns of a tile: one 128-byte row of 16-bit numbers, the span of the swizzle
WIDTH = 16  # consecutive elements that one thread quantizes; divides every block length
CODE_ALIGNMENT = 32  # a row of codes is a multiple of 16 bytes: K is padded to 32
RANK_ALIGNMENT = 8  # lora_act rows are multiples of 16 bytes: R is padded to 8
ACCESS_BYTES = 16  # one load of x or lora_down
SCALE_LAYOUTS = {"e4m3": "swizzled_128x4", "e8m0": "swizzled_128x4", "float": "linear"}

ROWS = (16, 32, 64, 128)
RANK_TILES = (0, 16, 32, 64, 128, 256)
CLUSTERS = (1, 2, 4, 8)
MAX_STAGES = 8
MAX_ACCUMULATORS = 64  # float32 registers of one thread; the rest of 255 quantizes

_WARPS = {16: 4, 32: 4, 64: 8, 128: 8}
_RANK_WARPS = {16: 4, 32: 4, 64: 4, 128: 2}  # wanted warps side by side along the rank
_NO_CLUSTER = ("sm_120a",)  # consumer Blackwell: a cluster is one CTA
_MAX_REGISTERS = 255  # of a thread
# The cost rule's figures. Thread instructions an element: PTX that the virtual GPU executes in
# nvfp4_nunchaku at rank 128 with 128 rows, an upper bound of what ptxas leaves.
_INSTRUCTIONS = 30
_INSTRUCTIONS_WITHOUT_CONVERSION = 44
_E2M1_TARGETS = ("sm_100a", "sm_103a", "sm_120a")
_LANES = 128  # instructions that an SM starts a clock
_SM_BYTES_PER_CLOCK = 64  # what one SM takes in
_L2_BYTES_PER_CLOCK = 40  # its share where all SMs read L2
_CLUSTER_CYCLES = 1000  # two cluster barriers and the loads between them
_MAX_AMAX_CTAS = 1024
_ELEMENTS_PER_AMAX_CTA = 8192


@dataclass(frozen=True)
class QuantizeRequest:
    """One call: which product it feeds, and its sizes.

    Attributes:
        mode: name of an activation format, e.g. "nvfp4_nunchaku".
        dtype: of x and lora_down, "float16" or "bfloat16".
        m, k: logical rows and columns of x.
        rank: logical rows of lora_down; 0 where there is no low-rank branch.
        target: the PTX target.
        lora_dtype: of lora_act; float32 for callers that keep the sums.
        has_smooth: divide by smooth [K] before quantizing.
        x_is_aligned: every row of x starts at a multiple of 16 bytes.
        use_pdl: launched with programmatic dependent launch.
    """

    mode: str
    dtype: Literal["float16", "bfloat16"]
    m: int
    k: int
    rank: int
    target: str
    lora_dtype: Literal["float16", "bfloat16", "float32"]
    has_smooth: bool = True
    x_is_aligned: bool = True
    use_pdl: bool = False


@dataclass(frozen=True)
class QuantizeConfig:
    """All compile-time choices; M, K and R stay dynamic.

    Attributes:
        mode, dtype, lora_dtype, target, has_smooth, x_is_aligned, use_pdl: as in QuantizeRequest.
        rows: rows of x of one CTA.
        rank_tile: columns of lora_act of one CTA, 0 for no low-rank branch; a larger rank takes
            more CTAs, of which the first quantizes and the others read x again.
        stages: tiles of K in flight.
        cluster_k: CTAs of a cluster, which split K.
    """

    mode: str
    dtype: Literal["float16", "bfloat16"]
    lora_dtype: Literal["float16", "bfloat16", "float32"]
    target: str
    has_smooth: bool = True
    x_is_aligned: bool = True
    use_pdl: bool = False
    rows: int = 64
    rank_tile: int = 64
    stages: int = 3
    cluster_k: int = 1

    @property
    def activation(self) -> ActivationFormat:
        """The record of the mode."""
        return get_activation_format(self.mode)

    @property
    def block_size(self) -> int:
        """Elements that share a scale: 16, 32 or 64."""
        return self.activation.block_format.block_size

    @property
    def is_swizzled(self) -> bool:
        """Scales are bytes in swizzled_128x4, else float16 in row-major order."""
        return SCALE_LAYOUTS[self.activation.block_format.scale] == "swizzled_128x4"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * _WARPS[self.rows]

    @property
    def rank_warps(self) -> int:
        """Warps side by side along the rank; each owns at least 16 columns."""
        return min(_RANK_WARPS[self.rows], self.rank_tile // 16) if self.rank_tile else 0

    @property
    def row_warps(self) -> int:
        """Warps along the rows; each owns at least 16 rows. The warps beyond only quantize."""
        if not self.rank_tile:
            return 0
        return min(_WARPS[self.rows] // self.rank_warps, self.rows // 16)

    @property
    def x_bytes(self) -> int:
        """Shared memory of one tile of x."""
        return self.rows * K_TILE * 2

    @property
    def lora_down_bytes(self) -> int:
        """Shared memory of one tile of lora_down."""
        return self.rank_tile * K_TILE * 2

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: x, lora_down and 64 float32 of smooth."""
        return self.x_bytes + self.lora_down_bytes + K_TILE * 4 * self.has_smooth

    @property
    def partial_pitch(self) -> int:
        """Float32 from one row of partial sums to the next; 8 more than needed avoid conflicts."""
        return self.rank_tile + 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; partial sums of a cluster lie over the finished stages."""
        partial = 4 * self.rows * self.partial_pitch if self.cluster_k > 1 else 0
        return max(self.stages * self.stage_bytes, partial)

    @property
    def accumulators(self) -> int:
        """Float32 accumulators of one thread."""
        if not self.rank_tile:
            return 0
        return self.rows * self.rank_tile // (32 * self.row_warps * self.rank_warps)

    def __str__(self) -> str:
        """Return the configuration in one line."""
        return (
            f"{self.mode} {self.dtype} -> lora {self.lora_dtype}, {self.target}: {self.rows} rows, "
            f"rank tile {self.rank_tile}, {self.stages} stages, cluster {self.cluster_k}, "
            f"{self.shared_bytes} B shared"
        )


def check_legal(config: QuantizeConfig) -> None:
    """Raise UsageError with every reason, a line each, why `config` cannot be compiled or run.

    FormatError for an unknown mode, UnsupportedHardwareError for an unknown target.
    """
    reasons = list(_find_reasons(config, find_target(config.target)))
    if reasons:
        raise UsageError(
            f"quantize_act_lora cannot be built for {config!r}:\n" + "\n".join(reasons)
        )


def _find_reasons(config: QuantizeConfig, gpu: Gpu) -> Iterator[str]:
    config.activation  # noqa: B018 - an unknown mode raises with the known ones
    for name, value, known in (
        ("dtype", config.dtype, ("float16", "bfloat16")),
        ("lora_dtype", config.lora_dtype, ("float16", "bfloat16", "float32")),
        ("rows", config.rows, ROWS),
        ("rank_tile", config.rank_tile, RANK_TILES),
        ("cluster_k", config.cluster_k, CLUSTERS),
        ("stages", config.stages, tuple(range(2, MAX_STAGES + 1))),
    ):
        if value not in known:
            yield f"{name} is {value!r}, must be one of {known}"
            return  # the sizes below need legal values
    if config.target in _NO_CLUSTER and config.cluster_k > 1:
        yield f"cluster_k is {config.cluster_k}: {config.target} has no clusters, use 1"
    if config.rank_tile == 0 and config.cluster_k > 1:
        yield f"cluster_k is {config.cluster_k}: without a rank nothing is summed, use 1"
    if config.shared_bytes > gpu.shared_bytes_per_cta:
        yield (
            f"shared memory: {config.stages} stages of {config.stage_bytes} B or partial sums need "
            f"{config.shared_bytes} B, {config.target} has {gpu.shared_bytes_per_cta} B a CTA"
        )
    if config.accumulators > MAX_ACCUMULATORS:
        yield (
            f"{config.rows} rows x rank tile {config.rank_tile}: {config.accumulators} accumulators"
            f" a thread, at most {MAX_ACCUMULATORS}"
        )


def find_target(target: str) -> Gpu:
    """Return the record of a GPU of this PTX target; UnsupportedHardwareError if none."""
    for gpu in GPUS.values():
        if gpu.target == target:
            return gpu
    known = ", ".join(gpu.target for gpu in GPUS.values())
    raise UnsupportedHardwareError(
        f"quantize_act_lora: target {target!r} is unknown; it compiles for {known}"
    )


def choose_config(request: QuantizeRequest) -> QuantizeConfig:
    """Return the legal configuration of fewest `estimate_cycles`; of equals, the fewest CTAs."""
    gpu = find_target(request.target)
    rank_tile = _choose_rank_tile(request.rank)
    candidates = []
    for rows, cluster_k in itertools.product(ROWS, CLUSTERS):
        config = QuantizeConfig(
            mode=request.mode,
            dtype=request.dtype,
            lora_dtype=request.lora_dtype,
            target=request.target,
            has_smooth=request.has_smooth,
            x_is_aligned=request.x_is_aligned,
            use_pdl=request.use_pdl,
            rows=rows,
            rank_tile=rank_tile,
            stages=2,
            cluster_k=cluster_k,
        )
        config = dataclasses.replace(config, stages=_choose_stages(config, gpu))
        if not any(_find_reasons(config, gpu)):
            candidates.append(config)
    if not candidates:
        raise UsageError(f"quantize_act_lora has no legal configuration for {request!r}")
    return min(
        candidates, key=lambda one: (estimate_cycles(request, one), one.cluster_k, -one.rows)
    )


def estimate_cycles(request: QuantizeRequest, config: QuantizeConfig) -> float:
    """Return the modelled SM clocks of a call; a rule to rank configurations, not a measurement.

    The slowest of arithmetic, what one SM takes in, and what all take from L2 (lora_down is read
    once per row tile), plus what a cluster needs to add up its partial sums.
    """
    gpu = find_target(config.target)
    columns = -(-request.k // (K_TILE * config.cluster_k)) * K_TILE
    num_ctas = -(-request.m // config.rows) * config.cluster_k
    waves = -(-num_ctas // gpu.num_sms)
    has_conversion = config.target in _E2M1_TARGETS
    instructions = _INSTRUCTIONS if has_conversion else _INSTRUCTIONS_WITHOUT_CONVERSION
    arithmetic = waves * config.rows * columns * instructions / _LANES
    loaded = 2.0 * columns * (config.rows + config.rank_tile)
    one_sm = waves * loaded / _SM_BYTES_PER_CLOCK
    all_sms = num_ctas * loaded / (gpu.num_sms * _L2_BYTES_PER_CLOCK)
    sums = 0.0
    if config.cluster_k > 1:
        partial_bytes = 4 * config.rows * config.rank_tile
        sums = waves * (_CLUSTER_CYCLES + 2 * partial_bytes / _SM_BYTES_PER_CLOCK)
    return max(arithmetic, one_sm, all_sms) + sums


def _choose_rank_tile(rank: int) -> int:
    return next((tile for tile in RANK_TILES if tile >= rank), RANK_TILES[-1])


def _choose_stages(config: QuantizeConfig, gpu: Gpu) -> int:
    # Two CTAs an SM where the registers of both fit, however many they take.
    fits_twice = 2 * config.threads * _MAX_REGISTERS <= gpu.registers_per_sm
    ctas_per_sm = 2 if fits_twice else 1
    share = gpu.shared_bytes_per_sm // ctas_per_sm - gpu.reserved_shared_bytes
    return min(MAX_STAGES // 2, max(2, share // config.stage_bytes))


def padded_k(k: int) -> int:
    """Return the columns of act_codes times two: K rounded up to 32."""
    return -(-k // CODE_ALIGNMENT) * CODE_ALIGNMENT


def padded_rank(rank: int) -> int:
    """Return the columns of lora_act: R rounded up to 8."""
    return -(-rank // RANK_ALIGNMENT) * RANK_ALIGNMENT


def act_scale_shape(mode: str, m: int, k: int) -> tuple[int, int]:
    """Return the shape of act_sf [padded rows, padded blocks], in bytes or float16.

    Byte scales (NVFP4, MXFP4) lie in swizzled_128x4, float16 ones (INT4) row-major [M, blocks].
    """
    block_format = get_activation_format(mode).block_format
    return padded_scale_shape(m, block_format.num_blocks(k), SCALE_LAYOUTS[block_format.scale])


def count_amax_ctas(m: int, k: int, target: str) -> int:
    """Return the CTAs of the first pass of a dynamic mode: the length of partial_amax."""
    wanted = -(-m * k // _ELEMENTS_PER_AMAX_CTA)
    return max(1, min(wanted, 4 * find_target(target).num_sms, _MAX_AMAX_CTAS))
