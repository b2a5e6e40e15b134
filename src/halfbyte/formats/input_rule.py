"""InputRule: what of a linear decides how its input is quantized, without its weight."""

from dataclasses import dataclass
from typing import Self

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear


@dataclass(frozen=True, eq=False)
class InputRule:
    """quantize((x + shift) / smooth): format, factors and calibrated scale of one linear's input.

    Attributes:
        activation: elements, blocks, block scales, kind of global scale, shift.
        smooth: [K] float or None for ones.
        global_scale: [] float32, present exactly for a "static" activation format.
    """

    activation: ActivationFormat
    smooth: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and which parts belong together."""
        smooth, scale = self.smooth, self.global_scale
        if smooth is not None and (smooth.ndim != 1 or smooth.dtype not in FLOAT_DTYPES):
            raise FormatError(
                f"smooth: {smooth.dtype} {tuple(smooth.shape)}, wanted [K] float16, bfloat16 or "
                "float32"
            )
        if (scale is not None) != (self.activation.global_scale == "static"):
            wanted = "takes no global scale" if scale is not None else "needs its global scale"
            raise FormatError(f"activation {self.activation.name!r} {wanted}")
        if scale is not None and (scale.ndim != 0 or scale.dtype != torch.float32):
            raise FormatError(
                f"global_scale: {scale.dtype} {tuple(scale.shape)}, wanted one float32 of shape ()"
            )

    @classmethod
    def from_linear(cls, linear: QuantizedLinear) -> Self:
        """Return the rule of a linear; FormatError for a weight-only one."""
        if linear.activation is None:
            raise FormatError("linear is weight-only (activation None): its input is not quantized")
        return cls(linear.activation, linear.smooth, linear.activation_global_scale)
