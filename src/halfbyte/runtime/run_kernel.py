"""The one way in for ops: a kernel source and its arguments, wherever these live."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError
from halfbyte.runtime.compile_kernel import compile_kernel
from halfbyte.runtime.launch import PreparedLaunch
from halfbyte.runtime.targets import check_runs_on
from halfbyte.runtime.virtual_device import run_on_virtual_gpu

_recorded: ContextVar[list[PreparedLaunch] | None] = ContextVar("recorded", default=None)

_collected: ContextVar[list[KernelSource] | None] = ContextVar("collected", default=None)


def run_kernel(source: KernelSource, *arguments: Any, virtual_gpu: str | None = None) -> None:
    """Launch a kernel on torch's current stream, or run it on a virtual GPU.

    Args:
        source: the kernel, for the target of the device that holds the arguments.
        arguments: in the order of the kernel's host function: torch tensors, numbers, and tuples
            of them. CUDA tensors run on their GPU, the virtual one inside `halfbyte.virtual.cuda`.
        virtual_gpu: "b200", "b300", "h200" or "rtx5090": run CPU tensors there.

    Raises:
        UsageError: the tensors are on the CPU and no virtual GPU is named.
        HalfbyteError: see `compile_kernel` and `run_on_virtual_gpu`.
    """
    collected = _collected.get()
    if collected is not None:
        collected.append(source)
        return
    if virtual_gpu is not None:
        run_on_virtual_gpu(virtual_gpu, source, *arguments)
        return
    check_device(source, arguments)
    recorded = _recorded.get()
    if recorded is None:
        compile_kernel(source)(*arguments)
        return
    prepared = compile_kernel(source).prepare(*arguments)
    prepared.launch()
    recorded.append(prepared)


@contextlib.contextmanager
def record_launches() -> Iterator[list[PreparedLaunch]]:
    """Yield a list that gets every kernel that ops launch on a GPU in the meantime, prepared.

    Launching them again in that order repeats what the ops did, on the same memory and without
    their checks; what an op does by torch's own operations (an unaligned tensor's copy) is not
    among them.
    """
    recorded: list[PreparedLaunch] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


@contextlib.contextmanager
def collect_sources() -> Iterator[list[KernelSource]]:
    """Yield a list that gets the source of every kernel that ops would run; none is run.

    What the ops return in the meantime is not initialised. It tells what to build ahead of time
    for a GPU that is not here: the ops of a virtual GPU choose as those of the real one do.
    """
    collected: list[KernelSource] = []
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def prepare_kernel(source: KernelSource, *arguments: Any) -> PreparedLaunch:
    """Return a launch with its CUDA tensors and integers bound, checked and on their device.

    Its `launch()` may be captured in a CUDA graph; keep it as long as the graph.

    Raises:
        UsageError: a tensor is on the CPU.
        HalfbyteError: see `compile_kernel`.
    """
    check_device(source, arguments)
    return compile_kernel(source).prepare(*arguments)


def check_device(source: KernelSource, arguments: Sequence[Any]) -> None:
    """Raise where a tensor is not on a GPU, or on one that cannot run the source's target.

    Raises:
        UsageError: a tensor is on the CPU.
        UnsupportedHardwareError: the GPU has another target.
    """
    is_checked = False
    for argument in arguments:
        if isinstance(argument, tuple | list):
            check_device(source, argument)
            continue
        if argument is None or isinstance(argument, int | float):
            continue
        is_cuda = getattr(argument, "is_cuda", None)
        if is_cuda is False:
            raise UsageError(
                f"{source.name}: a tensor of shape {list(argument.shape)} is on "
                f"{argument.device}; GPU kernels take CUDA tensors, or CPU tensors with a virtual "
                "GPU named (backend='virtual-b200')"
            )
        if is_cuda and not is_checked:
            is_checked = True
            check_runs_on(source.name, source.target, argument.device)
