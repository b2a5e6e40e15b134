"""A 4-bit product whose output is the next layer's input: activation function, rounding, blocks.

    y     = f(sum)                         sum as in `gemm_w4a4`, float64
    y     = y rounded to out_dtype         float16, bfloat16 or float32, once, to nearest even
    codes = quantize(y)                    by the next linear's rule: shift, smooth, blocks

    f: none        v
       gelu        v * Phi(v) = v * (1 + erf(v / sqrt(2))) / 2
       gelu_tanh   v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 v^3))) / 2
       silu        v / (1 + e^-v)

What is quantized is the rounded y: the bytes are those that quantizing a stored y gives. Formulas
of f: torch.nn.functional.
"""

import math

import numpy as np
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array
from halfbyte.reference.gemm_w4a4 import gemm_w4a4
from halfbyte.reference.quantize_act_lora import ReferenceActivation, quantize_input

_BFLOAT16_MIN_EXPONENT = -126 - 7  # of the spacing of its subnormals
_BFLOAT16_MAX = 3.3895313892515355e38


def gemm_w4a4_quantized(
    activation: ReferenceActivation,
    linear: QuantizedLinear,
    rule: InputRule,
    out_dtype: torch.dtype,
    function: str = "none",
) -> tuple[Float64Array, ReferenceActivation]:
    """Return (y [M, N] float64, rounded to `out_dtype`; y quantized by `rule`, without lora_act).

    Args:
        activation: the quantized input [M, K]. linear: [N, K].
        rule: how the next linear, of N input features, quantizes its input.
        out_dtype: float16, bfloat16 or float32.
        function: "none", "gelu", "gelu_tanh" or "silu".
    """
    total = gemm_w4a4(activation, linear)
    y = round_to_dtype(apply_activation(total, function), out_dtype)
    return y, quantize_input(y, rule)


def apply_activation(values: Float64Array, function: str) -> Float64Array:
    """Return f(values) in float64; FormatError for an unknown f."""
    with np.errstate(over="ignore", invalid="ignore"):
        if function == "none":
            return values
        if function == "gelu":
            erf = np.array([math.erf(value) for value in (values / math.sqrt(2)).flat])
            return np.asarray(values * 0.5 * (1 + erf.reshape(values.shape)), dtype=np.float64)
        if function == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
            return np.asarray(values * 0.5 * (1 + np.tanh(inner)), dtype=np.float64)
        if function == "silu":
            return np.asarray(values / (1 + np.exp(-values)), dtype=np.float64)
    raise FormatError(f"activation {function!r}: wanted none, gelu, gelu_tanh or silu")


def round_to_dtype(values: Float64Array, dtype: torch.dtype) -> Float64Array:
    """Return float64 values rounded once to the numbers of `dtype`, ties to even, still float64."""
    with np.errstate(over="ignore"):
        if dtype == torch.float32:
            return values.astype(np.float32).astype(np.float64)
        if dtype == torch.float16:
            return values.astype(np.float16).astype(np.float64)
    if dtype != torch.bfloat16:
        raise FormatError(f"out_dtype {dtype}: wanted float16, bfloat16 or float32")
    _, exponent = np.frexp(values)  # |v| in [2^(exponent - 1), 2^exponent): 8 bits are kept
    spacing = np.maximum(exponent - 8, _BFLOAT16_MIN_EXPONENT)
    rounded = np.ldexp(np.rint(np.ldexp(values, -spacing)), spacing)
    is_large = np.isfinite(values) & (np.abs(rounded) > _BFLOAT16_MAX)
    return np.where(is_large, np.copysign(np.inf, values), rounded)
