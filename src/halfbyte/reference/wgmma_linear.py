"""The whole linear layer in each mode of Hopper, in float64 from the record.

exact       w4a4_linear: the layer's own activations
fp8         x' in E4M3 with one scale a token, weights folded into E4M3
int8        x' in INT8 with one scale a token, INT4 weights as they are

y = (act * token_scale) @ (w * normalizer * global scale)^T * channel_scale + bias
    + (x @ lora_down^T) @ lora_up^T
"""

import numpy as np
import torch

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array, read_floats
from halfbyte.reference.gemm_w4_wgmma import fold_weight
from halfbyte.reference.gemm_w4a4 import finish_product
from halfbyte.reference.quantize_act_lora import check_input
from halfbyte.reference.quantize_act_wgmma import TOKEN_MODES, quantize_tokens
from halfbyte.reference.w4a4_linear import w4a4_linear


def wgmma_linear(x: torch.Tensor, linear: QuantizedLinear, mode: str) -> Float64Array:
    """Return y [M, N] float64 for x [M, K] (f16/bf16/f32), unrounded.

    Args:
        x: the input.
        linear: any formats that the mode has.
        mode: "fp8", "exact" or "int8".
    """
    if mode not in TOKEN_MODES:
        return w4a4_linear(x, linear)
    check_input(x, linear)
    raw = read_floats(x)
    inverse_smooth = None
    if linear.smooth is not None:
        inverse_smooth = (1.0 / read_floats(linear.smooth)).astype(np.float32)
    shift = 0.0 if linear.activation is None else linear.activation.shift
    tokens = quantize_tokens(raw, mode, inverse_smooth, shift)
    assert tokens.token_scale is not None
    weight, normalizer = fold_weight(linear.weight, mode)
    if linear.weight.global_scale is not None:
        normalizer = normalizer * read_floats(linear.weight.global_scale)
    lora_act = None
    if linear.lora_down is not None and linear.rank > 0:
        lora_act = raw @ read_floats(linear.lora_down).T
    with np.errstate(invalid="ignore"):  # a NaN scale makes its row NaN
        product = tokens.act * tokens.token_scale[:, None] @ (weight * normalizer[:, None]).T
    return finish_product(product, lora_act, linear)
