"""One bar per stage of a run over a file, with the peak memory so far."""

from collections.abc import Mapping
from typing import Any, Protocol, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from halfbyte.errors import printable
from halfbyte.peak_memory import read_peak_memory_bytes

_SHOWN_CHARACTERS = 32  # of the unit at hand: the end of a name tells more than its beginning


class StageEvent(Protocol):
    """Where a run stands; the stage "note" carries a message instead."""

    @property
    def stage(self) -> str:
        """Which part of the run."""

    @property
    def done_bytes(self) -> int:
        """Bytes done in it."""

    @property
    def total_bytes(self) -> int:
        """Bytes of it."""

    @property
    def text(self) -> str:
        """The unit at hand, or the message."""


class ProgressDisplay:
    """Shows the events of a run; a context manager."""

    def __init__(self, console: Console, stages: Mapping[str, str]) -> None:
        """Show on `console`, each stage under its words in `stages`."""
        self._stages = stages
        self._tasks: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("peak {task.fields[peak]}"),
            TextColumn("{task.fields[unit]}", markup=False),
            console=console,
        )

    def __enter__(self) -> Self:
        """Start showing."""
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the bars as they are."""
        self._progress.stop()

    def show(self, event: StageEvent) -> None:
        """Show one event."""
        if event.stage == "note":
            self._progress.console.print(escape(printable(event.text)))
            return
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._progress.add_task(
                self._stages[event.stage], total=event.total_bytes, peak="", unit=""
            )
        self._progress.update(
            self._tasks[event.stage],
            completed=event.done_bytes,
            peak=f"{read_peak_memory_bytes() / 1e6:.0f} MB",
            unit=printable(event.text)[-_SHOWN_CHARACTERS:],
        )
