"""Puts the virtual device in the place of torch's "cuda" and takes it away again."""

import functools
import importlib.util
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import VirtualRuntime


def patch_torch(patches: Patches, runtime: VirtualRuntime) -> Callable[[], None]:
    """Patch torch, where it is installed; return what ends the mode and forgets the tensors."""
    if importlib.util.find_spec("torch") is None:
        return lambda: None
    import torch

    from halfbyte.virtual.driver.torch_cuda.dlpack import patch_dlpack
    from halfbyte.virtual.driver.torch_cuda.mode import CudaMode
    from halfbyte.virtual.driver.torch_cuda.tensors import DeviceTensors

    tensors = DeviceTensors(runtime)
    mode = CudaMode(runtime, tensors)
    _patch_namespace(patches, runtime)
    patch_dlpack(patches, tensors)
    _patch_constructors(patches, mode)
    _patch_operators(patches, mode)
    _patch_autograd(patches, mode)
    _patch_threads(patches, mode)
    _patch_profiler(patches)
    patches.set(torch, "compile", _compile_nothing)
    patches.set(torch.compiler, "disable", _compile_nothing)
    entered = ExitStack()
    entered.callback(tensors.close)
    entered.callback(setattr, runtime, "torch_mode", None)
    entered.enter_context(mode)
    runtime.torch_mode = mode
    return entered.close


def _patch_namespace(patches: Patches, runtime: VirtualRuntime) -> None:
    import torch

    from halfbyte.virtual.driver.torch_cuda import namespace

    for name, value in namespace.make_namespace(runtime).items():
        patches.set(torch.cuda, name, value)
    for name, value in namespace.make_raw_functions().items():
        patches.set(torch._C, name, value)
    patches.set_present(torch.cuda.nvtx, namespace.make_nvtx())
    patches.set(torch.version, "cuda", "13.0")
    for module in (torch.cuda.streams, torch.cuda.graphs):
        classes = namespace.make_namespace(runtime)
        patches.set_present(
            module, {name: classes[name] for name in ("Stream", "Event", "CUDAGraph", "graph")}
        )


def _patch_constructors(patches: Patches, mode: Any) -> None:
    """Generators and default devices: what names a device outside the reach of a function mode."""
    import torch
    from torch.utils import _device

    from halfbyte.virtual.driver.torch_cuda.devices import is_cuda

    generator_class: Any = torch._C.Generator

    class Generator(generator_class):  # type: ignore[misc]  # a C class, typed Any here
        """A generator of the CPU that answers to the device it was made for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            made = super().__new__(cls, device="cpu" if is_cuda(device) else device)
            made._named = torch.device("cuda", 0) if is_cuda(device) else torch.device(device)
            return made

        @property
        def device(self) -> Any:
            return self._named

    patches.set(torch, "Generator", Generator)
    context_function: Any = _device.DeviceContext.__torch_function__

    def call_in_context(
        self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not is_cuda(self.device):
            return context_function(self, function, types, args, kwargs)
        kwargs = dict(kwargs or {})
        constructors: Any = _device._device_constructors
        if function in constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return mode.__torch_function__(function, types, args, kwargs)

    patches.set(_device.DeviceContext, "__torch_function__", call_in_context)
    autocast = torch.amp.autocast_mode.autocast
    start = autocast.__init__

    @functools.wraps(start)
    def start_on_cpu(self: Any, device_type: str, *arguments: Any, **keywords: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *arguments, **keywords)

    patches.set(autocast, "__init__", start_on_cpu)


def _patch_operators(patches: Patches, mode: Any) -> None:
    """Registered operators for "cuda" take our tensors, which the dispatcher sees as the CPU's."""
    import torch

    library = torch.library

    def widen(device_types: Any) -> Any:
        kinds = [device_types] if isinstance(device_types, str) else device_types
        if kinds is None:
            return None
        return list(dict.fromkeys("cpu" if kind == "cuda" else kind for kind in kinds))

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call_in_mode(*arguments: Any, **keywords: Any) -> Any:
            with mode:
                result = function(*arguments, **keywords)
            _adopt_results(mode, result)
            return result

        return call_in_mode

    def wrap(define: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(define)
        def define_for_cpu(name: Any, *rest: Any, device_types: Any = None, **keywords: Any) -> Any:
            function = rest[0] if rest and callable(rest[0]) else None
            keywords["device_types"] = widen(device_types)
            if function is not None:
                return define(name, enter(function), *rest[1:], **keywords)
            decorate = define(name, *rest, **keywords)
            return lambda function: decorate(enter(function))

        return define_for_cpu

    patches.set(library, "custom_op", wrap(library.custom_op))
    register = library.register_kernel

    @functools.wraps(register)
    def register_for_cpu(op: Any, device_types: Any, func: Any = None, **keywords: Any) -> Any:
        kinds = widen(device_types)
        if func is not None:
            return register(op, kinds, enter(func), **keywords)
        return lambda function: register(op, kinds, enter(function), **keywords)

    patches.set(library, "register_kernel", register_for_cpu)


def _adopt_results(mode: Any, result: Any) -> None:
    from halfbyte.virtual.driver.torch_cuda.devices import list_tensors

    mode.tensors.adopt(list_tensors(result))


def _patch_autograd(patches: Patches, mode: Any) -> None:
    """Python backward functions are called by the engine, outside of every mode."""
    from torch.autograd.function import BackwardCFunction

    from halfbyte.virtual.driver.torch_cuda.devices import list_tensors

    apply: Any = BackwardCFunction.apply

    def apply_in_mode(self: Any, *gradients: Any) -> Any:
        saved = list_tensors(getattr(self, "saved_tensors", ()))
        if any(mode.tensors.is_on_device(one) for one in saved) or not saved:
            mode.tensors.adopt(list_tensors(gradients))
        with mode:
            return apply(self, *gradients)

    patches.set(BackwardCFunction, "apply", apply_in_mode)


def _patch_threads(patches: Patches, mode: Any) -> None:
    """A function mode belongs to one thread; threads that start in the session get it, too."""
    run = threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with mode:
            run(self)

    patches.set(threading.Thread, "run", run_in_mode)


def _patch_profiler(patches: Patches) -> None:
    """A profile of "cuda" is taken of the CPU: kernels of the virtual GPU are in the log."""
    from torch import profiler

    profile: Any = profiler.profile
    start = profile.__init__

    @functools.wraps(start)
    def start_on_cpu(self: Any, *, activities: Any = None, **keywords: Any) -> None:
        start(self, activities=[profiler.ProfilerActivity.CPU], **keywords)

    patches.set(profile, "__init__", start_on_cpu)


def _compile_nothing(model: Any = None, *_: Any, **__: Any) -> Any:
    """Return `model` as it is: torch.compile would generate code for a device that is not there."""
    if model is None:
        return lambda function: function
    return model
