"""The function mode that answers for tensors on the device and puts new ones there."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.driver.torch_cuda.devices import (
    CUDA_DEVICE,
    find_named_device,
    list_tensors,
    replace_cuda,
)
from halfbyte.virtual.driver.torch_cuda.dlpack import make_capsule
from halfbyte.virtual.driver.torch_cuda.products import is_half_product, multiply_in_float32
from halfbyte.virtual.driver.torch_cuda.recording import call_recorded
from halfbyte.virtual.driver.torch_cuda.scaled_grouped_mm import scaled_grouped_mm
from halfbyte.virtual.driver.torch_cuda.scaled_mm import scaled_mm
from halfbyte.virtual.driver.torch_cuda.tensors import DeviceTensors, shares_storage

Tensor = torch.Tensor
Special = Callable[["CudaMode", Sequence[Any], Mapping[str, Any]], Any]
_KDL_CUDA = 2  # DLDeviceType


class CudaMode(TorchFunctionMode):
    """torch with a "cuda" device: active for the length of a session."""

    def __init__(self, runtime: VirtualRuntime, tensors: DeviceTensors) -> None:
        """Answer for `tensors`, the tensors on the device of `runtime`."""
        super().__init__()
        self.runtime = runtime
        self.tensors = tensors

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: Sequence[Any] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what `function` returns, its new tensors on the device where they belong there."""
        keywords = keywords or {}
        special = _find_special(function)
        if special is not None:
            return special(self, arguments, keywords)
        if torch._guards.detect_fake_mode() is not None:
            return function(*arguments, **keywords)
        return self._call(function, arguments, keywords)

    def _call(
        self,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
    ) -> Any:
        named = find_named_device(arguments, keywords)
        inputs = list_tensors((arguments, dict(keywords)))
        resident = [tensor for tensor in inputs if self.tensors.is_on_device(tensor)]
        if named is None and not resident:
            return function(*arguments, **keywords)
        arguments, keywords = replace_cuda(arguments, keywords)
        if named not in (None, "cuda"):
            result = function(*arguments, **keywords)
            return _detach_from(result, resident) if named == "cpu" else result
        if is_half_product(function, resident, keywords):
            function = functools.partial(_multiply, function)
        hosts = [tensor for tensor in inputs if not any(tensor is one for one in resident)]
        if self.runtime.recording is None or _is_custom(function):
            result = function(*arguments, **keywords)
            if named == "cuda":
                result = _detach_from(result, hosts)
            self.tensors.adopt(list_tensors(result), hosts)
            return result
        return call_recorded(self, function, arguments, keywords)


