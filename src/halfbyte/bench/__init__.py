"""Correctness first, then time: accuracy of quantized models on real text, and the demo."""
