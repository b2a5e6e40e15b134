"""The state of the virtual CUDA runtime: images, kernels, memory, events, recordings, faults.

Layer: virtual/driver. The C symbols (`calls`), CUDA's Python bindings (`cuda_bindings`) and torch's
"cuda" device (`torch_cuda`) all act on one `VirtualRuntime`.
"""

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arch import Gpu
from halfbyte.errors import HalfbyteError
from halfbyte.virtual.driver.attributes import (
    KERNEL_MAX_DYNAMIC_SHARED_BYTES,
    make_device_attributes,
)
from halfbyte.virtual.driver.images import PtxStore
from halfbyte.virtual.driver.launches import LaunchLog, LaunchRecord, LaunchRequest, run_launch
from halfbyte.virtual.occupancy import count_ctas_per_sm

COOPERATIVE_LAUNCH_TOO_LARGE = 720  # cudaErrorCooperativeLaunchTooLarge
# Of all runtimes of the process: host code that outlives its runtime unloads its kernels late, and
# must not hit another runtime's object.
_handles = itertools.count(0x10000, 16)
_SHORTEST_EVENT_MS = 1e-3  # two events without work between them; programs divide by it


class CudaError(HalfbyteError):
    """A call that CUDA refuses with an error code; programs may expect it."""

    def __init__(self, code: int, text: str) -> None:
        """Keep cudaError_t's number beside the text."""
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class Library:
    """One loaded kernel image; its PTX is lowered when a kernel of it is first used."""

    image: bytes
    ptx: str
    module: Any = None


@dataclass(eq=False)
class Kernel:
    """One kernel of a library, with the attributes that the program set."""

    library: Library
    name: str
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class Recording:
    """Work recorded instead of run, in order: what a CUDA graph replays."""

    actions: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """Run the recorded work once."""
        for action in self.actions:
            action()


