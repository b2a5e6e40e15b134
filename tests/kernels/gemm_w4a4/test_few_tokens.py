"""The GEMM for at most 64 tokens on a virtual B200: swapped operands, K split over a cluster."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.choose import (
    GemmRequest,
    check_request,
    choose_config,
    count_resident_clusters,
)
from halfbyte.kernels.gemm_w4a4.config import (
    ACTIVATIONS,
    FEW_TOKENS,
    OUT_DTYPES,
    SPLITS,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
    check_legal,
)
from halfbyte.virtual.device import LaunchOptions
from tests.covering_array import make_covering_array
from tests.kernels.gemm_w4a4.gemm_runs import check_cases, check_gemm, compile_gemm, run_gemm
from tests.kernels.gemm_w4a4.grid import FACTORS, GridCase, make_config
from tests.kernels.gemm_w4a4.operands import GemmShape, make_operands

pytestmark = pytest.mark.usefixtures("one_thread")

AXES: Final[dict[str, tuple[Any, ...]]] = {
    "num_splits": SPLITS,
    "tokens": FEW_TOKENS,
    "low_rank": ((0, "tail"), (32, "tail"), (64, "tail"), (64, "spread")),
    "activation": ACTIVATIONS,
    "factors": tuple(FACTORS),
    "out_dtype": OUT_DTYPES,
    "lora_dtype": OUT_DTYPES,
    "block_format": ("nvfp4", "mxfp4"),
    "has_alpha": (False, True),
    "use_pdl": (False, True),
}
TOKENS: Final = {16: (1, 3, 16), 32: (17, 32, 3), 64: (33, 64, 1)}
RANKS: Final = {0: (0, 0), 32: (16, 24), 64: (72, 200)}
# N, K and clusters of the grid. K of 32 leaves CTAs without a block of K; the last two shapes have
# more tiles than clusters.
PRODUCTS: Final = ((1, 32, 9), (100, 1000, 9), (128, 2048, 9), (520, 100, 1), (300, 1000, 2))
SIXTEEN_TOKENS: Final = GemmConfig(
    "sm_100a",
    "nvfp4",
    "float16",
    TileConfig(128, 16, 1, swap=True),
    LowRankConfig("float16"),
    EpilogueConfig(has_column_scale=True, has_bias=True),
)


def make_tile(tokens: int, num_splits: int) -> TileConfig:
    return TileConfig(128, tokens, 1, swap=True, num_splits=num_splits)


def make_few_tokens_config(row: dict[str, Any]) -> GemmConfig:
    tile = make_tile(row["tokens"], row["num_splits"])
    return make_config(row | {"tile": tile, "target": "sm_100a", "scheduler": "static"})


def list_cases(config: GemmConfig, start: int) -> Iterator[GridCase]:
    """Yield every product once, the numbers of tokens, ranks and kinds of data in turn."""
    tokens = TOKENS[config.tile.n]
    ranks = RANKS[config.low_rank.chunk if config.low_rank is not None else 0]
    for number, (n, k, clusters) in enumerate(PRODUCTS, start):
        shape = GemmShape(tokens[number % len(tokens)], n, k, max_clusters=clusters)
        is_integer = number % 2 == 0 and config.epilogue.activation == "none"
        yield GridCase(ranks[number % 2], shape, is_integer)


CONFIGS: Final = [make_few_tokens_config(row) for row in make_covering_array(AXES)]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_any_two_choices_together(b200: Any, number: int) -> None:
    check_cases(b200, CONFIGS[number], list_cases(CONFIGS[number], number))


@pytest.mark.long
@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("tokens", FEW_TOKENS)
def test_any_two_choices_with_every_tile(b200: Any, tokens: int, num_splits: int) -> None:
    axes = {name: values for name, values in AXES.items() if name not in ("num_splits", "tokens")}
    axes["low_rank"] = (*axes["low_rank"], (64, "own_ring"))
    for number, row in enumerate(make_covering_array(axes)):
        config = make_few_tokens_config(row | {"tokens": tokens, "num_splits": num_splits})
        check_cases(b200, config, list_cases(config, number))


def test_cluster_launch_control_hands_out_whole_tiles(b200: Any) -> None:
    config = replace(SIXTEEN_TOKENS, scheduler="clc")
    check_cases(b200, config, [GridCase(72, GemmShape(16, 1300, 520), True)])


@pytest.mark.parametrize("num_splits", [1, 2, 8])
def test_same_bits_on_every_schedule(b200: Any, num_splits: int) -> None:
    """Random data, whose float32 sums depend on the order of additions; 6 tiles a cluster."""
    config = replace(SIXTEEN_TOKENS, tile=make_tile(32, num_splits))
    launch = compile_gemm(config)
    operands = make_operands(config, GemmShape(19, 11 * 128 + 5, 4100, max_clusters=2), rank=72)
    check_gemm(b200, launch, operands, is_integer=False)
    wanted = run_gemm(b200, launch, operands).view(torch.int16)
    for seed in range(1, 4):
        for reverse_warps in (False, True):
            b200.runtime.options = LaunchOptions(
                adversarial_try_wait=True, latency_seed=seed, reverse_warps=reverse_warps
            )
            try:
                y = run_gemm(b200, launch, operands)
            finally:
                b200.runtime.options = None
            assert torch.equal(y.view(torch.int16), wanted), f"{seed=} {reverse_warps=}"


def test_partial_sums_are_added_in_rank_order(b200: Any) -> None:
    """2^24, 1, 1 and -2^24 are 0 in this order alone: 2^24 + 1 is 2^24 in float32."""
    config = replace(
        SIXTEEN_TOKENS, tile=make_tile(16, 4), low_rank=None, epilogue=EpilogueConfig()
    )
    operands = make_operands(config, GemmShape(5, 130, 4 * 256), rank=0)
    tensors = operands.tensors
    # E4M3 1, and 256 in the first 16 codes of the first and the last block of 256: 0x78. A tile of
    # scales is 4 blocks of 16 codes for 128 rows; the first byte of each row's four is code 0's.
    for name, rows in (("act", 5), ("weight", 130)):
        codes = torch.zeros(rows, 4 * 128, dtype=torch.uint8)
        codes[:, 128] = codes[:, 256] = 0x02  # 1, at k = 256 and 512
        codes[:, :8] = codes[:, 384:392] = 0x66  # 4, at 16 k from 0 and from 768
        if name == "weight":
            codes[:, 384:392] = 0xEE  # -4
        sf = torch.full((-(-rows // 128), 16, 32, 4, 4), 0x38, dtype=torch.uint8)
        sf[:, [0, 12], :, :, 0] = 0x78
        tensors[f"{name}_codes"], tensors[f"{name}_sf"] = codes, sf.flatten()
    y = run_gemm(b200, compile_gemm(config), operands)
    assert torch.equal(y, torch.zeros_like(y))


def delay_every_other_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the epilogue of CTAs with odd numbers come late to its reading of partial sums."""
    import cutlass
    import cutlass.cute as cute

    from halfbyte.device.cluster_sum import ClusterSum
    from halfbyte.device.inline_ptx import emit_memory_ptx

    add_up = ClusterSum.add_up

    @cute.jit
    def add_up_late(self: Any, position: Any, row: Any) -> Any:
        if cute.arch.block_idx()[0] % 2 == 1:
            for _ in cutlass.range(100, unroll=1):
                emit_memory_ptx("nanosleep.u32 1000;", (), ())
        return add_up(self, position, row)

    monkeypatch.setattr(ClusterSum, "add_up", add_up_late)


