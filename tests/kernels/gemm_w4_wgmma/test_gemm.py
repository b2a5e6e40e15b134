"""The Hopper GEMM on a virtual H200: any two choices meet; any three do in the long run."""

from typing import Any

import pytest

from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig
from tests.kernels.gemm_w4_wgmma.gemm_runs import check_gemm, compile_gemm
from tests.kernels.gemm_w4_wgmma.grid import list_cases, list_pairwise_configs

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRWISE = list_pairwise_configs()


def check_cases(gpu: Any, config: WgmmaGemmConfig, start: int) -> None:
    """Compile a configuration and check its cases; a failure names its case."""
    launch = compile_gemm(config)
    for shape, is_integer in list_cases(config, start):
        try:
            check_gemm(gpu, launch, config, shape, is_integer)
        except Exception as error:
            raise AssertionError(f"{shape} of {config}: {error}") from error


@pytest.mark.parametrize("number", range(len(PAIRWISE)))
def test_any_two_choices_together(h200: Any, number: int) -> None:
    check_cases(h200, PAIRWISE[number], number)


@pytest.mark.long
def test_any_three_choices_together(h200: Any) -> None:
    for number, config in enumerate(list_pairwise_configs(3)):
        check_cases(h200, config, number)
