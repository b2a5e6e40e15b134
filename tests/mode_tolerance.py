"""The error that a result of a mode may have: twice that of the same operands in plain torch."""

import numpy as np
import torch

from halfbyte.bench.mode_accuracy import fold_linear, multiply_with_token_scales, round_rows
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array
from tests.tolerance import FEW_OUTPUTS, assert_close_to_reference, measure_error


def assert_close_to_mode(
    y: torch.Tensor, x: torch.Tensor, linear: QuantizedLinear, mode: str
) -> None:
    """Assert that y [M, N] is mode's product of x: "exact", "fp8" or "int8"."""
    if mode == "exact":
        assert_close_to_reference(y, x, linear)
        return
    assert y.dtype == x.dtype
    wanted = multiply_with_token_scales(x, linear, mode)
    limit = measure_error(multiply_in_torch(x, linear, mode), wanted)
    limit = max(limit, measure_operand_rounding(x, linear, wanted))
    if y.numel() < FEW_OUTPUTS:
        limit = max(limit, measure_one_rounding(x, linear, mode))
    assert measure_error(y, wanted) <= 2.0 * limit


def multiply_in_torch(x: torch.Tensor, linear: QuantizedLinear, mode: str) -> torch.Tensor:
    """Return y of the operands of a mode, all of it in x's dtype.

    lora_up is one that was divided by what scales its column, and rounded again.
    """
    act = torch.as_tensor(round_rows(x, linear, mode)).to(x.dtype)
    y = act @ torch.as_tensor(fold_linear(linear, mode)).to(x.dtype).T
    if linear.bias is not None:
        y = y + linear.bias.to(x.dtype)
    if linear.lora_down is not None and linear.lora_up is not None:
        lora_up = (linear.lora_up.double() / find_column_scale(linear)[:, None]).to(x.dtype)
        branch = (x @ linear.lora_down.to(x.dtype).T) @ lora_up.T
        y = y + branch * find_column_scale(linear).to(x.dtype)
    return y


def measure_operand_rounding(
    x: torch.Tensor, linear: QuantizedLinear, wanted: Float64Array
) -> float:
    """Return the errors of y, lora_act and lora_up rounded to x's dtype, each alone, added up.

    Where one row and few ranks make up nearly all of y (tokens with massive activations) roundings
    add, or cancel by luck in torch.
    """
    total = measure_error(torch.as_tensor(wanted).to(x.dtype), wanted)
    if linear.lora_down is None or linear.lora_up is None or not total:
        return total
    scale = find_column_scale(linear)[:, None]
    lora_act, lora_up = x.double() @ linear.lora_down.double().T, linear.lora_up.double()
    rounded_up = (lora_up / scale).to(x.dtype).double() * scale
    for act, up in ((lora_act.to(x.dtype).double(), lora_up), (lora_act, rounded_up)):
        difference = float((act @ up.T - lora_act @ lora_up.T).norm())
        total += difference / float(np.linalg.norm(wanted))
    return total


def find_column_scale(linear: QuantizedLinear) -> torch.Tensor:
    """Return the product of the scales of each column [N] float64, its block scales apart."""
    scale = torch.ones(linear.out_features, dtype=torch.float64)
    for factor in (linear.weight.global_scale, linear.channel_scale):
        scale = scale if factor is None else scale * factor.double()
    return scale


def measure_one_rounding(x: torch.Tensor, linear: QuantizedLinear, mode: str) -> float:
    """Return the relative error of a result in which every term was rounded once to x's dtype."""
    size = np.abs(round_rows(x, linear, mode)) @ np.abs(fold_linear(linear, mode)).T
    if linear.bias is not None:
        size = size + linear.bias.double().abs().numpy()
    if linear.lora_down is not None and linear.lora_up is not None:
        lora_act = x.double().abs() @ linear.lora_down.double().abs().T
        size = size + (lora_act @ linear.lora_up.double().abs().T).numpy()
    wanted = float(np.linalg.norm(multiply_with_token_scales(x, linear, mode)))
    rounding = 0.5 * torch.finfo(x.dtype).eps
    return rounding * float(np.linalg.norm(size)) / wanted if wanted else rounding
