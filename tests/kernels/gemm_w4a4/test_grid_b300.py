"""The GEMM for sm_103a on a virtual B300: its share of the pairs; three choices in the long run."""

from typing import Any

import pytest

from tests.kernels.gemm_w4a4.gemm_runs import check_cases
from tests.kernels.gemm_w4a4.grid import list_pairwise_configs, list_shape_cases

pytestmark = pytest.mark.usefixtures("one_thread")
TARGET = "sm_103a"
PAIRWISE = list_pairwise_configs(TARGET)


@pytest.mark.parametrize("number", range(len(PAIRWISE)))
def test_any_two_choices_together(b300: Any, number: int) -> None:
    check_cases(b300, PAIRWISE[number], list_shape_cases(PAIRWISE[number], number))


@pytest.mark.long
def test_any_three_choices_together(b300: Any) -> None:
    configs = list_pairwise_configs(TARGET, strength=3)
    for number, config in enumerate(configs):
        check_cases(b300, config, list_shape_cases(config, number))
