"""A whole 4-bit linear on the CPU, weight-only layers included."""

import torch

from halfbyte.cpu.gemm_w4a4 import gemm_w4a4, get_activation, multiply_decoded
from halfbyte.cpu.quantize_act_lora import (
    check_activation,
    project_lora,
    quantize_act_lora,
    smooth_rows,
)
from halfbyte.formats.quantized_linear import QuantizedLinear


@torch.no_grad()
def w4a4_linear(x: torch.Tensor, linear: QuantizedLinear, activation: str = "none") -> torch.Tensor:
    """Return the output of `linear` for x: [M, N] in x's dtype, rounded once.

    A weight-only linear (activation None) multiplies x / smooth in float32 with weights that are
    dequantized a few rows at a time.

    Args:
        x: [M, K] float32, bfloat16 or float16 on the CPU, any strides.
        linear: the linear; its tensors are on the CPU.
        activation: function of the float32 sums, one of `cpu.gemm_w4a4.ACTIVATIONS`.

    Raises:
        FormatError: an x that does not fit, or an unknown function.
    """
    function = get_activation(activation)
    if linear.activation is not None:
        return gemm_w4a4(quantize_act_lora(x, linear), linear, x.dtype, activation)
    check_activation(x, linear)
    dtype = x.dtype if activation == "none" else torch.float32
    out = torch.empty(x.shape[0], linear.out_features, dtype=dtype)
    if out.numel():
        lora_act = project_lora(x, linear)
        multiply_decoded(
            lambda rows: smooth_rows(x[rows], linear.smooth, 0.0), linear, lora_act, out
        )
    return function(out).to(x.dtype)
