"""Matrix products of 16-bit tensors as GPU libraries make them: float32 sums, rounded once.

A CPU's own routines may round partial sums to 16 bits, which a program's tolerance, chosen for a
GPU, does not allow for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from halfbyte.virtual.driver.torch_cuda.devices import list_tensors

_HALVES = (torch.float16, torch.bfloat16)
PRODUCTS = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.einsum,
        torch.addmm,
        torch.baddbmm,
        torch.nn.functional.linear,
        torch.nn.functional.conv1d,
        torch.nn.functional.conv2d,
        torch.nn.functional.conv3d,
        torch.Tensor.matmul,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
        torch.Tensor.baddbmm,
        torch.Tensor.__matmul__,
        torch.Tensor.__rmatmul__,
    }
)


def is_half_product(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], keywords: Mapping[str, Any]
) -> bool:
    """Whether a call multiplies 16-bit tensors and returns its result."""
    try:
        is_product = function in PRODUCTS
    except TypeError:  # an unhashable function object
        return False
    return is_product and keywords.get("out") is None and any(t.dtype in _HALVES for t in tensors)


def multiply_in_float32(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Any:
    """Return what `function` returns for 16-bit tensors, with its sums in float32."""
    tensors = list_tensors((arguments, dict(keywords)))
    dtype = next(tensor.dtype for tensor in tensors if tensor.dtype in _HALVES)
    widened = {name: _widen(value) for name, value in keywords.items()}
    return function(*_widen(tuple(arguments)), **widened).to(dtype)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALVES else value
    if isinstance(value, list | tuple):
        return type(value)(_widen(one) for one in value)
    return value
