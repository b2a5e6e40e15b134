"""A product whose output is quantized for the next layer: product, activation, rounding, blocks."""

import torch

from halfbyte.cpu.gemm_w4a4 import gemm_w4a4
from halfbyte.cpu.quantize_act_lora import QuantizedActivation, quantize_rows
from halfbyte.errors import FormatError
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.quantized_linear import QuantizedLinear


@torch.no_grad()
def gemm_w4a4_quantized(
    act: QuantizedActivation,
    linear: QuantizedLinear,
    rule: InputRule,
    out_dtype: torch.dtype,
    activation: str = "none",
) -> tuple[torch.Tensor, QuantizedActivation]:
    """Return (y [M, N] `out_dtype`, y quantized by `rule` without lora_act).

    What is quantized is the rounded y: the bytes are those of `quantize_act_lora` for it.

    Args:
        act: what `quantize_act_lora` returned for this linear.
        linear: [N, K], on the CPU.
        rule: how the next linear, of N input features, quantizes its input.
        out_dtype: float32, bfloat16 or float16.
        activation: one of ACTIVATIONS in `cpu.gemm_w4a4`, in float32.

    Raises FormatError as `gemm_w4a4` does, and for a rule of another N.
    """
    if rule.smooth is not None and len(rule.smooth) != linear.out_features:
        raise FormatError(
            f"next smooth: {len(rule.smooth)} factors, the linear has N={linear.out_features}"
        )
    y = gemm_w4a4(act, linear, out_dtype, activation)
    values, counts = quantize_rows(y, rule)
    return y, QuantizedActivation(values, None, counts)
