"""What quantizing a model cost: one record for each linear."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from halfbyte.cpu.quantize_act_lora import quantize_act_lora
from halfbyte.cpu.w4a4_linear import w4a4_linear
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.quantize_layer import GroupChoice
from halfbyte.svdquant.weight_error import (
    make_relative_error,
    make_snr_db,
    measure_weight_error,
)


@dataclass(frozen=True)
class LinearReport:
    """One quantized linear.

    Attributes:
        name: of the module in the model.
        group: names of the linears that share its input, itself among them.
        is_calibrated: whether the errors are those of the output on held-out calibration rows
            (which GPTQ's Gram matrix has seen); else they are those of the weight.
        relative_error: Frobenius norm of the error over that of the true value.
        snr_db: -20 log10 of it; None where nothing was lost.
        blocks: blocks of the weight.
        saturated: blocks of the weight that wanted a scale beyond the largest of the format.
        flushed: blocks of the weight with a nonzero element whose scale rounded to zero.
        zero_scales: blocks of the weight that hold zeros alone.
        activation_blocks, activation_saturated, activation_flushed: the same for the held-out
            calibration rows.
        alpha, beta: chosen smoothing exponents; (0, 0) is no smoothing.
        num_bytes: everything stored for the linear.
    """

    name: str
    group: tuple[str, ...]
    is_calibrated: bool
    relative_error: float
    snr_db: float | None
    blocks: int
    saturated: int
    flushed: int
    zero_scales: int
    activation_blocks: int
    activation_saturated: int
    activation_flushed: int
    alpha: float
    beta: float
    num_bytes: int


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_model` did.

    Attributes:
        preset: its name.
        layers: a record for each linear, in the order in which they were quantized.
        left_out: names of the linears that stay as they were, by rule.
        uncalibrated: names of the linears that no calibration input reached.
        seconds: wall time.
        peak_memory_bytes: largest resident size of the process.
    """

    preset: str
    layers: tuple[LinearReport, ...]
    left_out: tuple[str, ...]
    uncalibrated: tuple[str, ...]
    seconds: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def measure_linear(
    name: str,
    true: tuple[torch.Tensor, torch.Tensor | None],
    linear: QuantizedLinear,
    rows: torch.Tensor | None,
    group: tuple[tuple[str, ...], GroupChoice],
) -> LinearReport:
    """Return the report of one linear.

    Args:
        name: of the module.
        true: weight [N, K] and bias [N] or None, float.
        linear: its 4-bit record.
        rows: held-out inputs [T, K] float32, or None without calibration.
        group: the names that share its input, and what was chosen for them.
    """
    weight, bias = true
    weight_error = measure_weight_error(lambda start, stop: weight[start:stop], linear)
    relative_error, counts = weight_error.relative_error, BlockCounts()
    if rows is not None:
        expected = torch.nn.functional.linear(
            rows, weight.float(), None if bias is None else bias.float()
        )
        error = torch.linalg.vector_norm(w4a4_linear(rows, linear) - expected)
        norm = torch.linalg.vector_norm(expected)
        relative_error = make_relative_error(float(error) ** 2, float(norm) ** 2)
        if linear.activation is not None:
            counts = quantize_act_lora(rows, linear).counts
    names, choice = group
    return LinearReport(
        name=name,
        group=names,
        is_calibrated=rows is not None,
        relative_error=relative_error,
        snr_db=make_snr_db(relative_error),
        blocks=weight_error.counts.blocks,
        saturated=weight_error.counts.saturated,
        flushed=weight_error.counts.flushed,
        zero_scales=weight_error.counts.zero,
        activation_blocks=counts.blocks,
        activation_saturated=counts.saturated,
        activation_flushed=counts.flushed,
        alpha=choice.alpha,
        beta=choice.beta,
        num_bytes=linear.num_bytes,
    )
