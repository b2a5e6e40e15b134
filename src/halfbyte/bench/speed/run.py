"""A speed run: for every shape check each case, then time all of them in turn."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from halfbyte.bench.speed.launch_overhead import measure_launches
from halfbyte.bench.speed.operations import list_operations
from halfbyte.bench.speed.peers import make_copy, make_cublas, make_scaled_mm
from halfbyte.bench.speed.problem import Problem, make_problem
from halfbyte.bench.speed.result import LaunchRow, MachineRates, SpeedRow
from halfbyte.bench.speed.sensors import ReadSensors
from halfbyte.bench.speed.settings import LinearShape, TimingProtocol, count_sets
from halfbyte.bench.speed.steady_state import CaseTiming, measure_cases
from halfbyte.bench.speed.timing_device import Launch, TimingDevice
from halfbyte.bench.speed.trial import (
    Operands,
    OperandSets,
    Trial,
    WrongResultError,
    check_same,
    check_trial,
    copy_operands,
    make_sets,
)
from halfbyte.errors import HalfbyteError

MakeTrial = Callable[[Problem], Trial]
_RATE_SHAPE = LinearShape(8192, 8192, 8192, 0)
_COPY_SHAPE = LinearShape(43690, 8192, 1, 0)  # make_copy moves 3 * M * K bytes: 1 GiB
_RATE_WARMUP_MS = 500.0


# What a case raises that cannot run here: no such kernel, package, shape or memory.
_REFUSALS = (HalfbyteError, ImportError, RuntimeError, ValueError)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class Bench:
    """Where and how a run measures.

    Attributes:
        device: its clock and graphs. place: the device that tensors are made on.
        protocol: how often and how long.
        dtype: of x and y.
        seed: of the random operands.
        read_sensors: reads the GPU while it is busy.
        list_operations: names the kernels of a call.
        say: takes a line of progress.
    """

    device: TimingDevice
    place: torch.device
    protocol: TimingProtocol
    dtype: torch.dtype
    seed: int
    read_sensors: ReadSensors = lambda: None
    list_operations: Callable[[Launch], tuple[str, ...]] = list_operations
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A case that was checked: its row, its sets of operands, and what each of them must hold."""

    row: SpeedRow
    sets: OperandSets
    first: Operands | None


def measure_shape(
    bench: Bench, kind: str, shape: LinearShape, cases: Mapping[str, MakeTrial]
) -> list[SpeedRow]:
    """Return one row for each case, in their order; a case that is not right is not timed.

    Raises:
        HalfbyteError: a case left the GPU in an error that nothing after it survives.
    """
    started = time.perf_counter()
    problem = make_problem(shape, bench.dtype, bench.place, bench.seed)
    rows: dict[str, SpeedRow] = {}
    prepared: dict[str, _Prepared] = {}
    for name, make in cases.items():
        one = _prepare(bench, SpeedRow(kind, name, shape, "refused"), make, problem)
        if isinstance(one, _Prepared):
            prepared[name] = one
        rows[name] = one.row if isinstance(one, _Prepared) else one
    launches = {name: one.sets.launches for name, one in prepared.items()}
    current = "none"

    def follow(name: str) -> None:
        nonlocal current
        current = name

    try:
        timings = measure_cases(
            launches, bench.device, bench.protocol, bench.read_sensors, report=follow
        )
        for name, one in prepared.items():
            rows[name] = _check_after(bench, replace(one.row, timing=timings[name]), one)
    except RuntimeError as failure:  # a kernel's failure is told at a later call
        raise HalfbyteError(
            f"{kind} {shape}: the GPU failed while cases were timed, {current} the last: "
            f"{_first_line(failure)}; rows of the shapes before it are written"
        ) from failure
    bench.say(f"{kind} {shape}: {len(timings)} cases, {time.perf_counter() - started:.1f} s")
    del problem, launches, prepared
    gc.collect()
    if bench.place.type == "cuda":
        torch.cuda.empty_cache()
    return list(rows.values())


