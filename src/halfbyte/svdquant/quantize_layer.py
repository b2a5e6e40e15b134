"""SVDQuant of the linears that share one input: smooth, split off a low rank, round the rest.

Linears of one group (q/k/v, gate/up) share the smoothing factors and lora_down, so that one
kernel quantizes their input and projects it once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat, get_activation_format
from halfbyte.formats.dtypes import FLOAT_BY_NAME
from halfbyte.formats.modes import get_mode
from halfbyte.formats.nvfp4 import make_global_scale
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.gptq import ErrorPropagation, make_error_propagation
from halfbyte.svdquant.low_rank import LowRank, split_low_rank
from halfbyte.svdquant.output_error import OutputError, SmoothingSearch, quantize_rows
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.rounding import round_residual
from halfbyte.svdquant.side_by_side import run_side_by_side
from halfbyte.svdquant.smoothing import (
    NO_SMOOTHING,
    SmoothingChoice,
    choose_smoothing,
    make_candidates,
)
from halfbyte.svdquant.statistics import InputStatistics

# lora_down [R, K] on the raw input and lora_up [sum N_i, R], or None twice for rank 0.
_Lora = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class GroupChoice:
    """What was chosen for the linears of one group.

    Attributes:
        alpha, beta: smoothing exponents; (0, 0) is no smoothing.
        relative_error: output error on held-out rows relative to the output, all linears of the
            group together; None without calibration data. With "gptq" a little too good: the
            choice of smoothing never saw these rows, but the Gram matrix has them in it.
        refinements: rounds of refinement that were kept.
    """

    alpha: float
    beta: float
    relative_error: float | None
    refinements: int


@dataclass(frozen=True, eq=False)
class _Split:
    """One low-rank split of the group and its rounded residuals.

    Attributes:
        lora_down: [R, K] or None, on the raw input.
        lora_up: [sum N_i, R] or None.
        records: the residual of each linear.
        effective: [sum N_i, K] float32, the rounded residuals dequantized.
    """

    lora_down: torch.Tensor | None
    lora_up: torch.Tensor | None
    records: tuple[QuantizedLinear, ...]
    effective: torch.Tensor


def quantize_linear_group(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    statistics: InputStatistics | None,
    preset: SVDQuantPreset,
) -> tuple[list[QuantizedLinear], GroupChoice]:
    """Return the 4-bit linears of one input and what was chosen for them.

    Args:
        weights: [N_i, K] float each, finite, of one K.
        biases: [N_i] float or None for each weight.
        statistics: of the shared input, or None to quantize without data.
        preset: what to do.

    Raises:
        FormatError: shapes that do not belong together, NaN or Inf in a weight, or a preset whose
            static activation scale needs statistics.
    """
    return _GroupQuantizer(weights, biases, statistics, preset).quantize()


class _GroupQuantizer:
    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        statistics: InputStatistics | None,
        preset: SVDQuantPreset,
    ) -> None:
        _check_group(weights, biases, statistics)
        self.rows = [weight.shape[0] for weight in weights]
        self.stacked = torch.cat([weight.detach().float() for weight in weights])
        self.biases = biases
        self.statistics = statistics if statistics is not None and statistics.num_rows else None
        self.preset = preset
        name = preset.activation
        self.activation = None if name is None else get_activation_format(name)
        if self._is_static and self.statistics is None:
            raise FormatError(
                f"preset {preset.name!r}: activation {name!r} needs calibration data for its scale"
            )

    @property
    def _is_static(self) -> bool:
        return self.activation is not None and self.activation.global_scale == "static"

    def quantize(self) -> tuple[list[QuantizedLinear], GroupChoice]:
        smoothing = self._choose_smoothing()
        smooth = smoothing.factors
        smoothed = self.stacked if smooth is None else self.stacked * smooth
        propagation, lora = self._prepare(smoothed, smooth)
        best = self._split(smoothed, lora, smooth, propagation)
        best_error = self._measure(best, smooth)
        kept = 0
        for _ in range(self.preset.refinements if self.preset.rank else 0):
            lora = self._make_lora(smoothed - best.effective, smooth)
            candidate = self._split(smoothed, lora, smooth, propagation)
            error = self._measure(candidate, smooth)
            if error.squared >= best_error.squared:
                break
            best, best_error, kept = candidate, error, kept + 1
        relative = None if self.statistics is None else best_error.relative
        chosen = smoothing.candidate
        return list(best.records), GroupChoice(chosen.alpha, chosen.beta, relative, kept)

    def _choose_smoothing(self) -> SmoothingChoice:
        if self.statistics is None or not self.preset.smoothing_points:
            return NO_SMOOTHING
        search = SmoothingSearch(self.stacked, self.statistics, self.activation, self.preset)
        weight_rms = self.stacked.square().mean(0).sqrt()
        candidates = make_candidates(self.preset.smoothing_points)
        measures = (search.measure_error, search.fork().measure_error)
        return choose_smoothing(candidates, self.statistics.rms, weight_rms, measures)

    def _prepare(
        self, smoothed: torch.Tensor, smooth: torch.Tensor | None
    ) -> tuple[ErrorPropagation | None, _Lora]:
        """Return how errors travel (None without data or GPTQ) and the first low rank."""
        if self.statistics is None or self.preset.rounding != "gptq":
            return None, self._make_lora(smoothed, smooth)
        propagation: Callable[[], Any] = partial(self._make_propagation, self.statistics, smooth)
        lora: Callable[[], Any] = partial(self._make_lora, smoothed, smooth)
        made = run_side_by_side([propagation, lora])
        return made[0], made[1]

    def _make_propagation(
        self, statistics: InputStatistics, smooth: torch.Tensor | None
    ) -> ErrorPropagation:
        held_out_gram = statistics.held_out_gram
        if (
            self.activation is None
            and statistics.fit_gram is not None
            and held_out_gram is not None
        ):
            gram = statistics.fit_gram + held_out_gram
            if smooth is not None:
                gram = gram / torch.outer(smooth, smooth)
        else:
            fit, held_out = statistics.fit.rows, statistics.held_out.rows
            rows = quantize_rows(torch.cat((fit, held_out)), smooth, self.activation)
            gram = rows.T @ rows
        return make_error_propagation(
            gram, shrinkage=self.preset.gram_shrinkage, damping=self.preset.damping
        )

    def _split(
        self,
        smoothed: torch.Tensor,
        lora: _Lora,
        smooth: torch.Tensor | None,
        propagation: ErrorPropagation | None,
    ) -> _Split:
        """Return the split of `smoothed` into `lora` and its rounded rest."""
        down, up = lora
        residual = smoothed
        if down is not None and up is not None:
            seen = down.float() if smooth is None else down.float() * smooth
            residual = torch.addmm(smoothed, up.float(), seen, alpha=-1)
        weights = run_side_by_side(
            [
                partial(round_residual, part, self.preset, propagation)
                for part in torch.split(residual, self.rows)
            ]
        )
        ups = [None] * len(weights) if up is None else torch.split(up, self.rows)
        records = []
        for weight, part_up, bias in zip(weights, ups, self.biases, strict=True):
            record = QuantizedLinear(
                weight,
                self.activation,
                self._static_scale(smooth),
                smooth=None if smooth is None else smooth.to(torch.bfloat16),
                lora_down=down,
                lora_up=None if part_up is None else part_up.clone(),
                bias=bias,
            )
            records.append(_fold_shift(record, self.activation))
        effective = torch.cat([dequantize(record.weight) for record in records])
        return _Split(down, up, tuple(records), effective)

    def _make_lora(self, target: torch.Tensor, smooth: torch.Tensor | None) -> _Lora:
        """Return lora_down on the raw input and lora_up, rounded to their stored dtype."""
        rank = min(self.preset.rank, *self.rows, target.shape[1])
        if rank == 0:
            return None, None
        low: LowRank = split_low_rank(target, rank, seed=self.preset.seed)
        raw = low.down if smooth is None else low.down / smooth
        dtype = FLOAT_BY_NAME[self.preset.low_rank_dtype]
        # The residual is taken from the rounded factors, so their rounding costs nothing.
        return raw.to(dtype), low.up.to(dtype)

    def _static_scale(self, smooth: torch.Tensor | None) -> torch.Tensor | None:
        if not self._is_static or self.statistics is None:
            return None
        absmax = self.statistics.absmax if smooth is None else self.statistics.absmax / smooth
        amax = absmax.max() if absmax.numel() else torch.zeros(())
        return make_global_scale(amax, get_mode("halfbyte")).multiplier

    def _measure(self, split: _Split, smooth: torch.Tensor | None) -> OutputError:
        """Return the error on held-out rows; without data, that of the weight itself."""
        low_rank = None
        if split.lora_down is not None and split.lora_up is not None:
            low_rank = LowRank(split.lora_up, split.lora_down)
        return OutputError.measure(
            self.stacked, self.statistics, self.activation, smooth, (split.effective, low_rank)
        )


def _fold_shift(record: QuantizedLinear, activation: ActivationFormat | None) -> QuantizedLinear:
    """Return the record with the shift's part of the product taken off the bias."""
    if activation is None or activation.shift == 0.0:
        return record
    weight = dequantize(record.weight).double()
    if record.smooth is not None:
        weight = weight / record.smooth.double()
    correction = (activation.shift * weight.sum(1)).float()
    bias = -correction if record.bias is None else record.bias.float() - correction
    return replace(record, bias=bias)


def _check_group(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    statistics: InputStatistics | None,
) -> None:
    if not weights or len(weights) != len(biases):
        raise FormatError(f"{len(weights)} weights and {len(biases)} biases: wanted one for each")
    columns = weights[0].shape[-1] if weights[0].ndim else 0
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if weight.ndim != 2 or weight.shape[1] != columns or not weight.is_floating_point():
            raise FormatError(
                f"weight {index} of the group: {weight.dtype} of shape {tuple(weight.shape)}, "
                f"wanted a float matrix with {columns} columns"
            )
        if not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise FormatError(
                f"weight {index} of the group contains NaN/Inf: {bad} of {weight.numel()} elements"
            )
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise FormatError(
                f"bias {index} of the group: shape {tuple(bias.shape)}, wanted {weight.shape[:1]}"
            )
    if statistics is not None and statistics.columns != columns:
        raise FormatError(
            f"statistics: {statistics.columns} columns, wanted {columns} as in the weights"
        )
