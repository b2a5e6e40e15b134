"""The whole linear layer in float64: quantize x, multiply, add.

With an activation format: `gemm_w4a4(quantize_act_lora(x))`. Weight-only:

    y = (x / smooth) @ weight^T * channel_scale + bias + (x @ lora_down^T) @ lora_up^T
"""

import numpy as np
import torch

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array, dequantize, read_floats
from halfbyte.reference.gemm_w4a4 import finish_product, gemm_w4a4
from halfbyte.reference.quantize_act_lora import check_input, quantize_act_lora


def w4a4_linear(x: torch.Tensor, linear: QuantizedLinear) -> Float64Array:
    """Return y [M, N] float64 for x [M, K] (f16/bf16/f32), unrounded."""
    if linear.activation is not None:
        return gemm_w4a4(quantize_act_lora(x, linear), linear)
    check_input(x, linear)
    raw = read_floats(x)
    smoothed = raw if linear.smooth is None else raw / read_floats(linear.smooth)
    lora_act = None
    if linear.lora_down is not None and linear.rank > 0:
        lora_act = raw @ read_floats(linear.lora_down).T
    with np.errstate(invalid="ignore"):  # an infinity in x makes its row NaN
        product = smoothed @ dequantize(linear.weight).T
    return finish_product(product, lora_act, linear)
