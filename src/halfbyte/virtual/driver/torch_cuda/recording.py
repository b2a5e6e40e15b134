"""torch calls while a CUDA graph is captured: recorded, and replayed on the same memory.

What changes memory in place is recorded only, as nothing runs during a capture. What makes a new
tensor runs once for its shape and memory, and again into that memory at each replay.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from halfbyte.virtual.driver.torch_cuda.devices import list_tensors
from halfbyte.virtual.driver.torch_cuda.tensors import shares_storage

_NOT_IN_PLACE = ("__invert__", "__int__", "__index__", "__iter__", "__init__")
_IN_PLACE_DUNDERS = ("__setitem__", "__delitem__")
# Answers about a tensor that no replay needs.
_QUERIES = (
    "__get__",
    "data_ptr",
    "size",
    "stride",
    "dim",
    "numel",
    "is_contiguous",
    "storage_offset",
)


def call_recorded(
    mode: Any,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """Return what the program sees of a call during capture; the work is for the replay."""
    recording = mode.runtime.recording
    name = getattr(function, "__name__", "")
    if is_in_place(name, keywords):
        recording.actions.append(lambda: _discard(function(*arguments, **keywords)))
        return keywords.get("out", arguments[0] if arguments else None)
    result = function(*arguments, **keywords)
    inputs = list_tensors((arguments, dict(keywords)))
    mode.tensors.adopt(list_tensors(result), inputs)
    fresh = [
        one for one in list_tensors(result) if not any(shares_storage(one, two) for two in inputs)
    ]
    if fresh and name not in _QUERIES:
        recording.actions.append(_make_replay(function, arguments, keywords, result))
    return result


def is_in_place(name: str, keywords: Mapping[str, Any]) -> bool:
    """Whether torch's function `name` writes into an argument."""
    if keywords.get("out") is not None or name in _IN_PLACE_DUNDERS:
        return True
    is_dunder = name.startswith("__") and name.endswith("__")
    if is_dunder:
        return name.startswith("__i") and name not in _NOT_IN_PLACE
    return name.endswith("_")


def _make_replay(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    result: Any,
) -> Callable[[], None]:
    outputs = list_tensors(result)

    def replay() -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            again = list_tensors(function(*arguments, **keywords))
            for output, value in zip(outputs, again, strict=True):
                output.detach().copy_(value)

    return replay


def _discard(_: object) -> None:
    """Turn an expression's value into None."""
