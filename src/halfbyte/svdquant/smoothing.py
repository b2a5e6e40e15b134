"""Smoothing: a factor for each input channel that moves outliers from activations to weights.

x is divided by it, the weight's columns are multiplied by it. The factors come from a small grid
of exponents; the choice is made on the output error over held-out rows, with the low-rank branch
and both quantizers in place (SVDQuant, deepcompressor's `calib/smooth.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Protocol

import torch

from halfbyte.svdquant.side_by_side import run_side_by_side

MIN_FACTOR, MAX_FACTOR = 1e-2, 1e2  # beyond these, naive smoothing has overflowed 16-bit models


@dataclass(frozen=True)
class SmoothingCandidate:
    """Exponents of one candidate: factors = input_rms**alpha / weight_rms**beta."""

    alpha: float
    beta: float


@dataclass(frozen=True, eq=False)
class SmoothingChoice:
    """The chosen factors.

    Attributes:
        candidate: the exponents; (0, 0) is no smoothing.
        factors: [K] float32, each exactly representable in bfloat16 and float16; None for ones.
        error: squared output error on held-out rows; None where nothing was searched.
    """

    candidate: SmoothingCandidate
    factors: torch.Tensor | None
    error: float | None


IDENTITY = SmoothingCandidate(0.0, 0.0)
NO_SMOOTHING = SmoothingChoice(IDENTITY, None, None)


class ErrorMeasure(Protocol):
    """Squared output error on held-out rows if the inputs were divided by `factors`."""

    def __call__(self, factors: torch.Tensor | None) -> float:
        """Return the error; `factors` is [K] float32 or None for ones."""
        ...


def make_candidates(points: int) -> tuple[SmoothingCandidate, ...]:
    """Return the grid: identity first, then (i/points, 0) and (i/points, 1 - i/points)."""
    exponents = [i / points for i in range(1, points)]
    pairs = [(alpha, beta) for alpha in exponents for beta in (0.0, 1.0 - alpha)]
    return (IDENTITY, *(SmoothingCandidate(*pair) for pair in pairs))


def make_factors(
    candidate: SmoothingCandidate, input_rms: torch.Tensor, weight_rms: torch.Tensor
) -> torch.Tensor | None:
    """Return [K] float32 factors within [1e-2, 1e2], or None for the identity.

    The factors are centred (largest * smallest = 1), a dead channel gets 1, and each is rounded
    to bfloat16, so that storing it in any 16-bit dtype changes nothing.

    Args:
        candidate: the exponents.
        input_rms: [K] float32, root mean square of the input's columns.
        weight_rms: [K] float32, of the weight's columns over all linears of the group.
    """
    if candidate == IDENTITY:
        return None
    factors = input_rms.pow(candidate.alpha) / weight_rms.pow(candidate.beta)
    is_alive = torch.isfinite(factors) & (factors > 0)
    if not bool(is_alive.any()):
        return None
    alive = factors[is_alive]
    centre = (alive.max().double() * alive.min().double()).sqrt().float()
    factors = torch.where(is_alive, factors / centre, torch.ones(()))
    return factors.clamp_(MIN_FACTOR, MAX_FACTOR).to(torch.bfloat16).float()


def choose_smoothing(
    candidates: tuple[SmoothingCandidate, ...],
    input_rms: torch.Tensor,
    weight_rms: torch.Tensor,
    measures: tuple[ErrorMeasure, ...],
) -> SmoothingChoice:
    """Return the candidate of least error; the first of equals, so identity wins a tie.

    Args:
        candidates: tried in this order.
        input_rms: [K] float32.
        weight_rms: [K] float32.
        measures: each judges its share of the candidates, in order and side by side with the
            others: measure i takes candidates i, i + len(measures), ... With two, the grid's
            pairs part: one measure sees (alpha, 0), the other (alpha, 1 - alpha).
    """
    factors = [make_factors(candidate, input_rms, weight_rms) for candidate in candidates]
    count = len(measures)
    shares = run_side_by_side(
        [partial(_measure_all, measure, factors[i::count]) for i, measure in enumerate(measures)]
    )
    errors = [shares[index % count][index // count] for index in range(len(candidates))]
    best = 0
    for index, error in enumerate(errors):
        if error < errors[best] or isnan(errors[best]):
            best = index
    return SmoothingChoice(candidates[best], factors[best], errors[best])


def _measure_all(
    measure_error: ErrorMeasure, factors: Sequence[torch.Tensor | None]
) -> list[float]:
    return [measure_error(each) for each in factors]
