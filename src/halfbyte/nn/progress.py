"""How far a quantization is: events for a listener, and a bar for a person."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from halfbyte.peak_memory import read_peak_memory_bytes


@dataclass(frozen=True)
class QuantizationProgress:
    """Where a quantization stands.

    Attributes:
        done: linears quantized.
        total: linears to quantize.
        name: what was finished last.
        seconds: since the start.
        remaining_seconds: estimated from the mean so far; None at the start.
        peak_memory_bytes: of the process.
    """

    done: int
    total: int
    name: str
    seconds: float
    remaining_seconds: float | None
    peak_memory_bytes: int


OnProgress = Callable[[QuantizationProgress], None]


class ProgressClock:
    """Counts finished linears and tells the listener."""

    def __init__(self, listener: OnProgress, total: int) -> None:
        """Start the clock."""
        self._listener = listener
        self._total = total
        self._done = 0
        self._started = time.perf_counter()

    def advance(self, name: str, count: int) -> None:
        """Count `count` more linears, the last of them called `name`."""
        self._done += count
        seconds = time.perf_counter() - self._started
        left = self._total - self._done
        remaining = seconds / self._done * left if self._done else None
        self._listener(
            QuantizationProgress(
                self._done, self._total, name, seconds, remaining, read_peak_memory_bytes()
            )
        )


@contextmanager
def showing(progress: bool | OnProgress, title: str, total: int) -> Iterator[OnProgress]:
    """Give a listener: the caller's own, a bar on standard error, or one that ignores events."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(
        TextColumn(title, markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("peak {task.fields[peak]}"),
        TextColumn("{task.fields[linear]}", markup=False),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task(title, total=total, left="", peak="", linear="")

        def show(event: QuantizationProgress) -> None:
            left = event.remaining_seconds
            bar.update(
                task,
                completed=event.done,
                left="" if left is None else f"ETA {left:.0f} s",
                peak=f"{event.peak_memory_bytes / 1e6:.0f} MB",
                linear=event.name,
            )

        yield show
