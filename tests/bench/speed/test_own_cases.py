"""Our kernels as cases: their definitions, which exist where, and a run on a virtual GPU."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from halfbyte.bench.speed.artifacts import list_run_sources
from halfbyte.bench.speed.own_cases import list_own_cases
from halfbyte.bench.speed.own_linear import (
    OWN_MODES,
    define_output,
    fold_scales,
    make_linear,
    quantize_input,
    round_up_to_power,
)
from halfbyte.bench.speed.plan import SpeedRequest
from halfbyte.bench.speed.problem import make_problem
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.bench.speed.trial import WrongResultError, check_expected, check_trial
from halfbyte.formats.quantize import dequantize
from halfbyte.reference.w4a4_linear import w4a4_linear
from halfbyte.virtual.driver.session import cuda

SHAPE = LinearShape(5, 256, 128, 16)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["exact", "exact_int4"])
def test_exact_is_the_reference_s_w4a4_linear(name: str) -> None:
    problem = make_problem(SHAPE, torch.bfloat16, CPU, 3)
    linear = make_linear(problem, OWN_MODES[name])
    ours = define_output(problem.x, linear, OWN_MODES[name]).numpy()
    wanted = w4a4_linear(problem.x, linear)
    assert np.linalg.norm(ours - wanted) < 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_eight_bit_modes_are_closer_to_the_16_bit_input_than_four_bits(name: str) -> None:
    problem = make_problem(SHAPE, torch.bfloat16, CPU, 3)
    own = OWN_MODES[name]
    linear = make_linear(problem, own)
    wanted = problem.x.double() / linear.smooth.double()
    errors = [
        (quantize_input(problem.x, linear, OWN_MODES[which]) - wanted).norm()
        for which in (name, "exact" if name == "fp8" else "exact_int4")
    ]
    assert errors[0] < 0.4 * errors[1]


def test_a_power_of_two_is_rounded_up_and_powers_stay() -> None:
    values = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 0.0, 2.0**-140, 448.0])
    wanted = [1.0, 2.0, 1.0, 4.0, 1.0, 2.0**-126, 512.0]
    assert round_up_to_power(values).tolist() == wanted


def test_folded_scales_are_what_e4m3_makes_of_the_products() -> None:
    problem = make_problem(SHAPE, torch.bfloat16, CPU, 3)
    weight = make_linear(problem, OWN_MODES["fp8"]).weight
    folded = fold_scales(weight) / weight.global_scale.double()
    exact = dequantize(weight).double() / weight.global_scale.double()
    scaled = (
        exact / 16.0
    )  # block scales of up to 448 times 6 lie above E4M3; none becomes subnormal
    is_normal = (scaled.abs() >= 2.0**-6) & (scaled.abs() <= 448)
    in_e4m3 = scaled.to(torch.float32).to(torch.float8_e4m3fn).double() * 16.0
    assert is_normal.double().mean() > 0.5
    assert torch.equal(folded[is_normal], in_e4m3[is_normal])


def test_modes_of_a_target_are_cases_with_their_parts() -> None:
    hopper = list_own_cases("linear", "sm_90a", ("fp8", "int8"))
    assert list(hopper) == ["fp8", "fp8_gemm", "int8", "int8_gemm"]
    assert list(list_own_cases("quantize", "sm_90a", ("fp8",))) == ["fp8"]
    assert list(list_own_cases("linear", "sm_100a", ("fp8", "exact"))) == ["exact", "exact_gemm"]
    assert list_own_cases("copy", "sm_90a", ("fp8",)) == {}


def test_sources_of_a_run_are_listed_without_a_gpu_each_once() -> None:
    shapes = (LinearShape(1, 256, 256, 16), LinearShape(300, 256, 256, 16))
    request = SpeedRequest(shapes=(*shapes, shapes[0]), modes=("exact",))
    sources, refusals = list_run_sources(request, "sm_100a")
    assert {source.name for source in sources} == {"quantize_act_lora", "gemm_w4a4"}
    assert len({repr(source.config) for source in sources}) == len(sources)
    assert refusals == {}


@pytest.fixture
def b200() -> Iterator[cuda]:
    with cuda("b200") as session:
        yield session


@pytest.mark.parametrize("kind", ["linear", "quantize"])
def test_cases_run_from_prepared_launches_on_poisoned_outputs(b200: cuda, kind: str) -> None:
    problem = make_problem(SHAPE, torch.bfloat16, torch.device("cuda"), 1)
    for make in list_own_cases(kind, "sm_100a", ("exact",)).values():
        trial = make(problem)
        assert check_trial(trial) < 5e-3
        assert trial.moved_bytes > problem.x.numel() * 2


@pytest.fixture
def h200() -> Iterator[cuda]:
    with cuda("h200") as session:
        yield session


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "exact_int4",
        pytest.param("exact", marks=pytest.mark.long),
        pytest.param("int8", marks=pytest.mark.long),
    ],
)
def test_hopper_s_codes_are_compared_number_by_number(h200: cuda, name: str) -> None:
    problem = make_problem(SHAPE, torch.bfloat16, torch.device("cuda"), 1)
    trial = list_own_cases("quantize", "sm_90a", (name,))[name](problem)
    assert check_trial(trial) < 5e-3
    outputs = trial.outputs
    before = trial.expect(trial.operands, outputs)[0]
    assert (before.name, before.limit) == ("codes", 0.0)
    outputs["codes"].view(torch.uint8)[2, 40] ^= 1
    with pytest.raises(WrongResultError, match="codes: share of wrong elements"):
        check_expected(trial.expect(trial.operands, outputs)[0])
