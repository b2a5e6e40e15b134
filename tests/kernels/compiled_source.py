"""Kernels for the GPU that tests run on: compiled for a virtual one, artifacts for a real one."""

from typing import Any

import torch

from halfbyte.device.kernel_source import KernelSource
from halfbyte.runtime.compile_kernel import compile_kernel

IS_ON_SILICON = torch.cuda.is_available()


def compile_source_once(source: KernelSource) -> Any:
    """Return what is called with tensors, in the session that is open."""
    if IS_ON_SILICON:
        return compile_kernel(source)
    import cutlass.cute as cute

    host, arguments = source.make()
    return cute.compile(host, *arguments, options="--enable-tvm-ffi")
