"""The 4-bit product with everything that follows it, in float64.

    y[m, n] = (sum_k act[m, k] * weight[n, k]) * channel_scale[n] + bias[n]
              + sum_r lora_act[m, r] * lora_up[n, r]

`act` and `weight` are the dequantized values (code * block scale * global scale). channel_scale
scales the 4-bit product alone. Nothing is rounded.
"""

import numpy as np

from halfbyte.errors import FormatError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array, dequantize, read_floats
from halfbyte.reference.quantize_act_lora import ReferenceActivation, dequantize_activation


def gemm_w4a4(activation: ReferenceActivation, linear: QuantizedLinear) -> Float64Array:
    """Return y [M, N] float64 of a quantized activation [M, K] and a linear [N, K].

    Raises FormatError for two different K.
    """
    if activation.columns != linear.in_features:
        raise FormatError(
            f"activation: {activation.columns} columns, wanted in_features={linear.in_features}"
        )
    product = dequantize_activation(activation) @ dequantize(linear.weight).T
    return finish_product(product, activation.lora_act, linear)


def finish_product(
    product: Float64Array, lora_act: Float64Array | None, linear: QuantizedLinear
) -> Float64Array:
    """Return product [M, N] scaled by channel, plus bias, plus the low-rank branch."""
    y = product
    if linear.channel_scale is not None:
        y = y * read_floats(linear.channel_scale)
    if linear.bias is not None:
        y = y + read_floats(linear.bias)
    if lora_act is not None and linear.lora_up is not None:
        with np.errstate(invalid="ignore"):  # an infinity in x makes its row NaN
            y = y + lora_act @ read_floats(linear.lora_up).T
    return np.asarray(y, dtype=np.float64)
