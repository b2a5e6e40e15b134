"""Number formats: frozen records, bit-exact codecs, packing, scale layouts and quantization.

Tensors are quantized by the functions of `halfbyte.formats.quantize`; they are not repeated here,
for a function of that name would hide its module.
"""

from halfbyte.formats.activation import (
    ACTIVATION_FORMATS,
    ActivationFormat,
    get_activation_format,
)
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_format import FORMATS, BlockFormat, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.elements import (
    ELEMENTS,
    ElementFormat,
    decode_elements,
    encode_elements,
    get_element,
)
from halfbyte.formats.modes import MODES, QuantizeMode, get_mode
from halfbyte.formats.packing import pack_nibbles, pack_sixbit, unpack_nibbles, unpack_sixbit
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import SCALE_LAYOUTS, pack_scales, unpack_scales

__all__ = [
    "ACTIVATION_FORMATS",
    "ELEMENTS",
    "FORMATS",
    "MODES",
    "SCALE_LAYOUTS",
    "ActivationFormat",
    "BlockCounts",
    "BlockFormat",
    "BlockScaledTensor",
    "ElementFormat",
    "QuantizeMode",
    "QuantizedLinear",
    "decode_elements",
    "encode_elements",
    "get_activation_format",
    "get_element",
    "get_format",
    "get_mode",
    "pack_nibbles",
    "pack_scales",
    "pack_sixbit",
    "unpack_nibbles",
    "unpack_scales",
    "unpack_sixbit",
]
