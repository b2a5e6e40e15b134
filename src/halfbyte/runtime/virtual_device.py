"""Kernels on a virtual GPU from plain CPU tensors: what `backend="virtual-b200"` runs on.

A virtual GPU that is asked for is kept for the life of the process, with the programs it lowered.
torch stays as it is: tensors are lent to the device for one call, and only their bytes change.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from halfbyte.arch import Gpu, find_gpu
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import HalfbyteError, UnsupportedHardwareError, UsageError
from halfbyte.runtime.compile_kernel import compile_kernel
from halfbyte.runtime.launch import LoadedKernel
from halfbyte.virtual.driver import session
from halfbyte.virtual.driver.launches import LaunchRecord
from halfbyte.virtual.driver.runtime import VirtualRuntime

if TYPE_CHECKING:
    import torch

_PREFIX = "virtual-"
_lock = threading.Lock()
# Threads that lend the same memory take turns: the first to end would take it from the others.
_turn = threading.RLock()
_runtimes: dict[str, VirtualRuntime] = {}


def find_backend_gpu(backend: str) -> Gpu | None:
    """Return the GPU that a backend's name stands for: "virtual-b200" is the B200; None for others.

    Raises:
        UsageError: no such GPU; the message lists those there are.
    """
    return find_gpu(backend.removeprefix(_PREFIX)) if backend.startswith(_PREFIX) else None


def run_on_virtual_gpu(
    gpu_name: str, source: KernelSource, *arguments: Any
) -> tuple[LaunchRecord, ...]:
    """Run a kernel on CPU tensors and return the records of its launches.

    Args:
        gpu_name: "b200", "b300", "h200" or "rtx5090".
        source: the kernel, for that GPU's target.
        arguments: CPU tensors, which the kernel may write to, numbers, and tuples of them.

    Raises:
        UsageError: a session on another virtual GPU is active.
        UnsupportedHardwareError: the source is for another target than the GPU's.
        HalfbyteError: the kernel faulted or hangs, or the virtual GPU found something undefined.
    """
    gpu = find_gpu(gpu_name)
    if source.target != gpu.target:
        raise UnsupportedHardwareError(
            f"{source.name} was made for {source.target}; the virtual {gpu.device_name} runs "
            f"{gpu.target}"
        )
    runtime = find_runtime(gpu)
    kernel = compile_kernel(source, runtime)
    with _turn:
        records = _run_lent(runtime, kernel, arguments)
    check_findings(records)
    return records


def _run_lent(
    runtime: VirtualRuntime, kernel: LoadedKernel, arguments: Sequence[Any]
) -> tuple[LaunchRecord, ...]:
    is_session = session.get_active() is not None
    start = len(runtime.log)
    try:
        with LentTensors(runtime, arguments) as lent:
            kernel(*lent.arguments)
        return tuple(runtime.log.records[start:])
    finally:
        if not is_session:  # nobody reads them, also not those of a fault
            del runtime.log.records[start:]


def find_runtime(gpu: Gpu) -> VirtualRuntime:
    """Return the runtime of the active session, else the one kept for this GPU.

    Raises:
        UsageError: the active session has another GPU.
    """
    active = session.get_active()
    if active is not None:
        if active.runtime.gpu.name != gpu.name:
            raise UsageError(
                f"backend virtual-{gpu.name} inside a session on the virtual "
                f"{active.runtime.gpu.name}: leave the session, or open one on the {gpu.name}"
            )
        return active.runtime
    with _lock:
        runtime = _runtimes.get(gpu.name)
        if runtime is None:
            from halfbyte.virtual.device import Device

            runtime = _runtimes[gpu.name] = VirtualRuntime(Device(gpu))
        return runtime


def check_findings(records: Sequence[LaunchRecord]) -> None:
    """Raise HalfbyteError for what the virtual GPU found undefined; notes are no findings."""
    found = [f"{r.request.kernel}: {one}" for r in records for one in r.findings if not one.is_note]
    if found:
        raise HalfbyteError("the virtual GPU reports:\n" + "\n".join(found))


class LentTensors:
    """A context in which CPU tensors are memory of a virtual GPU, aligned as CUDA aligns its own.

    Memory that is not aligned so is copied, once for all tensors that share it, and copied back
    where the kernel changed it.
    """

    def __init__(self, runtime: VirtualRuntime, arguments: Sequence[Any]) -> None:
        """Lend the tensors among `arguments`; what is on the device already stays as it is."""
        self._runtime = runtime
        self._given = arguments
        self._lent: dict[int, _LentMemory] = {}
        self.arguments: list[Any] = []

    def __enter__(self) -> "LentTensors":
        """Register the memory; `arguments` are then what the kernel takes."""
        import torch

        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self.arguments = [self._lend(argument) for argument in self._given]
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Copy back what changed, also after a fault, and take the memory from the device."""
        self.arguments = []
        for memory in self._lent.values():
            memory.copy_back()
        self._release()

    def _release(self) -> None:
        for memory in self._lent.values():
            self._runtime.device.memory.unregister(memory.device_address)
        self._lent.clear()

    def _lend(self, argument: Any) -> Any:
        import torch

        if isinstance(argument, tuple):  # a record of tensors, as host functions take them
            return tuple(self._lend(one) for one in argument)
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.device.type != "cpu":
            raise UsageError(
                f"a virtual GPU runs on CPU tensors; one of shape {list(argument.shape)} on "
                f"{argument.device} came: move it with .cpu()"
            )
        storage = argument.untyped_storage()
        address = storage.data_ptr()
        memory = self._lent.get(address)
        if memory is None:
            memory = _LentMemory(storage)
            self._runtime.device.memory.register(
                memory.device_address, storage.nbytes(), describe(argument), keep=memory
            )
            self._lent[address] = memory
        return memory.make_argument(argument)


class _LentMemory:
    """The bytes of one torch storage at an address that suits the device."""

    def __init__(self, storage: "torch.UntypedStorage") -> None:
        import numpy as np
        import torch

        from halfbyte.virtual.memory import ALIGNMENT, make_aligned_bytes

        self._original = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self._buffer = self._original
        if storage.data_ptr() % ALIGNMENT:
            self._buffer = make_aligned_bytes(storage.nbytes())
            np.copyto(self._buffer, self._original)
        self.device_address = int(self._buffer.ctypes.data)

    def make_argument(self, tensor: "torch.Tensor") -> Any:
        """Return a view of the memory like `tensor`, as TVM FFI takes a CUDA tensor."""
        import torch
        import tvm_ffi

        storage = torch.from_numpy(self._buffer).untyped_storage()
        empty: Any = torch.empty(0, dtype=tensor.dtype)
        view = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        return tvm_ffi.from_dlpack(_CudaCapsules(view))

    def copy_back(self) -> None:
        """Write what the kernel changed; memory that it only read may be read-only."""
        import numpy as np

        if self._buffer is not self._original and not np.array_equal(self._buffer, self._original):
            np.copyto(self._original, self._buffer)


class _CudaCapsules:
    """Gives DLPack capsules of a CPU tensor that name a CUDA device."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        self._tensor = tensor

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        from halfbyte.virtual.driver.torch_cuda.dlpack import make_capsule

        return make_capsule(self._tensor, max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA


def describe(tensor: "torch.Tensor") -> str:
    """Return dtype and shape of a tensor, as reports name its memory."""
    return f"torch {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
