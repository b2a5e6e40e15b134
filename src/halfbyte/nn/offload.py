"""4-bit weights out of GPU memory once the kernels have their own copy of them.

On Hopper the kernels read codes in the order of registers, which no file holds. A module keeps its
canonical tensors beside them, for its state and for other modes: twice the 4 bits. Where memory
counts, the canonical ones go to the CPU, and a layer takes what its kernels read.
"""

import torch
from torch import nn

from halfbyte.errors import UsageError
from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.ops.backends import choose_backend, see_session
from halfbyte.ops.placed_linears import rekey_placed


@torch.no_grad()
def offload_weights(model: nn.Module) -> int:
    """Move codes and block scales of every W4A4Linear to the CPU; return the bytes that were freed.

    The layers run as before in the modes and dtypes that they ran in; their state is as before, and
    adapters may come and go. `module.to("cuda")` brings the weights back, for other modes too.

    Args:
        model: on a Hopper GPU, each layer run or described (`describe_placement`) before.

    Raises UsageError for a layer without placement, or on another device, whose kernels share the
    module's codes.
    """
    linears = {name: one for name, one in model.named_modules() if isinstance(one, W4A4Linear)}
    for name, linear in linears.items():
        _check_can_offload(name, linear)
    return sum(_offload(linear) for linear in linears.values())


def _check_can_offload(name: str, linear: W4A4Linear) -> None:
    with see_session():
        if linear.weight_data.device.type == "cpu" and linear.placed_bytes:
            return  # offloaded already
        layout = choose_backend("offload_weights", linear.weight_data.device).layout
    if layout != "hopper":
        raise UsageError(
            f"{name or 'the module'} is on {linear.weight_data.device}: weights are offloaded from "
            "Hopper GPUs, whose kernels read a copy of their own"
        )
    if not linear.placed_bytes:
        raise UsageError(
            f"{name or 'the module'} has not run yet: call the model once, or describe_placement, "
            "so that its kernels have their copy"
        )


def _offload(linear: W4A4Linear) -> int:
    if linear.weight_data.device.type == "cpu":
        return 0
    before = linear.list_running_parts()
    freed = 0
    for name in ("weight_data", "weight_scales"):
        part = getattr(linear, name)
        freed += part.numel() * part.element_size()
        setattr(linear, name, part.cpu())
    rekey_placed(before, linear.list_running_parts())
    return freed
