"""Per-token E4M3 quantization in one Triton kernel: what a linear with 8-bit activations needs.

One program a row: the row is read once, its largest magnitude gives the scale amax / 448, and its
products with 1 / scale are rounded to E4M3. A peer of our quantizers; nothing of ours uses it.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

LARGEST_E4M3 = 448.0
SMALLEST_SCALE = 1e-12  # of a row of zeros


@functools.cache
def make_row_quantizer() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return quantize(x [M, K], codes [M, K] float8_e4m3fn, scales [M, 1] float32).

    Raises:
        ImportError: Triton is not installed.
    """
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
    kernel: Any = triton.jit(_define_kernel(tl))

    def quantize(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        rows, columns = x.shape
        block = triton.next_power_of_2(columns)
        warps = min(max(block // 1024, 4), 16)
        kernel[(rows,)](x, codes, scales, columns, x.stride(0), BLOCK=block, num_warps=warps)

    return quantize


def _define_kernel(tl: Any) -> Callable[..., None]:
    def quantize_rows(x, codes, scales, columns, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's language
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        is_inside = place < columns
        values = tl.load(x + row * row_stride + place, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values), axis=0) / 448.0, 1e-12)
        tl.store(scales + row, scale)
        rounded = (values * (1.0 / scale)).to(tl.float8e4nv)
        tl.store(codes + row * columns + place, rounded, mask=is_inside)

    return quantize_rows


def quantize_rows_in_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [M, K] and scales [M, 1] by the same rule, in plain torch."""
    values = x.float()
    scales = (values.abs().amax(dim=1, keepdim=True) / LARGEST_E4M3).clamp_min(SMALLEST_SCALE)
    limited = (values / scales).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return limited.to(torch.float8_e4m3fn), scales
