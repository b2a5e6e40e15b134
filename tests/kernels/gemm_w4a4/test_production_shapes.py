"""The products of a 12-billion-parameter image model, whole outputs against float64.

Each runs the configuration that is chosen for it. One of a sixteenth of the size runs in CI.
"""

from typing import Any

import pytest

from halfbyte.kernels.gemm_w4a4.choose import GemmRequest, choose_config
from halfbyte.kernels.gemm_w4a4.config import EpilogueConfig, GemmConfig
from tests.kernels.gemm_w4a4.gemm_runs import check_gemm, compile_gemm
from tests.kernels.gemm_w4a4.operands import GemmShape, make_operands

TARGET = "sm_100a"
# (N, K, rank)
LINEARS = ((3840, 3072, 128), (3840, 15360, 128), (15360, 3840, 128), (10240, 3072, 32))
TOKENS = 4352
FEW_TOKENS = (1, 16, 64, 256)


def choose(m: int, linear: tuple[int, int, int], block_format: str, dtype: str) -> GemmConfig:
    """Return the configuration that is chosen for m tokens."""
    n, k, rank = linear
    epilogue = EpilogueConfig(has_column_scale=True, has_bias=True)
    request = GemmRequest(m, n, k, rank, block_format, dtype, dtype, epilogue)
    return choose_config(request, TARGET)


def check_product(gpu: Any, m: int, linear: tuple[int, int, int], config: GemmConfig) -> None:
    """Assert the error of one product on as many clusters as the GPU has room for."""
    n, k, rank = linear
    clusters = config.gpu.num_sms // (config.tile.num_ctas * config.tile.num_splits)
    operands = make_operands(config, GemmShape(m, n, k, clusters), rank)
    check_gemm(gpu, compile_gemm(config), operands, is_integer=False)


def test_a_sixteenth_of_a_product(b200: Any) -> None:
    linear = (3840 // 4, 3072 // 4, 128)
    check_product(b200, TOKENS, linear, choose(TOKENS, linear, "nvfp4", "float16"))


@pytest.mark.parametrize("m", FEW_TOKENS)
def test_a_sixteenth_of_a_product_for_few_tokens(b200: Any, m: int) -> None:
    linear = (10240 // 4, 3072 // 4, 32)
    check_product(b200, m, linear, choose(m, linear, "nvfp4", "bfloat16"))


@pytest.mark.long
@pytest.mark.parametrize("linear", LINEARS, ids=str)
def test_products_of_many_tokens(b200: Any, linear: tuple[int, int, int]) -> None:
    config = choose(TOKENS, linear, "nvfp4", "float16")
    assert config.tile.num_ctas == 2
    check_product(b200, TOKENS, linear, config)


@pytest.mark.long
@pytest.mark.parametrize("m", FEW_TOKENS)
@pytest.mark.parametrize("linear", LINEARS, ids=str)
def test_products_of_few_tokens(b200: Any, linear: tuple[int, int, int], m: int) -> None:
    config = choose(m, linear, "nvfp4", "float16")
    assert config.tile.swap == (m <= 64)
    check_product(b200, m, linear, config)


@pytest.mark.long
@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
def test_a_product_in_bfloat16(b200: Any, block_format: str) -> None:
    check_product(b200, TOKENS, LINEARS[0], choose(TOKENS, LINEARS[0], block_format, "bfloat16"))
