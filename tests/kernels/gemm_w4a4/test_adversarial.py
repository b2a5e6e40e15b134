"""Many tiles per CTA while waits fail, latencies vary and warps take turns the other way.

The virtual GPU has two SMs here, so that each CTA comes by its tiles one after the other: rings
wrap many times, accumulators change hands for each tile, and cluster launch control has tiles to
hand out. A wrong phase, a missing arrival or a slot that is reused early hangs, is found, or
changes bits.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from halfbyte.device.accumulator_pair import AccumulatorPair
from halfbyte.device.output_store import OutputStore
from halfbyte.kernels.gemm_w4a4.config import (
    LARGE_TILES,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
)
from tests.kernels.gemm_w4a4.contest import RANK, Contest, open_small_gpu, start_contest
from tests.kernels.gemm_w4a4.gemm_runs import run_gemm
from tests.kernels.gemm_w4a4.operands import GemmShape, make_operands

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_SMS = 2
# With three blocks of K the epilogue waits for the products, with one the products for it.
EPILOGUE_WAITS, PRODUCTS_WAIT = 520, 32
LARGEST = GemmConfig(
    "sm_100a",
    "nvfp4",
    "float16",
    TileConfig(256, 256, 2),
    LowRankConfig("float16"),
    EpilogueConfig(has_column_scale=True, has_bias=True),
)
SCHEDULERS = ("static", "clc")
PLACEMENTS = ("tail", "spread", "own_ring")


@pytest.fixture(scope="module")
def small_gpu() -> Iterator[Any]:
    """Return the session of a B200 with two SMs."""
    with open_small_gpu(NUM_SMS) as gpu:
        yield gpu


def make_shape(tile: TileConfig, tiles_per_cta: int, k: int) -> GemmShape:
    """Return a ragged shape of which each cluster on the two SMs has that many tiles."""
    clusters = NUM_SMS // tile.num_ctas
    rows = {20: 4, 100: 10}[tiles_per_cta]
    columns = tiles_per_cta * clusters // rows
    return GemmShape(rows * tile.m - 45, columns * tile.n - 101, k, max_clusters=clusters)


def start_tiles(
    gpu: Any, config: GemmConfig, tiles_per_cta: int, k: int = EPILOGUE_WAITS
) -> Contest:
    """Start a contest in which each cluster has that many tiles."""
    return start_contest(gpu, config, make_shape(config.tile, tiles_per_cta, k))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tile", LARGE_TILES, ids=str)
def test_twenty_tiles_per_cta(small_gpu: Any, tile: TileConfig, scheduler: Any) -> None:
    config = replace(LARGEST, tile=tile, scheduler=scheduler)
    contest = start_tiles(small_gpu, config, 20)
    other = contest.repeat(make_shape(tile, 20, PRODUCTS_WAIT))
    for seed in (1, 2):
        contest.check_seed(seed)
        other.check_seed(seed)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hundred_tiles_per_cta(small_gpu: Any, scheduler: Any) -> None:
    contest = start_tiles(small_gpu, replace(LARGEST, scheduler=scheduler), 100)
    for seed in (1, 2):
        contest.check_seed(seed)


@pytest.mark.parametrize("tile", LARGE_TILES, ids=str)
def test_running_clusters_take_over_the_tiles_of_waiting_ones(
    small_gpu: Any, tile: TileConfig
) -> None:
    """A cluster that starts for each tile would run the prologue for each: more instructions."""
    contest = start_tiles(small_gpu, replace(LARGEST, tile=tile, scheduler="clc"), 20)
    one_tile = GemmShape(tile.m, tile.n, contest.operands.shape.k)
    operands = make_operands(contest.operands.config, one_tile, RANK)
    run_gemm(small_gpu, contest.launch, operands)
    *_, many, one = (record.instructions for record in small_gpu.log)
    num_tiles = 20 * NUM_SMS // tile.num_ctas
    assert many < 0.95 * num_tiles * one


@pytest.mark.parametrize("tile", [TileConfig(128, 128, 1), TileConfig(256, 128, 2)], ids=str)
def test_an_accumulator_that_is_given_back_early_is_found(
    small_gpu: Any, tile: TileConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AccumulatorPair, "is_free_after", lambda _, part, *sizes: part == 0)
    with pytest.raises(AssertionError, match="tensor-memory-race"):
        start_tiles(small_gpu, replace(LARGEST, tile=tile), 20, PRODUCTS_WAIT)


def test_a_staging_slot_that_is_not_waited_for_is_found(
    small_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputStore, "wait_for_slot", lambda *_: None)
    contest = start_tiles(small_gpu, LARGEST, 20)
    with pytest.raises(AssertionError, match="write-in-flight"):
        contest.check_seed(1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("placement", "tiles_per_cta"), [*((one, 20) for one in PLACEMENTS), ("tail", 100)]
)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("tile", LARGE_TILES, ids=str)
def test_twenty_seeds(
    small_gpu: Any, tile: TileConfig, scheduler: Any, placement: Any, tiles_per_cta: int
) -> None:
    low_rank = LowRankConfig("float16", placement=placement)
    config = replace(LARGEST, tile=tile, scheduler=scheduler, low_rank=low_rank)
    contest = start_tiles(small_gpu, config, tiles_per_cta)
    other = contest.repeat(make_shape(tile, tiles_per_cta, PRODUCTS_WAIT))
    for seed in range(1, 21):
        contest.check_seed(seed)
        other.check_seed(seed)
