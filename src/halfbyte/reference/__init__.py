"""The plain, slow, obvious definition of every op, in NumPy float64 and from bytes.

Nothing here calls a codec, packer or kernel of the rest of the package (only its records are
read), so that a test which compares anything with this folder compares two independent paths.
"""

from halfbyte.reference.decode import decode_code_values, dequantize
from halfbyte.reference.gemm_w4a4 import gemm_w4a4
from halfbyte.reference.quantize_act_lora import (
    ReferenceActivation,
    dequantize_activation,
    quantize_act_lora,
    quantize_rows,
)
from halfbyte.reference.w4a4_linear import w4a4_linear

__all__ = [
    "ReferenceActivation",
    "decode_code_values",
    "dequantize",
    "dequantize_activation",
    "gemm_w4a4",
    "quantize_act_lora",
    "quantize_rows",
    "w4a4_linear",
]
