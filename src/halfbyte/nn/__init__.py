"""Modules and model surgery: 4-bit linears, quantize_model, and the small models that run here."""

from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.nn.load_checkpoint import load
from halfbyte.nn.model_file import load_model, save_model
from halfbyte.nn.offload import offload_weights
from halfbyte.nn.placement_report import LayerPlacement, describe_placement
from halfbyte.nn.quantize_model import quantize_model
from halfbyte.nn.report import LinearReport, QuantizationReport
from halfbyte.nn.w4a4_linear import W4A4Linear, set_backend

__all__ = [
    "KeyMap",
    "LayerPlacement",
    "LinearReport",
    "QuantizationReport",
    "W4A4Linear",
    "describe_placement",
    "load",
    "load_model",
    "offload_weights",
    "quantize_model",
    "save_model",
    "set_backend",
]
