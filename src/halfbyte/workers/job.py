"""What workers do, whatever the engine: a job is sent to each, then units of work by name.

A job reads its input by path, so every worker must be able to read the input; results go back
through the engine, so no disk needs to be shared for the output.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from halfbyte.formats.output_files import WorkUnit


@dataclass(frozen=True, eq=False)
class UnitResult:
    """What a unit comes to.

    Attributes:
        tensors: output tensors by their name in the output.
        layers: a report entry for each layer.
    """

    tensors: Mapping[str, torch.Tensor]
    layers: list[dict[str, Any]]


class OpenJob(Protocol):
    """A job with its input open."""

    def work_off(self, unit: WorkUnit) -> UnitResult:
        """Return the result of a unit; the same bytes in every process of one `Identity`."""

    def iter_source_bytes(self, unit: WorkUnit) -> Iterator[torch.Tensor]:
        """Yield the input bytes that the unit's layers are made from, in a fixed order."""


class Job(Protocol):
    """Picklable: paths and settings, no tensors and no open files."""

    def open(self) -> OpenJob:
        """Return the job with its input open; CheckpointError where it cannot be read."""
