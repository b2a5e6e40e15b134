"""A quantizer for tests of the demo: rounds each weight to its format and does nothing else."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.quantize import dequantize, quantize, quantize_activation
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.report import LinearReport


class RoundedLinear(nn.Module):
    """Dequantized operands multiplied in float32: what the demo needs of a 4-bit linear."""

    def __init__(self, record: QuantizedLinear) -> None:
        super().__init__()
        self.record = record
        self.weight = dequantize(record.weight)

    def to_record(self) -> QuantizedLinear:
        return self.record

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operand, _ = quantize_activation(x.flatten(0, -2), self.record.activation)
        return nn.functional.linear(dequantize(operand), self.weight).unflatten(0, x.shape[:-1])


def make_report(name: str, error: float, snr_db: float | None, alpha: float) -> LinearReport:
    """Return a report of made-up counts."""
    return LinearReport(
        name=name,
        group=(name,),
        is_calibrated=True,
        relative_error=error,
        snr_db=snr_db,
        blocks=64,
        saturated=3,
        flushed=2,
        zero_scales=1,
        activation_blocks=32,
        activation_saturated=0,
        activation_flushed=4,
        alpha=alpha,
        beta=0.0,
        num_bytes=100,
    )


def quantize_plainly(
    model: nn.Module, preset: str, calibration: torch.Tensor, on_linears: Callable[[int], None]
) -> Sequence[LinearReport]:
    """Swap every nn.Linear under `layers` for a RoundedLinear; the reports' figures are made up."""
    weight_format = preset.split("_")[0]
    activation = get_activation_format("int4" if weight_format == "int4" else "nvfp4_one_level")
    linears = {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    }
    for name, linear in linears.items():
        record = QuantizedLinear(quantize(linear.weight.detach(), weight_format), activation)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, RoundedLinear(record))
        on_linears(1)
    return [make_report(name, 0.1, 20.0, alpha=0.5) for name in linears]
