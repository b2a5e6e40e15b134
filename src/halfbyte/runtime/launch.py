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

    A captured graph reads the arguments' memory: keep this object as long as the graph.
    """

    __slots__ = ("_arguments", "_call", "kernel")

    def __init__(self, kernel: LoadedKernel, arguments: tuple[Any, ...]) -> None:
        """Bind the arguments; `LoadedKernel.prepare` also checks them."""
        self.kernel = kernel
        self._arguments = arguments
        self._call: Callable[..., Any] = (
            kernel if type(kernel) is not LoadedKernel else kernel._call
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What is bound, in the order of the kernel's host function."""
        return self._arguments

    def launch(self) -> None:
        """Launch on torch's current stream: no allocation, no compilation, no waiting."""
        self._call(*self._arguments)