def _prepare(
    bench: Bench, row: SpeedRow, make: MakeTrial, problem: Problem
) -> _Prepared | SpeedRow:
    """Return a case that is right, or the row of one that is wrong or cannot run here."""
    try:
        trial = make(problem)
        error = check_trial(trial)
        first = copy_operands(trial.outputs) if trial.is_repeatable else None
        count = count_sets(trial.moved_bytes, bench.device.l2_bytes, bench.protocol)
        sets = make_sets(trial, count)
        operations = bench.list_operations(sets.launches[0])
    except WrongResultError as wrong:
        return _report_wrong(bench, row, wrong)
    except _REFUSALS as refusal:
        message = _first_line(refusal)
        _check_device(bench, row, message)
        bench.say(f"{row.case} {row.shape}: not measured: {message}")
        return replace(row, message=message)
    row = replace(
        row,
        status="timed",
        error=error,
        rate=trial.rate,
        moved_bytes=trial.moved_bytes,
        operations=operations,
        note=trial.note,
    )
    return _Prepared(row, sets, first)


def _report_wrong(bench: Bench, row: SpeedRow, wrong: WrongResultError) -> SpeedRow:
    bench.say(f"{row.case} {row.shape}: wrong: {wrong}")
    return replace(row, status="wrong", message=str(wrong), timing=None)


def _check_after(bench: Bench, row: SpeedRow, one: _Prepared) -> SpeedRow:
    """Return the row, wrong where a set's outputs after all replays are not those of the check.

    Calls that overlap in a graph may disturb each other as one alone does not.
    """
    if one.first is None:
        return row
    try:
        for index, outputs in enumerate(one.sets.outputs):
            check_same(one.first, outputs, f"after the timing, in set {index}")
    except WrongResultError as wrong:
        return _report_wrong(bench, row, wrong)
    return row


def _check_device(bench: Bench, row: SpeedRow, message: str) -> None:
    """Raise HalfbyteError where the GPU does not answer any more."""
    try:
        bench.device.synchronize()
    except RuntimeError:
        raise HalfbyteError(
            f"{row.case} {row.shape} left the GPU in an error, and nothing can be measured after "
            f"it: {message}; rows of the shapes before it are written"
        ) from None


def measure_host(
    bench: Bench, shape: LinearShape, cases: Mapping[str, MakeTrial]
) -> tuple[list[LaunchRow], list[SpeedRow]]:
    """Return what a launch of each case costs the host, and rows of cases that are wrong.

    The shape is one of few tokens, so that no queue fills.
    """
    problem = make_problem(shape, bench.dtype, bench.place, bench.seed)
    launches, wrong_rows = [], []
    for name, make in cases.items():
        row = SpeedRow("launch", name, shape, "refused")
        try:
            trial = make(problem)
            check_trial(trial)
        except WrongResultError as wrong:
            wrong_rows.append(_report_wrong(bench, row, wrong))
            continue
        except _REFUSALS as refusal:
            _check_device(bench, row, _first_line(refusal))
            bench.say(f"launch of {name} {shape}: not measured: {_first_line(refusal)}")
            continue
        launch = trial.bind(trial.operands, trial.outputs)
        launches.append(measure_launches(name, shape, launch, bench.device.synchronize))
    return launches, wrong_rows


def measure_rates(bench: Bench) -> MachineRates:
    """Return what the GPU sustains: torch's products of 8192^3, and a copy of 1 GiB."""
    protocol = replace(bench.protocol, warmup_ms=_RATE_WARMUP_MS, visits=2)
    problem = make_problem(_RATE_SHAPE, torch.bfloat16, bench.place, bench.seed)
    big = replace(problem, shape=_COPY_SHAPE)
    makers: dict[str, tuple[MakeTrial, Problem]] = {
        "bf16": (make_cublas, problem),
        "fp8": (make_scaled_mm, problem),
        "copy": (make_copy, big),
    }
    trials = {name: make(given) for name, (make, given) in makers.items()}
    launches = {name: make_sets(trial, 1).launches for name, trial in trials.items()}
    timings = measure_cases(launches, bench.device, protocol, bench.read_sensors)

    def tflops(timing: CaseTiming) -> float:
        return _RATE_SHAPE.flops / timing.median_us / 1e6

    copied = trials["copy"].moved_bytes / (timings["copy"].median_us * 1e-6)
    rates = MachineRates(tflops(timings["bf16"]), tflops(timings["fp8"]), copied)
    bench.say(
        f"this GPU sustains {rates.bf16_tflops:.0f} TFLOPS bf16, {rates.fp8_tflops:.0f} fp8, "
        f"copies {rates.copy_bytes_per_s / 1e12:.2f} TB/s"
    )
    return rates
