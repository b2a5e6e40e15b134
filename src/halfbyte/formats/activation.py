"""How activations are quantized at run time; one named record for each convention in use."""

from dataclasses import dataclass
from typing import Literal

from halfbyte.errors import FormatError
from halfbyte.formats.block_format import BlockFormat, get_format


@dataclass(frozen=True)
class ActivationFormat:
    """A dynamic quantization rule for x, applied to `(x + shift) / smooth` row by row.

    Attributes:
        name: the name used in files and records.
        block_format: elements, block length and block scale.
        payload_divisor: values are divided by the scale as "stored" (after rounding) or by the
            "unrounded" float32 scale, as nunchaku's kernel does.
        global_scale: "none"; "static", a calibrated float32 multiplier in the record; "dynamic",
            amax(x)/2688 of the tensor at hand.
        scale_dtype: dtype of a float block scale ("float16" for INT4), None for E4M3 and E8M0.
        shift: added to x before smoothing (post-GELU unsigned INT4: nunchaku's 0.171875).
    """

    name: str
    block_format: BlockFormat
    payload_divisor: Literal["stored", "unrounded"]
    global_scale: Literal["none", "static", "dynamic"]
    scale_dtype: Literal["float16", "bfloat16", "float32"] | None = None
    shift: float = 0.0


_ACTIVATIONS = (
    ActivationFormat("nvfp4_nunchaku", get_format("nvfp4_one_level"), "unrounded", "none"),
    ActivationFormat("nvfp4_one_level", get_format("nvfp4_one_level"), "stored", "none"),
    ActivationFormat("nvfp4_static", get_format("nvfp4"), "stored", "static"),
    ActivationFormat("nvfp4_dynamic", get_format("nvfp4"), "stored", "dynamic"),
    ActivationFormat("mxfp4", get_format("mxfp4"), "stored", "none"),
    ActivationFormat("int4", get_format("int4"), "stored", "none", "float16"),
    ActivationFormat("uint4_shifted", get_format("uint4"), "stored", "none", "float16", 0.171875),
)
ACTIVATION_FORMATS: dict[str, ActivationFormat] = {record.name: record for record in _ACTIVATIONS}


def get_activation_format(name: str) -> ActivationFormat:
    """Return the activation format called `name`; FormatError lists the known names."""
    try:
        return ACTIVATION_FORMATS[name]
    except KeyError:
        known = ", ".join(ACTIVATION_FORMATS)
        raise FormatError(f"activation format {name!r} is unknown; use one of: {known}") from None
