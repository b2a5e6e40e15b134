"""SVDQuant: smooth, split off a low rank, round the rest; pure functions on tensors and files."""

from halfbyte.svdquant.presets import PRESETS, SVDQuantPreset, get_preset
from halfbyte.svdquant.quantize_layer import GroupChoice, quantize_linear_group
from halfbyte.svdquant.statistics import InputStatistics

__all__ = [
    "PRESETS",
    "GroupChoice",
    "InputStatistics",
    "SVDQuantPreset",
    "get_preset",
    "quantize_linear_group",
]
