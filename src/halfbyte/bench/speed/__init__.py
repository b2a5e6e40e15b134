"""How fast linears, quantizers and copies run on the GPU at hand, and what else does the same."""
