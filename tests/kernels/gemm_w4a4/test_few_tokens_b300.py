"""The GEMM for at most 64 tokens on a virtual B300: every tile once."""

from dataclasses import replace
from typing import Any

import pytest

from halfbyte.kernels.gemm_w4a4.config import (
    FEW_TOKENS,
    SPLITS,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
)
from tests.kernels.gemm_w4a4.gemm_runs import check_cases
from tests.kernels.gemm_w4a4.grid import GridCase
from tests.kernels.gemm_w4a4.operands import GemmShape

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = GemmConfig(
    "sm_103a",
    "nvfp4",
    "bfloat16",
    TileConfig(128, 16, 1, swap=True),
    LowRankConfig("bfloat16"),
    EpilogueConfig(has_column_scale=True, has_bias=True),
)


@pytest.mark.parametrize(
    ("tokens", "num_splits"), [(FEW_TOKENS[number % 3], SPLITS[number]) for number in range(4)]
)
def test_tile_on_sm_103a(b300: Any, tokens: int, num_splits: int) -> None:
    tile = TileConfig(128, tokens, 1, swap=True, num_splits=num_splits)
    shape = GemmShape(tokens - 3, 259, 2100, max_clusters=2)
    cases = [GridCase(72, shape, is_integer) for is_integer in (True, False)]
    check_cases(b300, replace(CONFIG, tile=tile), cases)
