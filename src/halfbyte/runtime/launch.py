"""Launches of compiled kernels: a call, or a prepared one whose arguments are bound and checked."""

from collections.abc import Callable
from typing import Any

from halfbyte.runtime.kernel_entry import PTX, KernelEntry
from halfbyte.runtime.loading import LoadedFunction


class LoadedKernel:
    """A kernel in this process. A call launches it on torch's current stream and returns at once.

    Device, dtype and shape of the arguments are checked by the op that calls; the compiled host
    code itself refuses what its signature does not allow.

    Attributes:
        entry: where it came from: manifest, PTX, machine code.
    """

    def __init__(self, entry: KernelEntry, function: LoadedFunction) -> None:
        """Wrap a loaded function."""
        self.entry = entry
        self._function = function
        self._call: Callable[..., Any] = function.call

    def __call__(self, *arguments: Any) -> None:
        """Launch with torch tensors and integers, in the order of the host function."""
        self._call(*arguments)

    def prepare(self, *arguments: Any) -> "PreparedLaunch":
        """Return a launch with its arguments bound; the kernel is on the device afterwards.

        The arguments go through the host code's checks here, and the kernel is loaded onto the
        device here: `PreparedLaunch.launch` may be captured in a CUDA graph.
        """
        skip = self._function.skip_launches
        if skip is not None:
            skip(1)
            try:
                self(*arguments)
            finally:
                skip(0)
        return PreparedLaunch(self, arguments)

    def read_ptx(self) -> str:
        """Return the kernel's PTX.

        Raises:
            CheckpointError: its file is gone or changed.
        """
        return self.entry.read_part(PTX).decode()

    def __repr__(self) -> str:
        """Return name, target and configuration."""
        facts = self.entry.facts
        return f"<LoadedKernel {facts.name} for {facts.target}: {facts.config}>"


class PreparedLaunch:
    """A kernel with its arguments, which it keeps alive.

    A captured graph reads the arguments' memory: keep this object as long as the graph. On a GPU
    the arguments are converted for the compiled host code here and not at every launch; two
    threads must not launch the same object at the same time.
    """

    __slots__ = ("_arguments", "_bound", "_call", "_device_index", "_stream", "kernel")

    def __init__(self, kernel: LoadedKernel, arguments: tuple[Any, ...]) -> None:
        """Bind the arguments; `LoadedKernel.prepare` also checks them."""
        self.kernel = kernel
        self._arguments = arguments
        self._call: Callable[..., Any] = kernel
        self._bound = arguments
        self._stream: Any = None
        self._device_index = _find_cuda_device(arguments) if type(kernel) is LoadedKernel else None
        if self._device_index is not None:
            import tvm_ffi

            self._call = kernel._call
            self._bound = tuple(_convert(argument) for argument in arguments)
            self._stream = tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", self._device_index), 0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What is bound, in the order of the kernel's host function."""
        return self._arguments

    def launch(self) -> None:
        """Launch on torch's current stream: no allocation, no compilation, no waiting."""
        if self._device_index is None:
            self._call(*self._bound)
            return
        # Converted tensors do not bring torch's stream along, as torch's own do.
        self._stream.stream = _read_current_stream(self._device_index)
        with self._stream:
            self._call(*self._bound)


def _find_cuda_device(arguments: tuple[Any, ...]) -> int | None:
    """Return the index of the GPU that holds the arguments, None where none is on a GPU."""
    for argument in arguments:
        index: int | None = None
        if isinstance(argument, tuple | list):
            index = _find_cuda_device(tuple(argument))
        elif getattr(argument, "is_cuda", False):
            index = argument.device.index
        if index is not None:
            return index
    return None


def _convert(argument: Any) -> Any:
    """Return an argument as TVM FFI hands it over, tensors inside tuples too."""
    import tvm_ffi

    if isinstance(argument, tuple | list):
        return tvm_ffi.convert(tuple(_convert(part) for part in argument))
    if getattr(argument, "is_cuda", False):
        return tvm_ffi.from_dlpack(argument.detach())
    return argument


def _read_current_stream(device_index: int) -> int:
    """Return the handle of torch's current stream."""
    import torch

    return int(torch._C._cuda_getCurrentRawStream(device_index))
