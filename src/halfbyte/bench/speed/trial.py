"""One case on one shape: operands, the call, and the check that comes before any timing."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfbyte.bench.speed.timing_device import Launch
from halfbyte.errors import HalfbyteError

Operands = dict[str, Any]
_REPEATS = 2  # of a call that should give the same bits
_FEW_ROWS = 16  # of an output, too few to tell a column's size
Rate = Literal["bf16", "fp8"]


class WrongResultError(HalfbyteError, RuntimeError):
    """A case computed something else than it says; it is not timed."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What an output must be.

    Attributes:
        name: of the output, for the message.
        actual: what came. wanted: float64 (or the exact bytes), of the same shape.
        limit: largest ||actual - wanted|| / ||wanted|| that passes; 0: every number is equal.
        element_limit: largest |actual - wanted| of one element over the root mean square of its
            column that passes: a norm over millions of elements does not see a few wrong ones.
    """

    name: str
    actual: torch.Tensor
    wanted: torch.Tensor
    limit: float
    element_limit: float = math.inf


@dataclass(frozen=True, eq=False)
class Trial:
    """A case that is ready to run.

    Attributes:
        operands: what the call reads, tensors and modules by name; each set gets copies.
        outputs: what it writes, each set its own; filled with NaN or 0x7F before the check.
        bind: takes operands and outputs of one set and returns the call; it may put into the
            outputs what it allocates itself.
        expect: takes operands and outputs after the call, and returns what must hold.
        rate: the measured rate of the GPU that its TFLOPS are compared with.
        moved_bytes: read and written by one call, each byte once; decides how many sets there are.
        note: what a reader of its row should know.
        is_repeatable: the same operands give the same bits, always: this is checked as well.
    """

    operands: Operands
    outputs: Operands
    bind: Callable[[Operands, Operands], Launch]
    expect: Callable[[Operands, Operands], list[Expected]]
    rate: Rate = "bf16"
    moved_bytes: int = 0
    note: str = ""
    is_repeatable: bool = False


def count_bytes(*groups: Mapping[str, Any]) -> int:
    """Return the bytes of all tensors and modules in some groups of operands."""
    return sum(_count_bytes(value) for group in groups for value in group.values())


def _count_bytes(value: Any) -> int:
    if isinstance(value, torch.nn.Module):
        return sum(_count_bytes(t) for t in [*value.parameters(), *value.buffers()])
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return 0


def copy_operands(operands: Operands) -> Operands:
    """Return operands in memory of their own; what is neither tensor nor module is shared."""
    return {name: _copy(value) for name, value in operands.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.preserve_format)
    return copy.deepcopy(value) if isinstance(value, torch.nn.Module) else value


def poison(outputs: Operands) -> None:
    """Fill floating-point tensors with NaN and byte tensors with 0x7F (a NaN in E4M3)."""
    for value in outputs.values():
        if not isinstance(value, torch.Tensor):
            continue
        if value.element_size() == 1:
            value.view(torch.uint8).fill_(0x7F)
        elif value.is_floating_point():
            value.fill_(float("nan"))


def check_trial(trial: Trial) -> float:
    """Run the call on poisoned outputs and return its largest relative error.

    Raises:
        WrongResultError: an output differs more than its limit, is not finite, or (where it should
            be repeatable) is another one when the call runs again.
    """
    launch = trial.bind(trial.operands, trial.outputs)
    poison(trial.outputs)
    launch()
    largest = max(check_expected(one) for one in trial.expect(trial.operands, trial.outputs))
    if trial.is_repeatable:
        first = copy_operands(trial.outputs)
        for _ in range(_REPEATS):
            poison(trial.outputs)
            launch()
            check_same(first, trial.outputs, "when it ran again")
    return largest


def check_same(first: Operands, again: Operands, when: str) -> None:
    """Raise WrongResultError where two runs on equal operands wrote different bits."""
    for name, value in first.items():
        count = int((_view_bytes(value) != _view_bytes(again[name])).sum())
        if count:
            raise WrongResultError(f"{name}: {count} bytes were other ones {when}")


def _view_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def check_expected(expected: Expected) -> float:
    """Return the relative error of an output.

    Raises:
        WrongResultError: it is larger than its limit, or one element is off by more than its own.
    """
    error = measure_error(expected)
    if not error <= expected.limit:
        what = "relative error" if expected.limit else "share of wrong elements"
        raise WrongResultError(f"{expected.name}: {what} {error:.3g}, allowed {expected.limit:.3g}")
    if math.isfinite(expected.element_limit):
        largest = measure_largest(expected)
        if not largest <= expected.element_limit:
            raise WrongResultError(
                f"{expected.name}: one element is {largest:.3g} of its column's size off, allowed "
                f"{expected.element_limit:.3g}"
            )
    return error


def measure_error(expected: Expected) -> float:
    """Return ||actual - wanted|| / ||wanted||; the share of unequal numbers for a limit of 0."""
    actual, wanted = expected.actual, expected.wanted
    if actual.shape != wanted.shape:
        raise WrongResultError(
            f"{expected.name}: shape {tuple(actual.shape)}, wanted {tuple(wanted.shape)}"
        )
    if expected.limit == 0.0:
        return float((actual != wanted).double().mean())
    difference = (actual.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp_min(1e-300))


def measure_largest(expected: Expected) -> float:
    """Return the largest |actual - wanted| over the root mean square of its column.

    Columns of few rows share one size: that of all elements or theirs, whichever is larger.
    """
    wanted = expected.wanted.double()
    size = wanted.square().mean(dim=0).sqrt()
    if wanted.shape[0] < _FEW_ROWS:
        size = size.clamp_min(float(wanted.square().mean().sqrt()))
    difference = (expected.actual.double() - wanted).abs()
    return float((difference / size.clamp_min(1e-300)).max())


@dataclass(frozen=True, eq=False)
class OperandSets:
    """A trial on several sets of equal operands: a call and its outputs for each."""

    launches: list[Launch]
    outputs: list[Operands]


def make_sets(trial: Trial, count: int) -> OperandSets:
    """Return `count` sets of operands; the first is the trial's own."""
    sets = OperandSets([], [])
    for index in range(count):
        is_first = index == 0
        operands = trial.operands if is_first else copy_operands(trial.operands)
        outputs = trial.outputs if is_first else copy_operands(trial.outputs)
        sets.launches.append(trial.bind(operands, outputs))
        sets.outputs.append(outputs)
    return sets