def test_partial_sums_wait_until_a_slow_cta_has_read_the_previous_ones(
    b200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay_every_other_cta(monkeypatch)
    config = replace(SIXTEEN_TOKENS, tile=make_tile(16, 4))
    operands = make_operands(config, GemmShape(16, 700, 1024, max_clusters=1), 72, is_integer=True)
    check_gemm(b200, compile_gemm(config), operands, is_integer=True)


@pytest.mark.parametrize("k", [1, 256, 257])
def test_cta_without_a_block_of_k_adds_zeros(b200: Any, compile_source: Any, k: int) -> None:
    config = replace(SIXTEEN_TOKENS, tile=make_tile(64, 8))
    operands = make_operands(config, GemmShape(64, 129, k), rank=16, is_integer=True)
    check_gemm(b200, compile_gemm(config), operands, is_integer=True)


def make_request(m: int, n: int = 3840, k: int = 3840, rank: int = 32) -> GemmRequest:
    return GemmRequest(m, n, k, rank, "nvfp4", "float16", "float16", SIXTEEN_TOKENS.epilogue)


@pytest.mark.parametrize(
    ("request_", "config", "message"),
    [
        (make_request(17), SIXTEEN_TOKENS, "m 17: .* room for 16 tokens"),
        (
            make_request(1, k=500),
            replace(SIXTEEN_TOKENS, tile=make_tile(16, 4)),
            "k 500: 2 blocks of 256 for the 4 CTAs",
        ),
        (make_request(1, rank=0), SIXTEEN_TOKENS, "rank 0: .* with a low-rank"),
        (make_request(1), replace(SIXTEEN_TOKENS, low_rank=None), "rank 32: .* with no low-rank"),
        (
            make_request(1),
            replace(SIXTEEN_TOKENS, low_rank=LowRankConfig("bfloat16")),
            "lora_dtype",
        ),
        (make_request(1), replace(SIXTEEN_TOKENS, block_format="mxfp4"), "block_format"),
        (make_request(1), replace(SIXTEEN_TOKENS, epilogue=EpilogueConfig()), "epilogue"),
        (make_request(0), SIXTEEN_TOKENS, "m 0.*nothing to multiply"),
    ],
    ids=["tokens", "splits", "no-rank", "rank", "lora-dtype", "format", "epilogue", "empty"],
)
def test_request_that_a_kernel_does_not_compute_is_refused(
    request_: GemmRequest, config: GemmConfig, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        check_request(config, request_)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (make_tile(8, 1), "16, 32, 64"),
        (make_tile(128, 1), "16, 32, 64"),
        (make_tile(16, 3), "portable cluster"),
        (make_tile(16, 16), "portable cluster"),
        (TileConfig(256, 32, 2, swap=True), "one CTA"),
        (TileConfig(128, 128, 1, num_splits=2), "swapped tiles only"),
    ],
    ids=str,
)
def test_tile_that_does_not_exist_is_refused(tile: TileConfig, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_legal(replace(SIXTEEN_TOKENS, tile=tile))


def test_split_tiles_are_not_handed_out_one_by_one() -> None:
    with pytest.raises(FormatError, match="one cluster"):
        check_legal(replace(SIXTEEN_TOKENS, tile=make_tile(16, 2), scheduler="clc"))


@pytest.mark.parametrize("n", [1, 576, 3840, 15360, 57344])
@pytest.mark.parametrize("k", [1, 100, 576, 3840, 15360])
def test_chosen_configuration_is_legal_and_computes_the_request(n: int, k: int) -> None:
    for m in range(1, 66):
        for rank in (0, 16, 128):
            request = make_request(m, n, k, rank)
            config = choose_config(request, "sm_100a")
            check_legal(config)
            check_request(config, request)
            assert config.tile.swap == (m <= 64)


@pytest.mark.parametrize(("m", "tokens"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64)])
def test_tile_has_room_for_the_tokens_and_not_for_many_more(m: int, tokens: int) -> None:
    assert choose_config(make_request(m), "sm_100a").tile.n == tokens


def test_k_is_split_where_few_tiles_leave_memory_idle() -> None:
    """One tile: as many SMs as can share it. 120: one SM each takes all that HBM gives.."""
    assert choose_config(make_request(1, n=128), "sm_100a").tile.num_splits == 8
    assert choose_config(make_request(1, n=120 * 128), "sm_100a").tile.num_splits == 1
    few = choose_config(make_request(1), "sm_100a")
    assert few.tile.num_splits > 1
    assert count_resident_clusters(few) >= 30
