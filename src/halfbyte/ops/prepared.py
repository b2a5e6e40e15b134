"""A linear bound to its x and y: launches with no checks, no allocation and no dispatcher.

The op looks at its arguments on every call, as it must; for a step of decoding that costs the host
more than the GPU. A server that keeps its buffers binds them once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import FormatError, UsageError
from halfbyte.ops.backends import see_session
from halfbyte.ops.checks import check_device
from halfbyte.ops.dense import DensePlacer
from halfbyte.ops.linear_parts import decode_spec
from halfbyte.ops.placed_linears import find_placed
from halfbyte.ops.w4a4_linear import w4a4_linear
from halfbyte.runtime.launch import PreparedLaunch
from halfbyte.runtime.run_kernel import record_launches

_ROW_UNIT = 8  # columns of y in 16 bytes: other rows are written apart and packed by torch


@dataclass(frozen=True, eq=False)
class PreparedLinear:
    """One call of `w4a4_linear`, to be launched again; it keeps all tensors that it needs alive.

    Attributes:
        x: [M, K], read by each launch. y: [M, N], written by each.
        launches: the kernels in order; empty where torch multiplies.
        dense: (weight transposed, bias or None) where torch multiplies, else None.
    """

    x: torch.Tensor
    y: torch.Tensor
    launches: tuple[PreparedLaunch, ...]
    dense: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def launch(self) -> None:
        """Write y of x as it is now, on the current stream; may be captured in a CUDA graph.

        The current stream is to be the one that it was prepared on: its kernels share memory with
        each other that two streams must not use at once.
        """
        for one in self.launches:
            one.launch()
        if self.dense is not None:
            weight, bias = self.dense
            if bias is None:
                torch.mm(self.x, weight, out=self.y)
            else:
                torch.addmm(bias, self.x, weight, out=self.y)


@torch.no_grad()
def prepare_linear(
    x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str, mode: str = "auto"
) -> PreparedLinear:
    """Return a linear bound to x, run once.

    Args:
        x: [M, K] float16 or bfloat16 on a GPU, columns adjacent, M at least 1.
        linear: the tensor list of `linear_parts.list_parts`; writing to it, or another adapter,
            needs another preparation.
        spec: `LinearSpec.encode()` of the linear; N is a multiple of 8.
        mode: one of `hopper_modes.MODES`.

    Raises:
        UsageError: tensors on the CPU, or mode "exact" for a weight-only linear.
        FormatError: an x or N that the kernels would not read or write where it is; and what
            `w4a4_linear` raises.
    """
    with see_session():
        if check_device("w4a4_linear", x.device, linear).target is None:
            raise UsageError(
                "prepared launches are for tensors on a GPU; on the CPU call the layer"
            )
        n = linear[0].shape[0]
        if x.ndim != 2 or x.shape[0] == 0 or x.stride(1) != 1:
            raise FormatError(
                f"x: shape {tuple(x.shape)}, strides {x.stride()}: a prepared launch reads x where "
                "it is, wanted [M, K] with adjacent columns and M of at least 1"
            )
        if n % _ROW_UNIT or n == 0:
            raise FormatError(
                f"N = {n}: a prepared launch writes y where it is, wanted a multiple of {_ROW_UNIT}"
            )
        if mode == "exact" and decode_spec(spec).activation is None:
            raise UsageError(
                "a weight-only layer in mode 'exact' takes operations of torch beside its kernel, "
                "which are not launches: capture the call in a CUDA graph, or prepare another mode"
            )
        with record_launches() as launches:
            y = w4a4_linear(x, linear, spec, "auto", "none", mode)
        if launches:
            return PreparedLinear(x, y, tuple(launches))
        dense = find_placed(linear, decode_spec(spec), DensePlacer(x.dtype))
        return PreparedLinear(x, y, (), (dense.weight.t(), dense.bias))
