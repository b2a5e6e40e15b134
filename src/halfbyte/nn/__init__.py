"""Modules and model surgery: 4-bit linears, quantize_model, and the small models that run here."""

from halfbyte.nn.w4a4_linear import W4A4Linear

__all__ = ["W4A4Linear"]
