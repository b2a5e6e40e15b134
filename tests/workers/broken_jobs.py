"""Jobs that go wrong in a worker process; importable there."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.checkpoints.unit_converter import ConvertJob, UnitConverter
from halfbyte.formats.output_files import WorkUnit
from halfbyte.svdquant.unit_quantizer import QuantizeJob, UnitQuantizer
from halfbyte.workers.job import UnitResult


@dataclass(frozen=True)
class DyingJob:
    """Results are the unit's name; the process kills itself `deaths` times at each unit."""

    folder: Path
    deaths: int

    def open(self) -> "OpenDyingJob":
        return OpenDyingJob(self)


@dataclass(frozen=True)
class OpenDyingJob:
    job: DyingJob

    def iter_source_bytes(self, unit: WorkUnit) -> Iterator[torch.Tensor]:
        yield torch.tensor(list(unit.name.encode()), dtype=torch.uint8)

    def work_off(self, unit: WorkUnit) -> UnitResult:
        count = len(list(self.job.folder.glob(f"{unit.name}.*")))
        if count < self.job.deaths:
            (self.job.folder / f"{unit.name}.{count}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.tensor(list(unit.name.encode()), dtype=torch.uint8)
        scale = torch.tensor([0.5, -2.0]).to(torch.float8_e4m3fn)
        return UnitResult({"name": value, "scale": scale, "one": torch.tensor(1.5)}, [{}])


class QuantizeJobThatDies(QuantizeJob):
    """Quantizes, but kills its process at the first unit of q/k/v of each layer."""

    def open(self) -> UnitQuantizer:
        opened = super().open()
        work_off = opened.work_off

        def die_once(unit: WorkUnit) -> UnitResult:
            marker = self.source.parent / f"died.{'+'.join(unit.layers)}"
            if "q_proj" in marker.name and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return work_off(unit)

        opened.work_off = die_once  # type: ignore[method-assign]
        return opened


class QuantizeJobOfAnotherFile(QuantizeJob):
    """Reads a neighbour of the input."""

    def open(self) -> UnitQuantizer:
        other = self.source.with_name("other.safetensors")
        return QuantizeJob(other, self.preset, self.rules).open()


class QuantizeJobWithoutInput(QuantizeJob):
    """Has no input where it runs."""

    def open(self) -> UnitQuantizer:
        return QuantizeJob(self.source.with_name("absent"), self.preset, self.rules).open()


class ConvertJobThatDies(ConvertJob):
    """Converts, but kills its process at the first unit."""

    def open(self) -> UnitConverter:
        opened = super().open()
        marker = self.source.parent / "died"
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return opened
