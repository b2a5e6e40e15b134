"""Tuning on a virtual H200 and a fake clock: wrong candidates fall out, the fastest is kept."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from halfbyte.bench.speed import tune
from halfbyte.bench.speed.artifacts import list_run_sources
from halfbyte.bench.speed.plan import SpeedRequest
from halfbyte.bench.speed.run import Bench
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.bench.speed.trial import Expected, WrongResultError
from halfbyte.kernels.gemm_w4_wgmma.choose import choose_config, list_candidates
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig, WgmmaGemmRequest
from halfbyte.virtual.driver.session import cuda
from tests.bench.speed.fake_device import FakeDevice
from tests.bench.speed.test_run import make_bench

SHAPE = LinearShape(5, 256, 256, 16)


@pytest.fixture
def h200() -> Iterator[cuda]:
    with cuda("h200") as session:
        yield session


def make_gpu_bench(device: FakeDevice, said: list[str]) -> Bench:
    return replace(make_bench(device), place=torch.device("cuda"), say=said.append)


def make_request(shape: LinearShape, *, use_pdl: bool = True) -> WgmmaGemmRequest:
    return WgmmaGemmRequest(
        *(shape.m, shape.n, shape.k, shape.rank),
        mode="fp8",
        weight="e2m1",
        out_dtype="bfloat16",
        lora_dtype="bfloat16",
        has_bias=True,
        use_pdl=use_pdl,
    )


def list_two(request: WgmmaGemmRequest) -> list[WgmmaGemmConfig]:
    config = replace(choose_config(request), stages=4, splits=1)
    illegal = replace(config, stages=999)
    return [replace(config, tokens=16), illegal, replace(config, tokens=32)]


def test_the_fastest_candidate_is_kept_with_what_it_took(
    h200: cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "list_candidates", list_two)
    said: list[str] = []
    choices = list(tune.tune_shapes(make_gpu_bench(FakeDevice(), said), [SHAPE], ("fp8",)))
    assert len(choices) == 1, said
    choice = choices[0]
    assert (choice.m, choice.n, choice.k, choice.rank) == (5, 256, 256, 16)
    assert (choice.mode, choice.weight, choice.tokens, choice.splits) == ("fp8", "e2m1", 16, 1)
    config = list_two(make_request(SHAPE))[0]
    assert all(getattr(config, name) == value for name, value in choice.extra.items())
    assert choice.gemm_us == choice.bf16_us == pytest.approx(500.0)
    assert choice.gpu == torch.cuda.get_device_name()
    assert said[-1].startswith("fp8 5x256x256x16: 16 tokens")


def test_a_wrong_candidate_is_named_and_no_choice_is_made_of_none(
    h200: cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "list_candidates", list_two)

    def refuse(expected: Expected) -> float:
        raise WrongResultError("relative error nan")

    monkeypatch.setattr(tune, "check_expected", refuse)
    said: list[str] = []
    assert list(tune.tune_shapes(make_gpu_bench(FakeDevice(), said), [SHAPE], ("fp8",))) == []
    assert sum("wrong: relative error nan" in line for line in said) == 2
    assert "no candidate" in said[-1]


def test_all_candidates_of_a_tuning_are_among_its_sources() -> None:
    request = SpeedRequest(kinds=("tune",), shapes=(SHAPE,), modes=("fp8",))
    sources, refusals = list_run_sources(request, "sm_90a")
    assert refusals == {}
    configs = {source.config for source in sources if source.name == tune.TUNED_KERNEL}
    chosen = next(config for config in configs if isinstance(config, WgmmaGemmConfig))
    product = make_request(SHAPE, use_pdl=chosen.use_pdl)
    assert set(list_candidates(product)) <= configs
