"""Journal lines of units that come from many workers, put on the disk in batches.

Waiting for the disk after every unit would hold up all workers for one; a kill loses what the last
second brought.
"""

import time
from types import TracebackType
from typing import Final, Self

from halfbyte.formats.unfinished_output import FinishedUnit, UnfinishedOutput

BATCH_SECONDS: Final = 1.0


class UnitJournal:
    """Records units of an output under construction; a context manager.

    However the context is left, what was added is recorded.
    """

    def __init__(self, output: UnfinishedOutput) -> None:
        """Write to the journal of `output`."""
        self._output = output
        self._batch: list[FinishedUnit] = []
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        """Return the journal itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record what is left."""
        self.flush()

    def add(self, unit: FinishedUnit) -> None:
        """Take a unit whose bytes are written; it is on the disk within the next batch."""
        self._batch.append(unit)
        if time.monotonic() - self._since >= BATCH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Put the batch on the disk."""
        batch, self._batch = self._batch, []
        self._output.record_all(batch)
        self._since = time.monotonic()
