"""Which of several possible readings of a file is right, told by the model that it was made from.

A few rows of a few layers are dequantised under each reading, smoothing undone and low-rank branch
added, and compared with the original weight. Four bits leave an error of about a tenth; a reading
with swapped nibbles, a swizzle or an inverted scale leaves one of about 1 or far more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from halfbyte.checkpoints.difference import dequantize_rows, multiply_factors
from halfbyte.checkpoints.family import Claim, Family, LayerPlan, read_layer
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

TRIAL_LAYERS = 3
TRIAL_ROWS = 32
MAX_ERROR = 0.35  # of the right reading, relative; plain rounding to 4 bits gives 0.08 to 0.15
MIN_MARGIN = 3.0  # the next best reading's error over the best one's


@dataclass(frozen=True)
class Trial:
    """How a reading did.

    Attributes:
        family: the reading.
        error: relative Frobenius error over all rows that were tried; infinite if it failed.
        problem: why it failed, "" where it did not.
    """

    family: str
    error: float
    problem: str = ""

    def __str__(self) -> str:
        """Return the figures for a message."""
        return f"{self.family} {self.problem or f'error {self.error:.3g}'}"


def choose_by_original(
    source: TensorSource,
    original: TensorSource,
    candidates: Mapping[str, tuple[Family, Claim]],
) -> tuple[str, str]:
    """Return the family whose reading fits `original`, and the figures as evidence.

    Raises:
        CheckpointError: no layer in common, or no reading that fits and is far better than the
            others; the message has the figures.
    """
    names = find_shared_layers(original, candidates)
    if not names:
        raise CheckpointError(
            f"{original.path}: --original has no matrix '<layer>.weight' for any quantized layer "
            f"of {source.path}; give the model that it was made from, or --from"
        )
    trials = sorted(
        (
            try_reading(source, original, family, [claim.layers[name] for name in names])
            for family, claim in candidates.values()
        ),
        key=lambda trial: trial.error,
    )
    best, *others = trials
    figures = ", ".join(map(str, trials))
    is_clear = all(trial.error >= MIN_MARGIN * best.error for trial in others)
    if best.error <= MAX_ERROR and is_clear:
        return best.family, f"fits the original: {figures} over {len(names)} layers"
    raise CheckpointError(
        f"{source.path}: --original decides nothing over {quoted(names)}: {figures}; wanted one "
        f"reading with an error of at most {MAX_ERROR}, {MIN_MARGIN:g} times below the others. Is "
        "it the model that the file was made from? Else name the family with --from"
    )


def find_shared_layers(
    original: TensorSource, candidates: Mapping[str, tuple[Family, Claim]]
) -> list[str]:
    """Return some layers that every candidate claims and whose weight the original has."""
    claims = [claim.layers for _, claim in candidates.values()]
    shared = [name for name in claims[0] if all(name in layers for layers in claims)]
    known = [name for name in shared if _has_weight(original, name)]
    step = max(1, len(known) // TRIAL_LAYERS)
    return known[::step][:TRIAL_LAYERS]


def _has_weight(original: TensorSource, layer: str) -> bool:
    spec = original.specs.get(f"{layer}.weight")
    return spec is not None and len(spec.shape) == 2 and spec.dtype.torch_dtype in FLOAT_DTYPES


def try_reading(
    source: TensorSource, original: TensorSource, family: Family, plans: list[LayerPlan]
) -> Trial:
    """Return how far the weights that `family` reads are from the original ones."""
    squared_error = squared_norm = 0.0
    for plan in plans:
        try:
            linear = read_layer(family, source, plan).linear
        except HalfbyteError as problem:
            return Trial(family.name, math.inf, f"cannot read it ({problem})")
        wanted = original.read(f"{plan.name}.weight")
        if wanted.shape[0] > linear.out_features or wanted.shape[1] > linear.in_features:
            return Trial(family.name, math.inf, f"has {plan.name} smaller than the original")
        rows = choose_rows(wanted.shape[0])
        truth = wanted[rows].double()
        squared_error += float(
            (read_rows(linear, rows)[:, : truth.shape[1]] - truth).square().sum()
        )
        squared_norm += float(truth.square().sum())
    error = math.sqrt(squared_error / squared_norm) if squared_norm else math.inf
    return Trial(family.name, error if math.isfinite(error) else math.inf)


def choose_rows(count: int) -> list[int]:
    """Return rows spread over a weight, neighbours among them: swizzles keep some in place."""
    if count <= TRIAL_ROWS:
        return list(range(count))
    step = count // (TRIAL_ROWS // 2)
    starts = range(0, step * (TRIAL_ROWS // 2), step)
    return sorted({row for start in starts for row in (start, min(start + 1, count - 1))})


def read_rows(linear: QuantizedLinear, rows: list[int]) -> torch.Tensor:
    """Return rows of the weight that x meets: 4-bit part over smooth, plus the low-rank branch."""
    parts = []
    for row in rows:
        values = dequantize_rows(linear, row, row + 1)
        if linear.smooth is not None:
            values = values / linear.smooth.double()
        parts.append(values + multiply_factors(linear, row, row + 1))
    return torch.cat(parts)
