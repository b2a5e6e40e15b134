"""PyTorch operators: they validate, choose who runs, and launch; there is no math here.

Each op is registered as `torch.ops.halfbyte.<name>` with a fake kernel, so that torch.compile,
torch.export and meta tensors work. None has a backward pass: 4-bit linears are for inference.
"""

from halfbyte.ops.backends import BACKENDS
from halfbyte.ops.gemm_w4a4 import gemm_w4a4
from halfbyte.ops.gemm_w4a4_quantized import gemm_w4a4_quantized
from halfbyte.ops.hopper_modes import MODES
from halfbyte.ops.linear_parts import PART_NAMES, LinearSpec, decode_spec, list_parts, make_spec
from halfbyte.ops.next_input import NextSpec, decode_next_spec, list_next_parts, make_next_spec
from halfbyte.ops.prepared import PreparedLinear, prepare_linear
from halfbyte.ops.project_lora import project_lora
from halfbyte.ops.published import gemm_published
from halfbyte.ops.quantize_act_lora import quantize_act_lora
from halfbyte.ops.w4a4_linear import w4a4_linear

__all__ = [
    "BACKENDS",
    "MODES",
    "PART_NAMES",
    "LinearSpec",
    "NextSpec",
    "PreparedLinear",
    "decode_next_spec",
    "decode_spec",
    "gemm_published",
    "gemm_w4a4",
    "gemm_w4a4_quantized",
    "list_next_parts",
    "list_parts",
    "make_next_spec",
    "make_spec",
    "prepare_linear",
    "project_lora",
    "quantize_act_lora",
    "w4a4_linear",
]
