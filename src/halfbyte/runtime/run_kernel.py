"""The one way in for ops: a kernel source and its arguments, wherever these live."""

from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError
from halfbyte.runtime.compile_kernel import compile_kernel
from halfbyte.runtime.virtual_device import run_on_virtual_gpu


def run_kernel(source: KernelSource, *arguments: Any, virtual_gpu: str | None = None) -> None:
    """Launch a kernel on torch's current stream, or run it on a virtual GPU.

    Args:
        source: the kernel, for the target of the device that holds the arguments.
        arguments: in the order of the kernel's host function: torch tensors and integers. CUDA
            tensors run on their GPU, which is the virtual one inside `halfbyte.virtual.cuda`.
        virtual_gpu: "b200", "b300", "h200" or "rtx5090": run CPU tensors there.

    Raises:
        UsageError: the tensors are on the CPU and no virtual GPU is named.
        HalfbyteError: see `compile_kernel` and `run_on_virtual_gpu`.
    """
    if virtual_gpu is not None:
        run_on_virtual_gpu(virtual_gpu, source, *arguments)
        return
    for argument in arguments:
        if getattr(argument, "is_cuda", True) is False:
            raise UsageError(
                f"{source.name}: a tensor of shape {list(argument.shape)} is on "
                f"{argument.device}; GPU kernels take CUDA tensors, or CPU tensors with a virtual "
                "GPU named (backend='virtual-b200')"
            )
    compile_kernel(source)(*arguments)
