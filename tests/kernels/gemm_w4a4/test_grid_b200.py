"""The GEMM for sm_100a on a virtual B200: any two choices meet; all do in the long run."""

from typing import Any

import pytest

from halfbyte.kernels.gemm_w4a4.config import LARGE_TILES, OUT_DTYPES, TileConfig
from tests.kernels.gemm_w4a4.gemm_runs import check_cases
from tests.kernels.gemm_w4a4.grid import (
    RANKS,
    SHAPES,
    GridCase,
    list_full_configs,
    list_pairwise_configs,
    list_shape_cases,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TARGET = "sm_100a"
PAIRWISE = list_pairwise_configs(TARGET)


@pytest.mark.parametrize("number", range(len(PAIRWISE)))
def test_any_two_choices_together(b200: Any, number: int) -> None:
    check_cases(b200, PAIRWISE[number], list_shape_cases(PAIRWISE[number], number))


@pytest.mark.long
@pytest.mark.parametrize("scheduler", ["static", "clc"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("tile", LARGE_TILES, ids=str)
def test_full_product(
    b200: Any, tile: TileConfig, block_format: str, out_dtype: str, scheduler: str
) -> None:
    configs = list_full_configs(TARGET, tile, block_format, out_dtype, scheduler)
    for number, config in enumerate(configs):
        ranks = RANKS[config.low_rank.chunk if config.low_rank is not None else 0]
        cases = [
            GridCase(rank, SHAPES[(number + 2 * index) % len(SHAPES)], (number + index) % 2 == 0)
            for index, rank in enumerate(ranks)
        ]
        check_cases(b200, config, cases)
