"""Swapped tiles, many to a CTA: the sum over a cluster under adversarial waits and latencies.

The virtual GPU has eight SMs here: one cluster of eight CTAs that share K, or eight of one.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    FEW_TOKENS,
    SPLITS,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
)
from tests.kernels.gemm_w4a4.contest import Contest, open_small_gpu, start_contest
from tests.kernels.gemm_w4a4.operands import GemmShape

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_SMS = 8


@pytest.fixture(scope="module")
def small_gpu() -> Iterator[Any]:
    """Return the session of a B200 with eight SMs."""
    with open_small_gpu(NUM_SMS) as gpu:
        yield gpu


def start_tiles(gpu: Any, tile: TileConfig, tiles_per_cta: int, scheduler: Any) -> Contest:
    """Start a contest of all but one token of a tile, over that many tiles of each cluster."""
    config = GemmConfig(
        "sm_100a",
        "nvfp4",
        "float16",
        tile,
        LowRankConfig("float16"),
        EpilogueConfig(has_column_scale=True, has_bias=True),
        scheduler=scheduler,
    )
    clusters = NUM_SMS // tile.num_splits
    n = tiles_per_cta * clusters * tile.m - 37
    k = (tile.num_splits + 1) * BLOCK_K - 50  # one CTA has two blocks
    return start_contest(gpu, config, GemmShape(tile.n - 1, n, k, clusters))


def make_tile(tokens: int, num_splits: int) -> TileConfig:
    """Return a swapped tile."""
    return TileConfig(128, tokens, 1, swap=True, num_splits=num_splits)


@pytest.mark.parametrize(
    ("tokens", "num_splits", "scheduler"),
    [(16, 1, "clc"), (16, 8, "static"), (64, 1, "static"), (64, 4, "static")],
)
def test_twenty_tiles_per_cta(small_gpu: Any, tokens: int, num_splits: int, scheduler: Any) -> None:
    contest = start_tiles(small_gpu, make_tile(tokens, num_splits), 20, scheduler)
    for seed in (1, 2):
        contest.check_seed(seed)


@pytest.mark.long
@pytest.mark.parametrize("tiles_per_cta", [20, 100])
@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("tokens", FEW_TOKENS)
def test_twenty_seeds(small_gpu: Any, tokens: int, num_splits: int, tiles_per_cta: int) -> None:
    for scheduler in ("static", "clc") if num_splits == 1 else ("static",):
        contest = start_tiles(small_gpu, make_tile(tokens, num_splits), tiles_per_cta, scheduler)
        for seed in range(1, 21):
            contest.check_seed(seed)
