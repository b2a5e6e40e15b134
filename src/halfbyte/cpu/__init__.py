"""The CPU backend: 4-bit linears computed from packed weights, activations quantized as on a GPU.

Every function has a compiled path (`halfbyte.native`) and a torch path that is always there; both
keep the weights packed and decode a few rows at a time.
"""

from halfbyte.cpu.gemm_w4a4 import gemm_w4a4
from halfbyte.cpu.gemm_w4a4_quantized import gemm_w4a4_quantized
from halfbyte.cpu.quantize_act_lora import QuantizedActivation, project_lora, quantize_act_lora
from halfbyte.cpu.w4a4_linear import w4a4_linear

__all__ = [
    "QuantizedActivation",
    "gemm_w4a4",
    "gemm_w4a4_quantized",
    "project_lora",
    "quantize_act_lora",
    "w4a4_linear",
]
