"""The GPU as the measuring code sees it: graphs, their replays, and a clock on the device."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from halfbyte.errors import UnsupportedHardwareError

Launch = Callable[[], object]


class TimingDevice(Protocol):
    """What `steady_state` needs of a GPU; tests bring one with a clock of their own."""

    l2_bytes: int

    def capture(self, launches: Sequence[Launch]) -> Any:
        """Return a graph of the calls, in order."""

    def synchronize(self) -> None:
        """Return when the device has nothing left to do."""

    def time_replays(
        self, graph: Any, untimed: int, timed: int, while_busy: Callable[[], None]
    ) -> list[float]:
        """Return the milliseconds of each timed replay; the untimed ones run right before them.

        `while_busy` is called again and again until the device has finished.
        """


class CudaTimingDevice:
    """A CUDA device of torch."""

    def __init__(self) -> None:
        """Take torch's current device.

        Raises:
            UnsupportedHardwareError: there is none.
        """
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedHardwareError(
                "speed is measured on a GPU, and torch finds none here: run this on a machine "
                "with an NVIDIA GPU and a CUDA build of torch; `--list` shows what it would measure"
            )
        properties = torch.cuda.get_device_properties()
        self.l2_bytes = int(properties.L2_cache_size)

    def capture(self, launches: Sequence[Launch]) -> Any:
        """Return a CUDA graph of the calls, in order."""
        import torch

        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        return graph

    def synchronize(self) -> None:
        """Return when the device has nothing left to do."""
        import torch

        torch.cuda.synchronize()

    def time_replays(
        self, graph: Any, untimed: int, timed: int, while_busy: Callable[[], None]
    ) -> list[float]:
        """Return the milliseconds of each timed replay; everything is queued before any waiting."""
        import torch

        for _ in range(untimed):
            graph.replay()
        events = [_make_event() for _ in range(timed + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        while not events[-1].query():
            while_busy()
        torch.cuda.synchronize()
        return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]


def _make_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
