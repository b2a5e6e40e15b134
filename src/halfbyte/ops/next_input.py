"""What the next layer wants of an output: how it crosses the operator schema, and its records.

As `linear_parts` does for a linear: a spec string and a fixed-order tensor list. A part that is
absent is an empty tensor, shape [0].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.activation import ActivationFormat, get_activation_format
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4a4.config import ACTIVATIONS, NEXT_ACTIVATIONS
from halfbyte.ops.linear_parts import is_present, list_parts, make_spec

NEXT_PART_NAMES: Final = ("next_smooth", "next_global_scale")
NEXT_OUTPUTS: Final = ("codes", "both")
_WANTED: Final = "'<function>/<activation format of the next linear>/<codes or both>'"


@dataclass(frozen=True)
class NextSpec:
    """What happens to the sums of a product, and what is written.

    Attributes:
        function: of the float32 sums: "none", "gelu", "gelu_tanh" or "silu".
        activation: name of the next linear's ActivationFormat.
        output: "codes" writes y quantized alone; "both" writes y too.
    """

    function: str
    activation: str
    output: str = "codes"

    def encode(self) -> str:
        """Return the one-line form used in schemas: `gelu/nvfp4_static/both`."""
        return f"{self.function}/{self.activation}/{self.output}"

    @property
    def activation_format(self) -> ActivationFormat:
        """The next linear's activation format."""
        return get_activation_format(self.activation)

    @property
    def has_y(self) -> bool:
        """Whether y is written beside its codes."""
        return self.output == "both"


@lru_cache(maxsize=1024)
def decode_next_spec(text: str) -> NextSpec:
    """Return the NextSpec of its one-line form; FormatError for anything else."""
    fields = text.split("/")
    if len(fields) != 3:
        raise FormatError(f"next spec {text[:200]!r}: wanted {_WANTED}")
    check_function(fields[0])
    get_activation_format(fields[1])
    if fields[2] not in NEXT_OUTPUTS:
        raise FormatError(
            f"next spec {text[:200]!r}: output {fields[2]!r}, wanted {_WANTED}; for y alone call "
            "gemm_w4a4 with activation="
        )
    return NextSpec(*fields)


def check_function(name: str) -> None:
    """Raise FormatError unless `name` is a function that the product ends with."""
    if name not in ACTIVATIONS:
        raise FormatError(f"activation {name!r} is unknown; use one of: {', '.join(ACTIVATIONS)}")


def make_next_spec(
    linear: QuantizedLinear, function: str = "none", output: str = "codes"
) -> NextSpec:
    """Return the spec for a next linear; FormatError if it is weight-only or a name is unknown."""
    spec = make_spec(linear)
    if spec.activation is None:
        raise FormatError("the next linear is weight-only: it reads y itself, call gemm_w4a4")
    return decode_next_spec(NextSpec(function, spec.activation, output).encode())


def list_next_parts(linear: QuantizedLinear) -> list[torch.Tensor]:
    """Return what the next linear's input is quantized with, in the order of NEXT_PART_NAMES."""
    parts = list_parts(linear)
    return [parts[5], parts[3]]


def make_rule(parts: Sequence[torch.Tensor], spec: NextSpec, columns: int) -> InputRule:
    """Return the rule for an output of `columns`; FormatError names the part that does not fit."""
    if len(parts) != len(NEXT_PART_NAMES):
        raise FormatError(f"next: {len(parts)} tensors, wanted {', '.join(NEXT_PART_NAMES)}")
    smooth, global_scale = (part if is_present(part) else None for part in parts)
    if smooth is not None and tuple(smooth.shape) != (columns,):
        raise FormatError(
            f"next_smooth: shape {tuple(smooth.shape)}, wanted [N] = [{columns}]: what the next "
            "linear reads are this one's output features"
        )
    return InputRule(spec.activation_format, smooth, global_scale)


def check_kernel_rule(spec: NextSpec) -> None:
    """Raise UnsupportedHardwareError for a next layer that the Blackwell epilogue cannot serve."""
    name = spec.activation
    if name in NEXT_ACTIVATIONS:
        return
    fix = "call gemm_w4a4 with activation= and quantize_act_lora on its y, or use the cpu backend"
    if spec.activation_format.global_scale == "dynamic":
        reason = "its global scale is the largest |y| of all tiles, which the first does not know"
    else:
        reason = f"the epilogue writes {', '.join(NEXT_ACTIVATIONS)}"
    raise UnsupportedHardwareError(f"next activation {name!r}: {reason}; {fix}")