class VirtualRuntime:
    """One virtual GPU as a program's host code sees it.

    Attributes:
        device: the `halfbyte.virtual.Device`.
        gpu: its record.
        log: every launch so far.
        ptx_store: the PTX of images that do not carry it.
        options: passed to each launch; None for the core's own.
        fault: the error of a call that failed, until it is raised in Python.
        torch_mode: the torch function mode of a session, for operators, which run outside of it.
    """

    def __init__(self, device: Any, options: Any = None) -> None:
        """Start with nothing loaded or allocated."""
        self.device = device
        self.options = options
        self.gpu: Gpu = device.gpu
        self.attributes = make_device_attributes(self.gpu)
        self.log = LaunchLog()
        self.ptx_store = PtxStore()
        self.fault: BaseException | None = None
        self.recording: Recording | None = None
        self.torch_mode: Any = None
        self.clock_ms = 0.0
        self._objects: dict[int, Any] = {}
        self._buffers: dict[int, npt.NDArray[np.uint8]] = {}

    # Handles: what the program holds for a library, a kernel, an event, a graph.

    def keep(self, value: Any) -> int:
        """Return a handle for an object of the runtime."""
        handle = next(_handles)
        self._objects[handle] = value
        return handle

    def find(self, handle: int, kind: type[Any]) -> Any:
        """Return the object of a handle.

        Raises:
            HalfbyteError: the handle is none of this runtime, or of another kind.
        """
        value = self._objects.get(handle)
        if not isinstance(value, kind):
            raise HalfbyteError(
                f"{handle:#x} is no {kind.__name__.lower()} of the virtual GPU; it was made before "
                "the session or is destroyed: make it inside the session"
            )
        return value

    def drop(self, handle: int) -> None:
        """Forget a handle."""
        self._objects.pop(handle, None)

    # Kernel images and launches.

    def load_library(self, image: bytes) -> int:
        """Return the handle of a kernel image.

        Raises:
            FormatError: no PTX is known for it.
        """
        return self.keep(Library(image, self.ptx_store.find(image)))

    def load_module(self, library: Library) -> Any:
        """Return the lowered module of a library."""
        if library.module is None:
            library.module = self.device.load(library.ptx)
        return library.module

    def find_kernel(self, library: int, name: str) -> int:
        """Return the handle of the kernel `name` of a library.

        Raises:
            HalfbyteError: the library has no such kernel.
        """
        found: Library = self.find(library, Library)
        if f".entry {name}(" not in found.ptx and f".entry {name}\n" not in found.ptx:
            raise HalfbyteError(f"the kernel image has no kernel {name!r}")
        return self.keep(Kernel(found, name))

    def list_kernels(self, library: int) -> list[str]:
        """Return the names of the kernels of a library."""
        syntax = self.load_module(self.find(library, Library)).syntax
        return [kernel.name for kernel in syntax.kernels]

    def find_global(self, library: int, name: str) -> tuple[int, int]:
        """Return address and bytes of a global variable of a library.

        Raises:
            HalfbyteError: the module has no such variable.
        """
        address = self.load_module(self.find(library, Library)).addresses.get(name)
        if address is None:
            raise HalfbyteError(f"the kernel image has no global variable {name!r}")
        return int(address), int(self.device.memory.buffers[address].nbytes)

    def list_parameter_bytes(self, kernel: Kernel) -> list[int]:
        """Return the size of each parameter of a kernel, in bytes."""
        program = self.load_module(kernel.library).find_program(kernel.name).program
        return [parameter.size for parameter in program.parameters]

    def launch(self, kernel: Kernel, request: LaunchRequest) -> None:
        """Run a launch, or record it while a graph is captured.

        Raises:
            HalfbyteError: the launch faulted or asks for what the GPU does not have.
        """
        if self.fault is not None:  # an earlier call failed and its error code was not looked at
            raise self.fault
        self._check_shared_bytes(kernel, request)
        self._check_cooperative(request)
        self.submit(lambda: self._run(kernel, request))

    def _check_shared_bytes(self, kernel: Kernel, request: LaunchRequest) -> None:
        limit = kernel.attributes.get(KERNEL_MAX_DYNAMIC_SHARED_BYTES, 0)
        limit = max(limit, self.gpu.default_shared_bytes_per_cta)
        limit = min(limit, self.gpu.shared_bytes_per_cta)
        if request.dynamic_shared > limit:
            raise HalfbyteError(
                f"{request.kernel} asks for {request.dynamic_shared} bytes of dynamic shared "
                f"memory; the kernel allows {limit} (cudaFuncSetAttribute raises it up to "
                f"{self.gpu.shared_bytes_per_cta})"
            )

    def _check_cooperative(self, request: LaunchRequest) -> None:
        if not request.is_cooperative:
            return
        threads = request.block[0] * request.block[1] * request.block[2]
        per_sm = count_ctas_per_sm(self.gpu, threads, request.dynamic_shared)
        blocks = request.grid[0] * request.grid[1] * request.grid[2]
        if blocks > per_sm * self.gpu.num_sms:
            raise CudaError(
                COOPERATIVE_LAUNCH_TOO_LARGE,
                f"{request.kernel}: a cooperative launch of {blocks} blocks; "
                f"{per_sm * self.gpu.num_sms} are resident at once",
            )

    def _run(self, kernel: Kernel, request: LaunchRequest) -> None:
        module = self.load_module(kernel.library)
        record = run_launch(self.device, module, request, self.options)
        record = replace(record, index=len(self.log))
        self.clock_ms += self._measure_ms(record)
        self.log.add(record)
        if record.fault is not None:
            raise record.fault

    def _measure_ms(self, record: LaunchRecord) -> float:
        if record.cycles is not None:
            return record.cycles / self.gpu.clock * 1e3
        return record.seconds * 1e3

    def submit(self, action: Callable[[], None]) -> None:
        """Run `action` now, or record it while a graph is captured."""
        if self.recording is None:
            action()
        else:
            self.recording.actions.append(action)

    # Memory: host memory, registered with the device.

    def allocate(self, size: int, name: str = "") -> int:
        """Return the address of `size` poisoned bytes, aligned as CUDA aligns its own."""
        buffer = self.device.memory.allocate(size, name or f"cudaMalloc({size})")
        address = int(buffer.ctypes.data)
        self._buffers[address] = buffer
        return address

    def release(self, address: int) -> None:
        """Free what `allocate` returned; 0 is ignored.

        Raises:
            HalfbyteError: the address is no live allocation.
        """
        if not address:
            return
        if self._buffers.pop(address, None) is None:
            raise HalfbyteError(
                f"free of {address:#x}, which is no live allocation: freed twice or never allocated"
            )
        self.device.memory.unregister(address)

    def owns(self, address: int) -> bool:
        """Whether an address lies in memory that the program allocated through CUDA."""
        return any(
            start <= address < start + len(buffer) for start, buffer in self._buffers.items()
        )

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes between any two addresses of the process."""
        self.submit(lambda: _discard(ctypes.memmove(target, source, size)))

    def fill(self, target: int, pattern: bytes, count: int) -> None:
        """Write `pattern` `count` times."""
        self.submit(lambda: _discard(ctypes.memmove(target, pattern * count, len(pattern) * count)))

    # Events on the device's clock.

    def record_event(self, event: "Event") -> None:
        """Set the event to the device's clock, when the work before it is done."""

        def record() -> None:
            event.time_ms = self.clock_ms

        self.submit(record)

    def measure_elapsed_ms(self, start: "Event", end: "Event") -> float:
        """Return the time between two events, at least 0.001 ms."""
        if start.time_ms is None or end.time_ms is None:
            raise HalfbyteError("the elapsed time of an event that was never recorded")
        return max(end.time_ms - start.time_ms, _SHORTEST_EVENT_MS)

    # Graphs.

    def begin_recording(self) -> None:
        """Record work from here on instead of running it.

        Raises:
            HalfbyteError: a capture is under way.
        """
        if self.recording is not None:
            raise HalfbyteError("a graph capture is already under way")
        self.recording = Recording()

    def end_recording(self) -> Recording:
        """Return what was recorded and run work again from here on."""
        if self.recording is None:
            raise HalfbyteError("no graph capture is under way")
        recording, self.recording = self.recording, None
        return recording

    # Faults on their way through C code.

    def take_fault(self) -> BaseException | None:
        """Return the fault that waits to be raised, and forget it."""
        fault, self.fault = self.fault, None
        return fault


@dataclass(eq=False)
class Event:
    """A CUDA event: the device's clock when it was recorded, in ms."""

    time_ms: float | None = None


def _discard(_: object) -> None:
    """Turn an expression's value into None."""
