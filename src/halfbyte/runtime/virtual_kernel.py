"""Kernels on a virtual CUDA runtime: loaded once for each, faults raised as what they were."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from halfbyte.runtime.kernel_entry import KernelEntry
from halfbyte.runtime.launch import LoadedKernel
from halfbyte.runtime.loading import LoadedFunction, load_for_virtual
from halfbyte.virtual.driver import session
from halfbyte.virtual.driver.calls import answer_call
from halfbyte.virtual.driver.cute_dsl import ERROR_KIND
from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.driver.stand_in import StandIn, find_library

# The stand-in has one listener: launches outside a session take turns.
_lock = threading.RLock()
_connected: VirtualRuntime | None = None


class VirtualKernel(LoadedKernel):
    """A kernel loaded for one virtual CUDA runtime."""

    def __init__(
        self, entry: KernelEntry, function: LoadedFunction, runtime: VirtualRuntime
    ) -> None:
        """Wrap a function that was loaded for `runtime`."""
        super().__init__(entry, function)
        self._runtime = runtime

    def __call__(self, *arguments: Any) -> None:
        """Launch and run to the end, or record while a graph is captured.

        Raises:
            HalfbyteError: the kernel faulted, hangs, or asks for what the GPU does not have.
        """
        with connect(self._runtime):
            try:
                self._call(*arguments)
            except Exception as error:
                fault = self._runtime.take_fault()
                raise error if fault is None else fault from None
            fault = self._runtime.take_fault()
            if fault is not None:  # the compiled code did not look at the error code
                raise fault


def load_virtual_kernel(entry: KernelEntry, runtime: VirtualRuntime) -> VirtualKernel:
    """Return a kernel loaded for a virtual runtime; its image goes there on the first launch."""
    with connect(runtime):
        function = load_for_virtual(entry, find_library())
    return VirtualKernel(entry, function, runtime)


@contextlib.contextmanager
def connect(runtime: VirtualRuntime) -> Iterator[None]:
    """Let compiled host code find `runtime` where CUDA's would be, as a session does for its own.

    Nothing of torch or CuTe DSL is replaced.
    """
    global _connected
    active = session.get_active()
    if active is not None and active.runtime is runtime:
        yield
        return
    with _lock:
        if _connected is runtime:
            yield
            return
        stand_in = StandIn(lambda name, words: _answer(runtime, stand_in, name, words))
        _connected = runtime
        try:
            yield
        finally:
            _connected = None
            stand_in.close()


def _answer(runtime: VirtualRuntime, stand_in: StandIn, name: str, words: list[int]) -> int:
    code = answer_call(runtime, name, words)
    if code:
        fault = runtime.fault
        kind = "" if fault is None else ERROR_KIND
        stand_in.set_error(kind, f"{type(fault).__name__}: {fault}")
    return code
