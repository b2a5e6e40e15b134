"""The activation functions of the epilogue, fed by the bias: with codes 0 the sum is the bias.

Torch's own operator in the output's dtype is the measure, against float64. Its error is taken in
three ranges apart: the large outputs would hide the small ones behind zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from halfbyte.kernels.gemm_w4a4.config import ACTIVATIONS, EpilogueConfig, GemmConfig, TileConfig
from halfbyte.kernels.gemm_w4a4.source import make_source
from tests.kernels.conftest import CompileSource
from tests.kernels.gemm_w4a4.gemm_runs import Launch, run_gemm
from tests.kernels.gemm_w4a4.operands import (
    DTYPES,
    GemmOperands,
    GemmShape,
    make_operands,
    measure_relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
}
RANGES = ((-12.0, -3.0), (-3.0, 3.0), (3.0, 60.0))
VALUES_PER_RANGE = 700
INFINITY = float("inf")


@dataclass(frozen=True)
class ActivationRun:
    """A compiled activation: name, dtype of y, and how to call it."""

    name: str
    dtype: torch.dtype
    config: GemmConfig
    gpu: Any
    launch: Launch

    def make_operands(self, bias: torch.Tensor, m: int = 1) -> GemmOperands:
        """Return operands whose sum is the bias [N] in each of m rows."""
        operands = make_operands(self.config, GemmShape(m, len(bias), 32), 0)
        operands.tensors["act_codes"].zero_()
        operands.tensors["bias"] = bias
        return operands

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """Return y of values [N] float32."""
        return run_gemm(self.gpu, self.launch, self.make_operands(values))[0]

    def wanted(self, values: torch.Tensor) -> torch.Tensor:
        """Return torch's result in the dtype of the values."""
        return FUNCTIONS[self.name](values)


@pytest.fixture(params=[(name, dtype) for name in FUNCTIONS for dtype in DTYPES], ids="-".join)
def activation(
    request: pytest.FixtureRequest, b200: Any, compile_source: CompileSource
) -> ActivationRun:
    """Return an activation in an output dtype."""
    name, dtype = request.param
    config = GemmConfig(
        "sm_100a",
        "nvfp4",
        dtype,
        TileConfig(128, 128, 1),
        epilogue=EpilogueConfig(has_bias=True, activation=name),
    )
    launch = compile_source(make_source(config))
    return ActivationRun(name, DTYPES[dtype], config, b200, launch)


def test_every_activation_is_tested() -> None:
    assert {"none", *FUNCTIONS} == set(ACTIVATIONS)


def test_error_is_at_most_twice_torchs(activation: ActivationRun) -> None:
    ranges = [torch.linspace(*ends, VALUES_PER_RANGE).to(activation.dtype) for ends in RANGES]
    found = activation.apply(torch.cat(ranges).float()).split(VALUES_PER_RANGE)
    for values, y in zip(ranges, found, strict=True):
        truth = activation.wanted(values.double()).numpy()
        limit = 2.0 * measure_relative_error(activation.wanted(values), truth)
        assert measure_relative_error(y, truth) <= limit


def test_values_of_any_size_overflow_nowhere(activation: ActivationRun) -> None:
    values = torch.tensor([-3e38, -1e20, -1e4, -1000.0, -105.0, 1000.0, 1e4, 1e20, 3e38])
    found = activation.apply(values)
    wanted = activation.wanted(values.double()).to(activation.dtype)
    assert not found.isnan().any()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert torch.equal(found.signbit(), values.signbit())  # -0.0 of negative values


def test_exponential_overflows_to_zero_between(activation: ActivationRun) -> None:
    values = -torch.arange(80.0, 106.0, 0.25)  # exp(-x) leaves float32 at 88.7
    found = activation.apply(values)
    wanted = activation.wanted(values.double()).to(activation.dtype)
    largest_lost = 89.0 / torch.finfo(torch.float32).max
    rounding = torch.finfo(activation.dtype).eps
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=largest_lost)
    assert bool(found.signbit().all())


def test_infinities_and_nan_are_torchs_and_spread_nowhere(activation: ActivationRun) -> None:
    values = torch.tensor([1.0, INFINITY, 1.0, -INFINITY, 1.0, float("nan"), 1.0])
    found = activation.apply(values)
    wanted = activation.wanted(values.double()).to(activation.dtype)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_nan_activation_spoils_its_row_alone(activation: ActivationRun) -> None:
    values = torch.linspace(-3.0, 3.0, 40)
    operands = activation.make_operands(values, m=3)
    operands.tensors["act_sf"][16] = 0x7F  # row 1: an E4M3 NaN
    y = run_gemm(activation.gpu, activation.launch, operands)
    assert y[1].isnan().all()
    assert torch.equal(y[0], activation.apply(values))
    assert torch.equal(y[2], y[0])
