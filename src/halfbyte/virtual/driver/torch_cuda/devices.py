"""How "cuda" is spelled in arguments, and what stands for it in a call of torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

CUDA_DEVICE = torch.device("cuda", 0)
CPU_DEVICE = torch.device("cpu")
_CUDA_TEXT = re.compile(r"cuda(:\d+)?\Z")
_CPU_TEXT = re.compile(r"cpu(:\d+)?\Z")


def is_cuda(value: Any) -> bool:
    """Whether `value` names the cuda device: "cuda", "cuda:0" or a torch.device."""
    if isinstance(value, str):
        return _CUDA_TEXT.match(value) is not None
    return isinstance(value, torch.device) and value.type == "cuda"


def is_cpu(value: Any) -> bool:
    """Whether `value` names the cpu: "cpu" or a torch.device."""
    if isinstance(value, str):
        return _CPU_TEXT.match(value) is not None
    return isinstance(value, torch.device) and value.type == "cpu"


def find_named_device(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
    """Return "cuda", "cpu" or another type that a call names explicitly, None if it names none."""
    named = keywords.get("device")
    if named is None:
        named = next((one for one in arguments if is_cuda(one) or is_cpu(one)), None)
    if named is None:
        return None
    if isinstance(named, int) and not isinstance(named, bool):
        return "cuda"
    if is_cuda(named):
        return "cuda"
    return torch.device(named).type


def replace_cuda(
    arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the cpu in every place that names cuda."""
    replaced = {
        name: CPU_DEVICE if is_cuda(value) or (name == "device" and _is_ordinal(value)) else value
        for name, value in keywords.items()
    }
    return tuple(CPU_DEVICE if is_cuda(value) else value for value in arguments), replaced


def _is_ordinal(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def list_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples and dictionaries."""
    found: list[torch.Tensor] = []
    _collect(values, found.append)
    return found


def _collect(value: Any, add: Callable[[torch.Tensor], None]) -> None:
    if isinstance(value, torch.Tensor):
        add(value)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, add)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, add)
