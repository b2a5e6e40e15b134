"""The error that a result may have: twice that of the same layer in plain torch, same precision."""

import numpy as np
import torch

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference import dequantize, dequantize_activation, quantize_act_lora, w4a4_linear
from halfbyte.reference.decode import Float64Array

FEW_OUTPUTS = 1024


def measure_error(y: torch.Tensor, wanted: Float64Array) -> float:
    """Return the relative Frobenius error of y; 0 for two empty or two zero matrices."""
    assert tuple(y.shape) == wanted.shape
    difference = float(np.linalg.norm(y.double().numpy() - wanted))
    size = float(np.linalg.norm(wanted))
    return difference / size if size else difference


def measure_torch_error(x: torch.Tensor, linear: QuantizedLinear) -> float:
    """Return the error of the same layer on dequantized operands, done by torch in x's dtype."""
    return measure_error(run_in_torch(x, linear), w4a4_linear(x, linear))


def run_in_torch(x: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
    """Return y of the layer on dequantized operands, all of it in x's dtype."""

    def in_dtype(values: Float64Array) -> torch.Tensor:
        return torch.as_tensor(values).to(x.dtype)

    operand = x
    if linear.activation is not None:
        operand = in_dtype(dequantize_activation(quantize_act_lora(x, linear)))
    elif linear.smooth is not None:
        operand = x / linear.smooth.to(x.dtype)
    weight = in_dtype(dequantize(linear.weight))
    y = operand @ weight.T
    if linear.channel_scale is not None:
        y = y * linear.channel_scale.to(x.dtype)
    if linear.bias is not None:
        y = y + linear.bias.to(x.dtype)
    if linear.lora_down is not None and linear.lora_up is not None:
        y = y + (x @ linear.lora_down.to(x.dtype).T) @ linear.lora_up.to(x.dtype).T
    return y


def measure_one_rounding(x: torch.Tensor, linear: QuantizedLinear) -> float:
    """Return the relative error of a result in which every term was rounded once to x's dtype."""
    operand: Float64Array = np.abs(x.double().numpy())
    if linear.activation is not None:
        operand = np.abs(dequantize_activation(quantize_act_lora(x, linear)))
    elif linear.smooth is not None:
        operand = operand / linear.smooth.double().numpy()
    size = operand @ np.abs(dequantize(linear.weight)).T
    if linear.channel_scale is not None:
        size = size * linear.channel_scale.double().numpy()
    if linear.bias is not None:
        size = size + linear.bias.double().abs().numpy()
    if linear.lora_down is not None and linear.lora_up is not None:
        lora_act = x.double().abs() @ linear.lora_down.double().abs().T
        size = size + (lora_act @ linear.lora_up.double().abs().T).numpy()
    wanted = float(np.linalg.norm(w4a4_linear(x, linear)))
    rounding = 0.5 * torch.finfo(x.dtype).eps
    return rounding * float(np.linalg.norm(size)) / wanted if wanted else rounding


def assert_close_to_reference(y: torch.Tensor, x: torch.Tensor, linear: QuantizedLinear) -> None:
    """Assert that y is within twice the same-precision torch error of the float64 truth.

    Torch may hit a handful of outputs exactly, by luck: where there are few, one rounding of each
    term is allowed too.
    """
    assert y.dtype == x.dtype
    torch_error = measure_torch_error(x, linear)
    if y.numel() < FEW_OUTPUTS:
        torch_error = max(torch_error, measure_one_rounding(x, linear))
    error = measure_error(y, w4a4_linear(x, linear))
    assert error <= 2.0 * torch_error
