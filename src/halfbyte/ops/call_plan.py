"""What one call of a 4-bit linear runs and the memory that it reads: for reports."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import UsageError
from halfbyte.formats.dense_linear import DenseLinear
from halfbyte.ops import blackwell, hopper
from halfbyte.ops.backends import choose_backend, see_session
from halfbyte.ops.dense import DensePlacer
from halfbyte.ops.hopper_modes import DENSE, check_mode
from halfbyte.ops.kernel_tensors import check_kernel_dtype
from halfbyte.ops.linear_parts import LinearSpec, is_offloaded, make_linear
from halfbyte.ops.placed_linears import find_placed


@dataclass(frozen=True)
class CallPlan:
    """A call with `tokens` rows.

    Attributes:
        tokens: M.
        mode: what it computes; "exact" where the backend has one kernel.
        kernel: who multiplies: "gemm_w4_wgmma", "gemm_w4a4", "torch" or "cpu".
        tile: the kernel's configuration in words, "" where there is none.
        num_bytes: of the operands that it reads, x and y apart.
        requantized: blocks of the weight that it reads with a larger scale than their own, because
            that lies too far below the largest one of their channel; Hopper's fp8 has such.
    """

    tokens: int
    mode: str
    kernel: str
    tile: str
    num_bytes: int
    requantized: int = 0


def plan_call(
    parts: Sequence[torch.Tensor],
    spec: LinearSpec,
    call: tuple[int, torch.dtype],
    backend: str = "auto",
    mode: str = "auto",
) -> CallPlan:
    """Return what `w4a4_linear` runs for these arguments; places the linear as the call would.

    Args:
        parts: the tensor list of `linear_parts.list_parts`, on the device that x would be on.
        spec: what they mean.
        call: (M, dtype of x).
        backend: one of `backends.BACKENDS`.
        mode: one of `hopper_modes.MODES`.

    Raises UsageError for an M that is no number of rows, and what `w4a4_linear` raises.
    """
    m, dtype = call
    if not isinstance(m, int) or m < 0:
        raise UsageError(f"tokens {m!r}: wanted a number of rows, an integer from 0 on")
    check_mode(mode)
    with see_session():
        # an offloaded weight is on the cpu; x goes where the other parts are
        device = parts[2 if is_offloaded(parts) else 0].device
        chosen = choose_backend("w4a4_linear", device, backend)
        if chosen.target is not None:
            check_kernel_dtype("x", dtype)
        if mode == DENSE:
            return _plan_dense(m, find_placed(parts, spec, DensePlacer(dtype)))
        if chosen.layout == "cpu":
            return CallPlan(m, "exact", "cpu", "", make_linear(parts, spec).num_bytes)
        if chosen.layout == "hopper":
            placed = hopper.choose_placed(parts, spec, call, mode)
            if isinstance(placed, DenseLinear):
                return _plan_dense(m, placed)
            tile = hopper.describe_tile(placed, m, dtype)
            num_bytes, requantized = placed.num_bytes, placed.requantized
            return CallPlan(m, placed.mode, hopper.GEMM, tile, num_bytes, requantized)
        on_blackwell = find_placed(parts, spec, blackwell.BlackwellPlacer(dtype))
        tile = blackwell.describe_tile(on_blackwell, m, dtype, chosen)
        return CallPlan(m, "exact", blackwell.GEMM, tile, on_blackwell.num_bytes)


def _plan_dense(m: int, placed: DenseLinear) -> CallPlan:
    return CallPlan(m, DENSE, "torch", "", placed.num_bytes)
