"""torch.cuda's streams, events and graphs on the virtual device.

Work is done when its call returns, so that every stream is always idle; events read the device's
clock.
"""

import itertools
from types import TracebackType
from typing import Any, ClassVar

import torch

from halfbyte.virtual.driver.runtime import Event as ClockEvent
from halfbyte.virtual.driver.runtime import Recording, VirtualRuntime
from halfbyte.virtual.driver.torch_cuda.devices import CUDA_DEVICE


class Stream:
    """A stream; `cuda_stream` is its handle, 0 for the default one."""

    _handles = itertools.count(1 << 20, 16)
    current: ClassVar["Stream"]

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_ptr: int | None = None, **_: Any
    ) -> None:
        """Make a side stream, or wrap the handle `stream_ptr`."""
        self.cuda_stream = next(self._handles) if stream_ptr is None else stream_ptr
        self.stream_id = self.cuda_stream
        self.priority = priority
        self.device = CUDA_DEVICE
        self.device_index = 0
        self.device_type = 1

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (version of the protocol, handle)."""
        return 0, self.cuda_stream

    def synchronize(self) -> None:
        """Do nothing: the stream is idle."""

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the other stream is idle."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: Any = None) -> Any:
        """Return `event`, or a fresh one, recorded now."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        """Make this the current stream."""
        self._outer = Stream.current
        Stream.current = self
        return self

    def __exit__(self, *_: object) -> None:
        """Make the earlier stream the current one."""
        Stream.current = self._outer

    def __eq__(self, other: object) -> bool:
        """Whether both have the same handle."""
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        """Return the handle."""
        return self.cuda_stream


DEFAULT_STREAM = Stream(stream_ptr=0)
Stream.current = DEFAULT_STREAM


class StreamContext:
    """torch.cuda.stream(...): the current stream within a block; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        """Remember the stream."""
        self.stream = stream

    def __enter__(self) -> Stream | None:
        """Make it the current one."""
        return self.stream.__enter__() if self.stream is not None else None

    def __exit__(self, *_: object) -> None:
        """Make the earlier stream the current one."""
        if self.stream is not None:
            self.stream.__exit__()


def make_classes(runtime: VirtualRuntime) -> dict[str, Any]:
    """Return Event, CUDAGraph and graph for torch.cuda, bound to a runtime."""

    class Event(_Event):
        _runtime = runtime

    class CUDAGraph(_CudaGraph):
        _runtime = runtime

    return {"Event": Event, "CUDAGraph": CUDAGraph, "graph": GraphContext}


class _Event:
    """torch.cuda.Event: the device's clock when it was recorded."""

    _runtime: ClassVar[VirtualRuntime]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._event = ClockEvent()
        self.cuda_event = self._runtime.keep(self._event)
        self.device = CUDA_DEVICE

    def record(self, stream: Any = None) -> None:
        """Record the device's clock."""
        self._runtime.record_event(self._event)

    def elapsed_time(self, end: "_Event") -> float:
        """Return the milliseconds to `end`."""
        return self._runtime.measure_elapsed_ms(self._event, end._event)

    def synchronize(self) -> None:
        """Do nothing: the event has happened."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True


class _CudaGraph:
    """torch.cuda.CUDAGraph: work recorded once and replayed on the same memory."""

    _runtime: ClassVar[VirtualRuntime]

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording: Recording | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        """Record from here on."""
        self._runtime.begin_recording()

    def capture_end(self) -> None:
        """End the capture."""
        self._recording = self._runtime.end_recording()

    def instantiate(self) -> None:
        """Do nothing: a recording can be replayed as it is."""

    def replay(self) -> None:
        """Run the recorded work once.

        Raises:
            RuntimeError: nothing was captured.
        """
        if self._recording is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._runtime.submit(self._recording.run)

    def reset(self) -> None:
        """Forget the recorded work."""
        self._recording = None

    def pool(self) -> tuple[int, int]:
        """Return a handle of the memory pool; there is only one."""
        return 0, 0

    def enable_debug_mode(self) -> None:
        """Do nothing."""

    def debug_dump(self, path: str) -> None:
        """Do nothing."""


class GraphContext:
    """torch.cuda.graph(...): the capture of a block into a graph."""

    def __init__(
        self, cuda_graph: _CudaGraph, pool: Any = None, stream: Any = None, **_: Any
    ) -> None:
        """Remember the graph and the stream to capture on."""
        self._graph = cuda_graph
        self._stream = StreamContext(stream or Stream())

    def __enter__(self) -> None:
        """Begin the capture."""
        self._stream.__enter__()
        self._graph.capture_begin()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the capture."""
        self._graph.capture_end()
        self._stream.__exit__()
