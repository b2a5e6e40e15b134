"""One case on one shape: operands, the call, and the check that comes before any timing."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfbyte.bench.speed.timing_device import Launch
from halfbyte.errors import HalfbyteError

Operands = dict[str, Any]
Rate = Literal["bf16", "fp8"]


class WrongResultError(HalfbyteError, RuntimeError):
    """A case computed something else than it says; it is not timed."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What an output must be.

    Attributes:
        name: of the output, for the message.
        actual: what came. wanted: float64 (or the exact bytes), of the same shape.
        limit: largest ||actual - wanted|| / ||wanted|| that passes; 0 compares bit by bit.
    """

    name: str
    actual: torch.Tensor
    wanted: torch.Tensor
    limit: float


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
    """

    operands: Operands
    outputs: Operands
    bind: Callable[[Operands, Operands], Launch]
    expect: Callable[[Operands, Operands], list[Expected]]
    rate: Rate = "bf16"
    moved_bytes: int = 0
    note: str = ""


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
        WrongResultError: an output differs more than its limit, or is not finite.
    """
    launch = trial.bind(trial.operands, trial.outputs)
    poison(trial.outputs)
    launch()
    largest = 0.0
    for expected in trial.expect(trial.operands, trial.outputs):
        error = measure_error(expected)
        if not error <= expected.limit:
            raise WrongResultError(
                f"{expected.name}: relative error {error:.3g}, allowed {expected.limit:.3g}"
            )
        largest = max(largest, error)
    return largest


def measure_error(expected: Expected) -> float:
    """Return ||actual - wanted|| / ||wanted||; the share of bytes that differ for a limit of 0."""
    actual, wanted = expected.actual, expected.wanted
    if actual.shape != wanted.shape:
        raise WrongResultError(
            f"{expected.name}: shape {tuple(actual.shape)}, wanted {tuple(wanted.shape)}"
        )
    if expected.limit == 0.0:
        differs = actual.contiguous().view(torch.uint8) != wanted.contiguous().view(torch.uint8)
        return float(differs.double().mean())
    difference = (actual.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp_min(1e-300))


def make_sets(trial: Trial, count: int) -> list[Launch]:
    """Return one call for each of `count` sets of operands; the first set is the trial's own."""
    launches = [trial.bind(trial.operands, trial.outputs)]
    for _ in range(count - 1):
        launches.append(trial.bind(copy_operands(trial.operands), copy_operands(trial.outputs)))
    return launches
