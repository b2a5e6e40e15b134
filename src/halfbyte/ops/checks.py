"""What every op checks before it allocates: shapes, dtypes, devices, and who can run it."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from halfbyte.errors import FormatError, UsageError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.ops.backends import Backend, choose_backend
from halfbyte.ops.linear_parts import PART_NAMES, LinearSpec, is_offloaded


def check_input(x: torch.Tensor, spec: LinearSpec) -> None:
    """Raise FormatError unless x is [M, spec.columns] in float16, bfloat16 or float32."""
    check_dense_on("x", x, ("x", x.device))
    if x.ndim != 2 or x.shape[1] != spec.columns:
        raise FormatError(f"x: shape {tuple(x.shape)}, wanted [M, {spec.columns}]")
    check_float_dtype("x", x.dtype)


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise FormatError unless `dtype` is one that activations and outputs may have."""
    if dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"{name}: dtype {dtype}, wanted float16, bfloat16 or float32; convert it with .to()"
        )


def check_same_device(device: torch.device, parts: Sequence[torch.Tensor]) -> None:
    """Raise FormatError naming a part that is not dense or not on `device`.

    An offloaded weight (`nn.offload_weights`) passes: what was placed of it is on the device.

    The fakes of the ops check this too: torch runs them instead of the op where one argument is on
    the meta device, and their result beside a CPU tensor would be memory that nobody wrote.
    """
    for part in parts:  # every call asks, and seldom is there anything to tell
        if part.layout != torch.strided or part.device != device:
            break
    else:
        return
    start = 2 if device.type == "cuda" and len(parts) > 2 and is_offloaded(parts) else 0
    for name, part in list(zip(PART_NAMES, parts, strict=False))[start:]:
        check_dense_on(name, part, ("x", device))


def check_dense_on(name: str, part: torch.Tensor, wanted: tuple[str, torch.device]) -> None:
    """Raise FormatError unless `part` is dense and on a device; `wanted`: whose it is, and which.

    Ops get sparse tensors too, which have no memory to read.
    """
    whose, device = wanted
    if part.layout != torch.strided:
        raise FormatError(f"{name}: a {part.layout} tensor, wanted a dense one; use to_dense()")
    if part.device != device:
        raise FormatError(f"{name} is on {part.device}, {whose} on {device}: move them together")


def refuse_gradients(op: Any) -> None:
    """Let the backward pass of a custom op raise UsageError with the fix."""

    def backward(*_: Any) -> NoReturn:
        raise UsageError(
            f"{op._qualname} has no backward pass, 4-bit linears are for inference: run the model "
            "under torch.no_grad(), or cut the graph with x.detach()"
        )

    op.register_autograd(backward)


def check_device(
    op: str, device: torch.device, parts: Sequence[torch.Tensor], backend: str = "auto"
) -> Backend:
    """Return who runs `op`, for tensors that are all on `device`.

    FormatError names the part on another device; further errors are those of `choose_backend`.
    """
    check_same_device(device, parts)
    return choose_backend(op, device, backend)
