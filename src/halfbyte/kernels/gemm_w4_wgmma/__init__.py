"""The W4A4 GEMM for sm_90a: weights decoded in registers, `wgmma` with A from registers."""
