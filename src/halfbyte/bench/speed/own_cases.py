"""Our kernels as cases, by the GPU's target: totals, and each kernel alone."""

from collections.abc import Callable

from halfbyte.bench.speed.problem import Problem
from halfbyte.bench.speed.trial import Trial


def list_own_cases(
    kind: str, target: str, modes: tuple[str, ...]
) -> dict[str, Callable[[Problem], Trial]]:
    """Return the cases of a kind that are written for a target, by name."""
    return {}
