"""The plain, slow, obvious definition of every op, in NumPy float64 and from bytes.

Nothing here calls a codec, packer or kernel of the rest of the package (only its records are
read), so that a test which compares anything with this folder compares two independent paths.
"""

from halfbyte.reference.decode import decode_code_values, dequantize
from halfbyte.reference.gemm_w4a4 import gemm_w4a4
from halfbyte.reference.gemm_w4a4_quantized import (
    apply_activation,
    gemm_w4a4_quantized,
    round_to_dtype,
)
from halfbyte.reference.quantize_act_lora import (
    ReferenceActivation,
    dequantize_activation,
    quantize_act_lora,
    quantize_input,
    quantize_rows,
)
from halfbyte.reference.w4a4_linear import w4a4_linear

__all__ = [
    "ReferenceActivation",
    "apply_activation",
    "decode_code_values",
    "dequantize",
    "dequantize_activation",
    "gemm_w4a4",
    "gemm_w4a4_quantized",
    "quantize_act_lora",
    "quantize_input",
    "quantize_rows",
    "round_to_dtype",
    "w4a4_linear",
]
