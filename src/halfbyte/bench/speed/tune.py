"""Times every candidate configuration of the Hopper GEMM and keeps the fastest right one."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from halfbyte.bench.speed.own_cases import OwnLaunches, record_own
from halfbyte.bench.speed.own_linear import OWN_MODES, OwnMode
from halfbyte.bench.speed.peers import make_cublas
from halfbyte.bench.speed.problem import Problem, make_problem
from halfbyte.bench.speed.run import Bench
from halfbyte.bench.speed.settings import LinearShape, count_sets
from halfbyte.bench.speed.steady_state import CaseTiming, measure_cases
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import WrongResultError, check_expected, make_sets, poison
from halfbyte.bench.speed.tune_table import TunedChoice, choose_fastest
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.gemm_w4_wgmma.choose import count_resident_clusters, list_candidates
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig, WgmmaGemmRequest
from halfbyte.kernels.gemm_w4_wgmma.source import make_source
from halfbyte.runtime.run_kernel import prepare_kernel

_QUICK_WARMUP_MS = 30.0  # of one candidate; the winner is timed again by the full protocol
_NUM_FINALISTS = 6  # of the fastest GEMMs, of which the fastest behind the quantizer is kept
_BEST = "best"
TUNED_KERNEL = "gemm_w4_wgmma"


def list_tuned_sources(source: KernelSource, shape: LinearShape) -> list[KernelSource]:
    """Return every candidate for the product that a GEMM's source was chosen for."""
    return [make_source(config) for config in list_candidates(_make_request(source.config, shape))]


def _make_request(config: WgmmaGemmConfig, shape: LinearShape) -> WgmmaGemmRequest:
    return WgmmaGemmRequest(
        m=shape.m,
        n=shape.n,
        k=shape.k,
        rank=shape.rank,
        mode=config.mode,
        weight=config.weight,
        out_dtype=config.out_dtype,
        lora_dtype=config.lora_dtype,
        has_bias=config.has_bias,
        has_alpha=config.has_alpha,
        use_pdl=config.use_pdl,
    )


def tune_shapes(
    bench: Bench, shapes: Iterable[LinearShape], modes: tuple[str, ...]
) -> Iterator[TunedChoice]:
    """Yield the choice of each mode and shape; one without a right candidate is left out."""
    gpu = torch.cuda.get_device_name()
    for shape in shapes:
        problem = make_problem(shape, bench.dtype, bench.place, bench.seed)
        for name in modes:
            try:
                choice = _tune(bench, problem, OWN_MODES[name], gpu)
            except HalfbyteError as refusal:
                bench.say(f"{name} {shape}: not tuned: {refusal}")
                continue
            bench.say(
                f"{name} {shape}: {choice.tokens} tokens, {choice.stages} stages, cluster "
                f"{choice.cluster}, {choice.splits} splits: GEMM {choice.gemm_us:.2f} us, total "
                f"{choice.total_us:.2f}, bf16 {choice.bf16_us:.2f}: {choice.fastest}"
            )
            yield choice


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A configuration with one launch for each set of operands."""

    config: WgmmaGemmConfig
    launches: list[Launch]


def _tune(bench: Bench, problem: Problem, own: OwnMode, gpu: str) -> TunedChoice:
    first = record_own(problem, own)
    count = count_sets(first.moved_bytes, bench.device.l2_bytes, bench.protocol)
    sets = [first, *(record_own(problem, own, first) for _ in range(count - 1))]
    request = _make_request(first.gemm_source.config, problem.shape)
    candidates = _list_right(bench, request, sets)
    finalists = _rank_by_time(bench, candidates, [one.launches for one in candidates])
    finalists = finalists[:_NUM_FINALISTS]
    best = _rank_by_time(bench, finalists, [_join(sets, one.launches) for one in finalists])[0]
    final = _time_best(bench, problem, sets, best)
    config = best.config
    total_us, bf16_us = final["total"].median_us, final["bf16"].median_us
    return TunedChoice(
        gpu=gpu,
        mode=config.mode,
        weight=config.weight,
        out_dtype=config.out_dtype,
        m=request.m,
        n=request.n,
        k=request.k,
        rank=request.rank,
        tokens=config.tokens,
        stages=config.stages,
        cluster=config.cluster,
        splits=config.splits,
        gemm_us=round(final[_BEST].median_us, 3),
        quantize_us=round(final["quantize"].median_us, 3),
        total_us=round(total_us, 3),
        bf16_us=round(bf16_us, 3),
        fastest=choose_fastest(total_us, bf16_us),
        extra=_list_extra(config),
    )


def _list_extra(config: WgmmaGemmConfig) -> dict[str, Any]:
    """Return what a configuration fixes beside the request and the columns of the table."""
    named = {field.name for record in (WgmmaGemmRequest, TunedChoice) for field in fields(record)}
    return {name: value for name, value in asdict(config).items() if name not in named}


def _list_right(
    bench: Bench, request: WgmmaGemmRequest, sets: list[OwnLaunches]
) -> list[_Candidate]:
    """Return the candidates that compute what they should.

    Raises:
        HalfbyteError: there is none.
    """
    found = []
    expected = sets[0].expect()
    for config in list_candidates(request):
        clusters = count_resident_clusters(config)
        try:
            source = make_source(config)
            prepared = [prepare_kernel(source, one.gemm_tensors, clusters) for one in sets]
        except HalfbyteError as refusal:
            bench.say(f"{config}: {refusal}")
            continue
        launches: list[Launch] = [one.launch for one in prepared]
        poison({"y": sets[0].y})
        launches[0]()
        try:
            check_expected(expected)
        except WrongResultError as wrong:
            bench.say(f"{config}: wrong: {wrong}")
            continue
        found.append(_Candidate(config, launches))
    if not found:
        raise HalfbyteError("no candidate could be loaded and is right")
    return found


def _time_best(
    bench: Bench, problem: Problem, sets: list[OwnLaunches], best: _Candidate
) -> dict[str, CaseTiming]:
    """Return timings of the best GEMM, the quantizer, both, and torch's 16-bit product."""
    cublas = make_cublas(problem)
    count = count_sets(cublas.moved_bytes, bench.device.l2_bytes, bench.protocol)
    cases: dict[str, list[Launch]] = {
        _BEST: best.launches,
        "quantize": [_chain([*one.quantize]) for one in sets],
        "total": _join(sets, best.launches),
        "bf16": make_sets(cublas, count).launches,
    }
    return measure_cases(cases, bench.device, bench.protocol, bench.read_sensors)


def _rank_by_time(
    bench: Bench, candidates: list[_Candidate], launches: list[list[Launch]]
) -> list[_Candidate]:
    """Return the candidates, the one first whose launches take the shortest time."""
    quick = replace(bench.protocol, warmup_ms=_QUICK_WARMUP_MS, visits=2)
    named = {str(index): each for index, each in enumerate(launches)}
    timings = measure_cases(named, bench.device, quick)
    order = sorted(range(len(candidates)), key=lambda index: timings[str(index)].median_us)
    return [candidates[index] for index in order]


def _join(sets: list[OwnLaunches], gemms: list[Launch]) -> list[Launch]:
    """Return the quantizer and the GEMM of each set as one launch."""
    return [_chain([*one.quantize, gemm]) for one, gemm in zip(sets, gemms, strict=True)]


def _chain(launches: list[Launch]) -> Launch:
    def launch_each() -> None:
        for launch in launches:
            launch()

    return launch_each
