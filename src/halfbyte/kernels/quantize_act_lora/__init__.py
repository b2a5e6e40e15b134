"""x to packed 4-bit codes, block scales and the low-rank down projection, in one read of x."""
