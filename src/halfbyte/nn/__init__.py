"""Modules and model surgery: 4-bit linears, quantize_model, and the small models that run here."""
