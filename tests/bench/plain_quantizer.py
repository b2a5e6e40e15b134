"""A quantizer for tests of the demo: rounds each weight to its format and does nothing else."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from halfbyte.bench.demo_result import LayerRow
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.quantize import dequantize, quantize, quantize_activation
from halfbyte.formats.quantized_linear import QuantizedLinear


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


def quantize_plainly(
    model: nn.Module, preset: str, calibration: torch.Tensor, on_step: Callable[[], None]
) -> Sequence[LayerRow]:
    """Swap every nn.Linear under `layers` for a RoundedLinear; the report's figures are made up."""
    weight_format = preset.split("_")[0]
    activation = get_activation_format("int4" if weight_format == "int4" else "nvfp4_one_level")
    linears = {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    }
    rows = []
    for index, (name, linear) in enumerate(linears.items()):
        record = QuantizedLinear(quantize(linear.weight.detach(), weight_format), activation)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, RoundedLinear(record))
        alpha = 0.5 if "svdquant" in preset else None
        rows.append(LayerRow(name, 0.05 + 0.01 * (index % 7), 20.0, 0, 1, 2, alpha, alpha))
    for _ in range(len(model.layers)):
        on_step()
    return rows
