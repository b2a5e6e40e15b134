"""The loop over units of work that both kinds of file runs share: resumed, recorded, shown.

What a unit is made of and how it is written is the caller's; which units are left, who works them
off and when their journal lines reach the disk is decided here, once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.output_files import WorkUnit
from halfbyte.formats.unfinished_output import FinishedUnit, UnfinishedOutput
from halfbyte.workers.job import Job, OpenJob, UnitResult
from halfbyte.workers.ray_workers import RayWorkers
from halfbyte.workers.unit_journal import UnitJournal


@dataclass(frozen=True)
class UnitReports:
    """Where a run tells how far it is.

    Attributes:
        show: called with the input bytes done and the unit at hand, "" at the end.
        note: called with a message.
    """

    show: Callable[[int, str], None]
    note: Callable[[str], None]


@dataclass(frozen=True)
class UnitOutput:
    """Where the tensors of units go.

    Attributes:
        unfinished: the output under construction, with its journal.
        tensors_of: names of the output tensors of a unit, its copies included.
        put: writes tensors of some layers; raises where they are not those that were planned.
        copy: yields the bytes of an input tensor, chunk by chunk.
    """

    unfinished: UnfinishedOutput
    tensors_of: Callable[[WorkUnit], Sequence[str]]
    put: Callable[[Sequence[str], UnitResult], None]
    copy: Callable[[str], Iterable[torch.Tensor]]


class UnitRun:
    """One pass over the units of a plan."""

    def __init__(self, units: Sequence[WorkUnit], output: UnitOutput, reports: UnitReports) -> None:
        """Work off `units`, whose bytes add up to the input's."""
        self._units = units
        self._output = output
        self._reports = reports

    def resume(self) -> int:
        """Return how many units an interrupted run had finished; damaged ones are done again."""
        unfinished = self._output.unfinished
        units = {unit.name: unit for unit in self._units}
        for name, finished in list(unfinished.finished.items()):
            unit = units.get(name)
            if unit is None or self._measure(unit) != finished.checksum:
                unfinished.drop(name)
        resumed = len(unfinished.finished)
        if unfinished.was_other_run:
            self._reports.note(
                "an interrupted run had another input or other settings; starting over"
            )
        elif resumed:
            self._reports.note(
                f"continuing an interrupted run: {resumed} of {len(self._units)} units done"
            )
        return resumed

    def work_here(self, make_results: Callable[[WorkUnit], Iterator[UnitResult]]) -> None:
        """Work off what is left in this process.

        Args:
            make_results: yields results whose `layers` entries name the layers that they are of; a
                unit of many layers may come in parts, so that one of them is in memory at a time.
        """
        unfinished, done = self._output.unfinished, 0
        for unit in self._units:
            self._reports.show(done, _describe(unit))
            if unit.name not in unfinished.finished:
                unfinished.record(self._write(unit, make_results(unit)))
            done += unit.num_bytes
        self._reports.show(done, "")

    def work_with(self, workers: RayWorkers, job: Job, opened: OpenJob) -> None:
        """Let `workers` make the results; this process copies, writes and keeps the journal."""
        unfinished = self._output.unfinished
        todo = [unit for unit in self._units if unit.name not in unfinished.finished]
        done = sum(unit.num_bytes for unit in self._units)
        done -= sum(unit.num_bytes for unit in todo)
        self._reports.show(done, "starting workers")
        with UnitJournal(unfinished) as journal:
            for unit, result in workers.run(job, opened, todo):
                journal.add(self._write(unit, iter([result])))
                done += unit.num_bytes
                self._reports.show(done, _describe(unit))

    def _write(self, unit: WorkUnit, results: Iterator[UnitResult]) -> FinishedUnit:
        """Write a unit's copies and tensors; return its journal line."""
        unfinished = self._output.unfinished
        for name in unit.copies:
            start = 0
            for chunk in self._output.copy(name):
                unfinished.file_of(name).write_bytes(name, chunk, start)
                start += chunk.numel()
        entries = []
        for result in results:
            self._output.put([entry["name"] for entry in result.layers], result)
            entries += result.layers
        made = tuple(entry["name"] for entry in entries)
        if made != unit.layers:
            raise CheckpointError(
                f"{unit.name}: made {made}, planned was {unit.layers}; this is a defect in halfbyte"
            )
        return FinishedUnit(unit.name, self._measure(unit), entries)

    def _measure(self, unit: WorkUnit) -> int:
        return self._output.unfinished.measure_checksum(self._output.tensors_of(unit))


def _describe(unit: WorkUnit) -> str:
    return (*unit.layers, unit.name)[0]
