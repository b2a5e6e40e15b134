"""Parts of families that store every float in one 16-bit dtype."""

from collections.abc import Mapping
from typing import Final

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.dtypes import FLOAT_DTYPES

# bfloat16 has 8 bits: one rounding changes a number by up to 2^-9 of it. Of a weight three factors
# are rounded, of a low-rank product two.
BFLOAT16_ROUNDING: Final = 3 * 2.0**-9


def round_parts(parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return `parts` with every 16- or 32-bit float rounded to `dtype` once; others as they are.

    Raises:
        CheckpointError: a number that is not zero becomes zero or infinite; the message names the
            part.
    """
    rounded = dict(parts)
    for name, part in parts.items():
        if part.dtype in FLOAT_DTYPES and part.dtype != dtype:
            rounded[name] = _round_part(name, part, dtype)
    return rounded


def find_other_dtypes(
    parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the float parts of another dtype: those that `round_parts` would not give back."""
    return {
        name: part
        for name, part in parts.items()
        if part.dtype in FLOAT_DTYPES and part.dtype != dtype
    }


def _round_part(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    rounded = part.to(dtype)
    if rounded.is_meta:
        return rounded
    is_lost = torch.isfinite(part) & (~torch.isfinite(rounded) | ((rounded == 0) & (part != 0)))
    if bool(is_lost.any()):
        value = float(part[is_lost].flatten()[0]) if part.ndim else float(part)
        raise CheckpointError(
            f"{name}: {value:g} does not fit {dtype}; quantize with other scales, or write a "
            "family that stores float32"
        )
    return rounded
