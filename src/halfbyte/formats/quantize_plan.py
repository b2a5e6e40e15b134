"""What one call of the quantizer asks for, checked before any work."""

from dataclasses import dataclass

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_format import BlockFormat
from halfbyte.formats.dtypes import FLOAT_BY_NAME, FLOAT_DTYPES
from halfbyte.formats.e8m0 import E8M0_ROUNDINGS
from halfbyte.formats.modes import QuantizeMode, get_mode
from halfbyte.formats.nvfp4 import MIN_GLOBAL_SCALE

_MAX_GLOBAL_SCALE = 2.0**119  # times the largest block scale, 448, still a float32


@dataclass(frozen=True)
class QuantizePlan:
    """The settings of one call; bad ones raise when the record is made.

    Attributes:
        format: the number format.
        mode: the NVFP4 arithmetic.
        scale_search: "absmax" or "optimal".
        e8m0_rounding: the scale rule of MX formats.
        scale_dtype: dtype of the float scales of INT4 and UINT4.
        tensor_name: how error messages call the input.
    """

    format: BlockFormat
    mode: QuantizeMode
    scale_search: str = "absmax"
    e8m0_rounding: str = "floor"
    scale_dtype: torch.dtype = torch.float16
    tensor_name: str = "x"

    def __post_init__(self) -> None:
        """Check that the settings exist and go together; FormatError says what does not."""
        name, mode = self.format.name, self.mode.name
        if self.format.scale != "e4m3" and mode not in ("halfbyte", "nunchaku"):
            raise FormatError(f"mode {mode!r} describes NVFP4 alone; for {name} use 'halfbyte'")
        if self.scale_search not in ("absmax", "optimal"):
            raise FormatError(
                f"scale_search {self.scale_search!r} is unknown; use one of: absmax, optimal"
            )
        if self.scale_search == "optimal" and mode != "halfbyte":
            raise FormatError(
                f"scale_search 'optimal' is halfbyte's own, but mode is {mode!r}; use 'halfbyte'"
            )
        if self.e8m0_rounding not in E8M0_ROUNDINGS:
            known = ", ".join(E8M0_ROUNDINGS)
            raise FormatError(
                f"e8m0_rounding {self.e8m0_rounding!r} is unknown; use one of: {known}"
            )
        if self.scale_dtype not in FLOAT_DTYPES:
            raise FormatError(
                f"scale_dtype {self.scale_dtype}: wanted float16, bfloat16 or float32"
            )


def make_activation_plan(act: ActivationFormat, tensor_name: str = "x") -> QuantizePlan:
    """Return the settings with which inputs of a linear become `act`."""
    mode = get_mode("nunchaku" if act.payload_divisor == "unrounded" else "halfbyte")
    scale_dtype = FLOAT_BY_NAME[act.scale_dtype or "float16"]
    return QuantizePlan(act.block_format, mode, scale_dtype=scale_dtype, tensor_name=tensor_name)


def check_dense(name: str, x: object) -> None:
    """Raise FormatError unless `x` is a tensor whose numbers lie in memory by strides."""
    if not isinstance(x, torch.Tensor):
        raise FormatError(f"{name}: {type(x).__name__}, wanted torch.Tensor")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout)
        raise FormatError(
            f"{name}: a {kind} tensor, wanted a dense one; convert it with to_dense()"
        )


def check_input(x: torch.Tensor, name: str) -> None:
    """Raise FormatError unless `x` is a [rows, columns] matrix of a 16/32-bit float dtype."""
    check_dense(name, x)
    if x.device.type == "meta":
        raise FormatError(f"{name}: on the meta device, without values; load the values first")
    if x.dtype not in FLOAT_DTYPES:
        raise FormatError(f"{name}: dtype {x.dtype}, wanted float32, bfloat16 or float16")
    if x.ndim != 2:
        raise FormatError(
            f"{name}: shape {tuple(x.shape)}, wanted [rows, columns]; flatten leading dimensions"
        )


def check_global_scale(record: BlockFormat, global_scale: torch.Tensor | None) -> None:
    """Raise FormatError unless `global_scale` is one that the format takes, or None."""
    if global_scale is None:
        return
    if not record.has_global_scale:
        raise FormatError(f"{record.name} has no global_scale; use nvfp4, or leave it out")
    check_dense("global_scale", global_scale)
    if global_scale.device.type == "meta":
        raise FormatError("global_scale: on the meta device, without a value; load the value first")
    if global_scale.dtype != torch.float32 or global_scale.ndim != 0:
        raise FormatError(
            f"global_scale: {global_scale.dtype} {tuple(global_scale.shape)}, wanted a float32 "
            "tensor of shape ()"
        )
    value = float(global_scale.detach())
    if not (MIN_GLOBAL_SCALE <= value <= _MAX_GLOBAL_SCALE):
        raise FormatError(f"global_scale {value}: wanted positive and finite, 2**-126 to 2**119")
