"""A checkpoint of one family into a file or directory of another, layer by layer.

Invariants: the target appears whole or not at all; a run that was killed anywhere and started
again gives the bytes of an undisturbed run; what is held in memory is one layer, never the model;
nothing is put in place that its own family does not read, or that failed the proof.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from halfbyte.checkpoints.conversion_plan import (
    ConversionPlan,
    describe_passthrough,
    plan_conversion,
)
from halfbyte.checkpoints.family import Family
from halfbyte.checkpoints.finished_conversion import (
    REPORT_KIND,
    is_finished,
    list_made_files,
    make_mark,
)
from halfbyte.checkpoints.layer_changes import BindChanges, LayerReader, bind_changes
from halfbyte.checkpoints.open_source import OpenSources
from halfbyte.checkpoints.registry import Recognised, get_family, recognise
from halfbyte.checkpoints.tensor_source import TensorSource, iter_tensor_bytes
from halfbyte.checkpoints.unit_converter import ConvertJob, UnitConverter
from halfbyte.checkpoints.verify import LayerProof, Verification, verify_conversion
from halfbyte.errors import CheckpointError, UsageError, WorkerError
from halfbyte.formats.file_target import check_free_space, check_may_replace, check_target
from halfbyte.formats.output_files import encode_report
from halfbyte.formats.safetensors_header import quoted
from halfbyte.formats.safetensors_writer import write_bytes_atomically
from halfbyte.formats.side_files import check_unchanged, read_side_file
from halfbyte.formats.unfinished_output import (
    UnfinishedOutput,
    get_unfinished_folder,
    is_output_of,
)
from halfbyte.workers.job import UnitResult
from halfbyte.workers.ray_workers import RayWorkers, check_workers, start_workers
from halfbyte.workers.settings import WorkerSettings
from halfbyte.workers.unit_run import UnitOutput, UnitReports, UnitRun

REPORT_VERSION = 1


@dataclass(frozen=True)
class ConvertEvent:
    """Where a run stands.

    Attributes:
        stage: "convert" works off the units, "verify" reads the output again, "note" carries a
            message.
        done_bytes: input bytes done in this stage.
        total_bytes: input bytes of this stage.
        text: the unit or layer at hand, or the message.
    """

    stage: Literal["convert", "verify", "note"]
    done_bytes: int
    total_bytes: int
    text: str


OnEvent = Callable[[ConvertEvent], None]


@dataclass(frozen=True)
class ConvertRequest:
    """What to do.

    Attributes:
        source: a checkpoint of any family that is read.
        target: a file (a name that ends in .safetensors, .sft or .gguf) or a directory.
        to: the family to write.
        origin: the family of the source; None to decide by the file.
        original: the unquantized model, which decides between possible families by trial.
        verify: whether to prove, layer by layer, that the output means what the source means.
        report: where the JSON report goes; None for beside the target.
        force: replace a target, also one that is this conversion's finished output.
        workers: processes that convert, None for this one alone.
        merge: what changes the layers on the way (adapters), None for nothing; not with workers.
    """

    source: Path
    target: Path
    to: str
    origin: str | None = None
    original: Path | None = None
    verify: bool = False
    report: Path | None = None
    force: bool = False
    workers: WorkerSettings | None = None
    merge: BindChanges | None = None

    @property
    def report_path(self) -> Path:
        """Where the report goes: `NAME.report.json` beside the target unless told otherwise."""
        name = self.target.name.removesuffix(".safetensors")
        return self.report or self.target.parent / f"{name}.report.json"


@dataclass(frozen=True)
class ConvertResult:
    """How a run ended.

    Attributes:
        status: "written", or "already_done" where the target was this conversion's finished output.
        resumed_units: units that an earlier run had finished.
        report: the report as written; None when already done.
        verified: the sums of the proof that was asked for; None without one.
    """

    status: Literal["written", "already_done"]
    resumed_units: int
    report: dict[str, Any] | None
    verified: dict[str, Any] | None


def convert_checkpoint(
    request: ConvertRequest, on_event: OnEvent = lambda event: None
) -> ConvertResult:
    """Return how the run went; the target is then whole, or untouched.

    An interrupt keeps what is done for the next run; an error removes it.

    Raises:
        UsageError: paths or names that cannot be meant.
        CheckpointError: an input that is corrupt, ambiguous or cannot be held by the target
            family, a place that cannot be written, a layer that failed the proof.
        WorkerError: workers that are lost or unfit; what is done is kept for the next run.
        MissingDependencyError: workers are asked for and Ray is absent.
    """
    request = replace(request, source=Path(request.source), target=Path(request.target))
    target = get_family(request.to)
    check_target(request.source, request.target, request.report_path, may_become_directory=True)
    _check_merge(request)
    check_workers(request.workers)
    with OpenSources() as sources:
        source = sources.open(request.source)
        original = None if request.original is None else sources.open(Path(request.original))
        found = recognise(source, request.origin, original)
        reader = bind_changes(source, found, target, request.merge)
        plan = plan_conversion(source, reader, request.target)
        fingerprint = plan.make_fingerprint(reader)
        if _is_done(request, plan, fingerprint):
            run = _Run(request, source, reader, plan, on_event, None)
            verification = run.read_again(request.target)
            proof = None if verification is None else verification.describe()
            return ConvertResult("already_done", len(plan.units), None, proof)
        check_may_replace(request.target, plan.is_directory, request.force, "this conversion")
        if not os.path.lexists(get_unfinished_folder(request.target)):
            check_free_space(request.target, plan.output_bytes)

        def note(text: str) -> None:
            on_event(ConvertEvent("note", 0, 0, text))

        with (
            start_workers(request.workers, note) as workers,
            UnfinishedOutput(request.target, plan.files, fingerprint) as output,
        ):
            run = _Run(request, source, reader, plan, on_event, workers)
            try:
                return run.write(output)
            except WorkerError:
                raise  # nothing is wrong with what is done
            except Exception:
                output.discard()
                raise


def _is_done(request: ConvertRequest, plan: ConversionPlan, fingerprint: str) -> bool:
    """Return whether the target is the output already; put what a killed run left away then."""
    tensors = {unit.name: plan.tensors_of(unit) for unit in plan.units}
    if is_output_of(request.target, plan.files, fingerprint, tensors):
        UnfinishedOutput.remove_leftovers(request.target)
        return True
    places = request.source, request.target, request.report_path
    return not request.force and is_finished(places, plan, fingerprint, tensors)


def _check_merge(request: ConvertRequest) -> None:
    if request.merge is not None and request.workers is not None:
        raise UsageError(
            "--merge and --workers are not combined: workers read the input alone; merge without "
            "--workers, or convert first and merge into the output"
        )


class _Run:
    """One pass over the units of a plan."""

    def __init__(
        self,
        request: ConvertRequest,
        source: TensorSource,
        reader: LayerReader,
        plan: ConversionPlan,
        on_event: OnEvent,
        workers: RayWorkers | None,
    ) -> None:
        self.request = request
        self.source = source
        self.reader = reader
        self.found = reader.found
        self.plan = plan
        self.on_event = on_event
        self.workers = workers
        self.converter = UnitConverter(source, reader)

    def write(self, output: UnfinishedOutput) -> ConvertResult:
        resumed = self._work_off(output)
        if self.plan.is_directory:
            self._write_side_files(output)
        written = output.folder
        if not self.plan.is_directory:
            written /= self.plan.files[0].name
        verification = self.read_again(written)
        check_unchanged(self.plan.stamps, "converted")
        report = self._make_report(output, verification)
        write_bytes_atomically(self.request.report_path, encode_report(report))
        output.finish(self.plan.is_directory)
        return ConvertResult("written", resumed, report, report["verified"])

    def _work_off(self, output: UnfinishedOutput) -> int:
        """Convert every unit that is left; return how many were there."""

        def put(layers: Sequence[str], result: UnitResult) -> None:
            self._put(output, layers, result)

        run = UnitRun(
            self.plan.units,
            UnitOutput(output, self.plan.tensors_of, put, partial(iter_tensor_bytes, self.source)),
            UnitReports(
                partial(self._show, "convert"),
                lambda text: self.on_event(ConvertEvent("note", 0, 0, text)),
            ),
        )
        resumed = run.resume()
        if self.workers is None:
            run.work_here(lambda unit: map(self.converter.convert_layer, unit.layers))
        else:
            source, origin = self.request.source.resolve(), self.found.family.name
            job = ConvertJob(source, origin, self.plan.target.name)
            run.work_with(self.workers, job, self.converter)
        return resumed

    def _show(self, stage: Literal["convert", "verify"], done: int, text: str) -> None:
        self.on_event(ConvertEvent(stage, done, self.plan.input_bytes, text))

    def _put(self, output: UnfinishedOutput, layers: Sequence[str], result: UnitResult) -> None:
        """Write the tensors of `layers`, which must be those that were planned."""
        specs = [spec for name in layers for spec in self.plan.layers[name].tensors.values()]
        promised = {spec.name: (spec.dtype.torch_dtype, spec.shape) for spec in specs}
        made = {name: (value.dtype, tuple(value.shape)) for name, value in result.tensors.items()}
        if made != promised:
            raise CheckpointError(
                f"{self.source.path}: {quoted(list(layers))}: encoded to {quoted(made)}, planned "
                f"was {quoted(promised)}; this is a defect in halfbyte"
            )
        for name, tensor in result.tensors.items():
            output.file_of(name).write_bytes(name, tensor)

    def _write_side_files(self, output: UnfinishedOutput) -> None:
        files = list_made_files(self.plan)
        for name in self.plan.copied_files:
            files[name] = read_side_file(self.request.source, name)
        for name, data in files.items():
            write_bytes_atomically(output.folder / name, data)

    def read_again(self, path: Path) -> Verification | None:
        """Return the proof of the output at `path`, or None where none was asked for.

        Either way the target family must read it: CheckpointError.
        """
        with OpenSources() as sources:
            written = sources.open(path)
            again = self._recognise_written(written, self.plan.target)
            if not self.request.verify:
                return None
            done = 0

            def advance(text: str, num_bytes: int) -> None:
                nonlocal done
                self._show("verify", done, text)
                done += num_bytes

            verification = verify_conversion((self.source, self.reader), (written, again), advance)
            self._show("verify", done, "")
            return verification

    def _recognise_written(self, written: TensorSource, target: Family) -> Recognised:
        again = recognise(written, target.name)
        wanted, got = set(self.plan.layers), set(again.layers)
        if wanted != got:
            raise CheckpointError(
                f"{self.request.target}: {target.name} would read other layers than were written: "
                f"{quoted(sorted(wanted ^ got))}; this is a defect in halfbyte"
            )
        return again

    def _make_report(
        self, output: UnfinishedOutput, verification: Verification | None
    ) -> dict[str, Any]:
        proofs: Mapping[str, LayerProof] = {} if verification is None else verification.layers
        layers = sorted(
            (entry for unit in output.finished.values() for entry in unit.layers),
            key=lambda entry: entry["name"],
        )
        for entry in layers:
            proof = proofs.get(entry["name"])
            entry["proof"] = None if proof is None else asdict(proof)
        return {
            "report": REPORT_KIND,
            "report_version": REPORT_VERSION,
            "input": str(self.request.source),
            "output": str(self.request.target),
            "from": self.found.family.name,
            "to": self.plan.target.name,
            "evidence": self.found.evidence,
            "merged": list(self.reader.changes.described),
            "totals": {
                "layers": len(layers),
                "bytes_before": sum(entry["bytes_before"] for entry in layers),
                "bytes_after": sum(entry["bytes_after"] for entry in layers),
            },
            "verified": None if verification is None else verification.describe(),
            "layers": layers,
            "passthrough": describe_passthrough(self.source, self.found),
            "written_files": sorted(
                [*(file.name for file in self.plan.files), *self.plan.side_files]
            ),
            "copied_files": list(self.plan.copied_files),
            "not_copied": list(self.plan.not_copied),
            "finished": make_mark(
                self.plan.make_fingerprint(self.reader),
                {name: unit.checksum for name, unit in output.finished.items()},
            ),
        }