def _multiply(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return multiply_in_float32(function, arguments, keywords)


def _is_custom(function: Callable[..., Any]) -> bool:
    """Whether a registered operator records its launches itself."""
    return isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def _detach_from(result: Any, resident: Sequence[Tensor]) -> Any:
    """Return `result`, copied if it shares memory with one of `resident`, the other side's."""
    if isinstance(result, Tensor) and any(shares_storage(result, one) for one in resident):
        return result.clone()
    return result


def _find_special(function: Callable[..., Any]) -> Special | None:
    try:
        return SPECIALS.get(function)
    except TypeError:  # an unhashable function object
        return None


def _get_device(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> torch.device:
    (tensor,) = arguments[:1]
    if mode.tensors.is_on_device(tensor):
        return CUDA_DEVICE
    device: torch.device = Tensor.device.__get__(tensor)
    return device


def _is_cuda(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> bool:
    return _get_device(mode, arguments, {}).type == "cuda"


def _is_cpu(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> bool:
    return _get_device(mode, arguments, {}).type == "cpu"


def _get_ordinal(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> int:
    return 0 if mode.tensors.is_on_device(arguments[0]) else arguments[0].get_device()


def _move(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Answer Tensor.to: a copy where the tensor changes sides."""
    named = find_named_device(arguments[1:], keywords)
    other = keywords.get("other", arguments[1] if len(arguments) > 1 else None)
    if named is None and isinstance(other, int) and not isinstance(other, bool):
        named, arguments = "cuda", (arguments[0], "cpu", *arguments[2:])
    if isinstance(other, Tensor):
        named = _get_device(mode, (other,), {}).type
    return _move_to(mode, Tensor.to, named, arguments, keywords)


def _move_to(
    mode: CudaMode,
    function: Callable[..., Any],
    named: str | None,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    source = arguments[0]
    is_resident = mode.tensors.is_on_device(source)
    goes = named == "cuda" or (named is None and is_resident)
    if named not in (None, "cuda", "cpu") or source.device.type not in ("cpu", "cuda"):
        return function(*arguments, **keywords)
    if goes and is_resident and mode.runtime.recording is not None:
        return call_recorded(mode, function, *replace_cuda(arguments, keywords))
    arguments, keywords = replace_cuda(arguments, keywords)
    result = function(*arguments, **keywords)
    if goes != is_resident and shares_storage(result, source):
        result = result.clone()
    if goes:
        mode.tensors.adopt([result])
    return result


def _cuda(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    return _move_to(mode, lambda tensor: tensor, "cuda", arguments[:1], {})


def _cpu(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    return _move_to(mode, Tensor.cpu, "cpu", arguments, keywords)


def _numpy(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    if mode.tensors.is_on_device(arguments[0]):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    return Tensor.numpy(*arguments, **keywords)


def _type(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    result = mode._call(Tensor.type, arguments, keywords)
    if isinstance(result, str) and mode.tensors.is_on_device(arguments[0]):
        return result.replace("torch.", "torch.cuda.")
    return result


def _pin_memory(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> Any:
    return arguments[0]


def _backward(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, arguments[1:], strict=False)) | dict(keywords)
    gradient = given.pop("gradient", None)
    with mode:  # Python code that the engine calls sees the device, too
        torch.autograd.backward(arguments[0], gradient, **given)


def _dlpack_device(
    mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]
) -> tuple[int, int]:
    if mode.tensors.is_on_device(arguments[0]):
        return _KDL_CUDA, 0
    kind, ordinal = Tensor.__dlpack_device__(arguments[0])
    return int(kind), int(ordinal)


def _dlpack(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    if not mode.tensors.is_on_device(arguments[0]):
        return Tensor.__dlpack__(*arguments, **keywords)
    return make_capsule(arguments[0], keywords.get("max_version"))


def _ignore(mode: CudaMode, arguments: Sequence[Any], _: Mapping[str, Any]) -> None:
    """Answer Tensor.record_stream: memory is not reused behind a stream's back."""


def _substitute(function: Callable[..., Any], reference: Callable[..., Tensor]) -> Special:
    """Return a special that computes `function` of tensors on the device by `reference`."""
    name = f"torch.{function.__name__}"

    def call(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        if not mode.tensors.is_on_device(arguments[0]):
            return function(*arguments, **keywords)

        def calculate(*given: Any, **named: Any) -> Tensor:
            mode.runtime.log.add_substitution(name)
            return reference(*given, **named)

        if mode.runtime.recording is not None:
            return call_recorded(mode, calculate, arguments, keywords)
        result = calculate(*arguments, **keywords)
        mode.tensors.adopt([result])
        return result

    return call


def _pass_through(function: Callable[..., Any]) -> Special:
    """Return a special that leaves the names of devices as they are."""

    def call(mode: CudaMode, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        return function(*arguments, **keywords)

    return call


def _find_getter(name: str) -> Any:
    """Return the getter of a property of tensors, which torch's stubs declare as plain values."""
    return getattr(Tensor, name).__get__


SPECIALS: dict[Any, Special] = {
    torch.device: _pass_through(torch.device),
    torch._C._nn._parse_to: _pass_through(torch._C._nn._parse_to),
    Tensor.device.__get__: _get_device,
    _find_getter("is_cuda"): _is_cuda,
    _find_getter("is_cpu"): _is_cpu,
    Tensor.get_device: _get_ordinal,
    Tensor.to: _move,
    Tensor.cuda: _cuda,
    Tensor.cpu: _cpu,
    Tensor.numpy: _numpy,
    Tensor.type: _type,
    Tensor.pin_memory: _pin_memory,
    Tensor.backward: _backward,
    Tensor.record_stream: _ignore,
    Tensor.__dlpack_device__: _dlpack_device,
    Tensor.__dlpack__: _dlpack,
    torch._scaled_mm: _substitute(torch._scaled_mm, scaled_mm),
}
if hasattr(torch, "_scaled_grouped_mm_v2"):  # of torch 2.10 and later
    SPECIALS[torch._scaled_grouped_mm_v2] = _substitute(
        torch._scaled_grouped_mm_v2, scaled_grouped_mm
    )
