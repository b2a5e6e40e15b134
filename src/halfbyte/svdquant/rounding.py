"""Rounding the residual of one linear to its weight format."""

from typing import Literal

import torch

from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantize import quantize
from halfbyte.svdquant.gptq import ErrorPropagation, round_with_propagation
from halfbyte.svdquant.presets import SVDQuantPreset


def round_residual(
    residual: torch.Tensor, preset: SVDQuantPreset, propagation: ErrorPropagation | None
) -> BlockScaledTensor:
    """Return `residual` ([N, K] float32, finite) in the preset's weight format.

    Args:
        residual: what is left of the smoothed weight beside the low-rank branch.
        preset: the weight format and rounding.
        propagation: for "gptq"; None where there are no calibration data.
    """
    search: Literal["absmax", "optimal"] = "absmax" if preset.rounding == "nearest" else "optimal"
    rounded = quantize(residual, preset.weight_format, scale_search=search)
    if preset.rounding != "gptq" or propagation is None:
        return rounded
    return round_with_propagation(residual, rounded, propagation)
