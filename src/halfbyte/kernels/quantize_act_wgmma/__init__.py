"""Activations for the Hopper GEMM: quantized, in its layout, with their low-rank product."""
