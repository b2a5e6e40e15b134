"""SVDQuant over a safetensors file or sharded directory, without data and in bounded memory.

Invariants: the target appears whole or not at all; a run that was killed anywhere and started
again gives the bytes of an undisturbed run (on the same machine with the same number of threads);
what is held in memory is one group of linears, never the model.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from halfbyte.errors import CheckpointError, WorkerError
from halfbyte.formats.file_target import check_free_space, check_may_replace, check_target
from halfbyte.formats.halfbyte_file import FORMAT_VERSION, is_halfbyte_metadata, make_tensor_name
from halfbyte.formats.output_files import WorkUnit, encode_index, encode_report
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_writer import write_bytes_atomically
from halfbyte.formats.side_files import check_unchanged, read_side_file
from halfbyte.formats.unfinished_output import (
    UnfinishedOutput,
    get_unfinished_folder,
)
from halfbyte.svdquant.file_input import CheckedInput, check_input
from halfbyte.svdquant.file_plan import (
    PROVENANCE_KEY,
    FilePlan,
    add_provenance,
    describe_preset,
    make_plan,
)
from halfbyte.svdquant.file_report import LayerReport, make_report
from halfbyte.svdquant.linear_rules import BIAS_SUFFIX, WEIGHT_SUFFIX, LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.unit_quantizer import QuantizeJob, UnitQuantizer
from halfbyte.workers.identity import Identity
from halfbyte.workers.job import UnitResult
from halfbyte.workers.ray_workers import RayWorkers, check_workers, start_workers
from halfbyte.workers.settings import WorkerSettings
from halfbyte.workers.unit_run import UnitOutput, UnitReports, UnitRun

# Raised when a change to the arithmetic changes output bytes: a run that an older version began is
# then not continued by a newer one.
ARITHMETIC_VERSION = 1


@dataclass(frozen=True)
class ProgressEvent:
    """Where a run stands.

    Attributes:
        stage: "check" reads and fingerprints the input, "quantize" works off the units,
            "note" carries a message.
        done_bytes: input bytes done in this stage.
        total_bytes: input bytes of this stage.
        text: the unit at hand, or the message.
    """

    stage: Literal["check", "quantize", "note"]
    done_bytes: int
    total_bytes: int
    text: str


OnProgress = Callable[[ProgressEvent], None]


@dataclass(frozen=True)
class QuantizeFileRequest:
    """What to do.

    Attributes:
        source: a safetensors file, or a directory of one or more with their index.
        target: a file; or, where `source` is a directory, a file or a directory.
        preset: weight-only, or with a dynamic activation format.
        rules: which tensors are linears.
        report: where the JSON report goes; None for beside the target.
        force: replace a target that holds something else.
        workers: processes that quantize, None for this one alone.
    """

    source: Path
    target: Path
    preset: SVDQuantPreset
    rules: LinearRules = field(default_factory=LinearRules)
    report: Path | None = None
    force: bool = False
    workers: WorkerSettings | None = None

    @property
    def report_path(self) -> Path:
        """Where the report goes: `NAME.report.json` beside the target unless told otherwise."""
        name = self.target.name.removesuffix(".safetensors")
        return self.report or self.target.parent / f"{name}.report.json"


@dataclass(frozen=True)
class QuantizeFileResult:
    """How a run ended.

    Attributes:
        status: "written", or "already_done" where the target was the result of the same request.
        resumed_units: units that an earlier, interrupted run had finished.
        report: the report as written; None when already done.
    """

    status: Literal["written", "already_done"]
    resumed_units: int
    report: dict[str, Any] | None


def quantize_file(
    request: QuantizeFileRequest, on_progress: OnProgress = lambda event: None
) -> QuantizeFileResult:
    """Return how the run went; the target is then whole, or untouched.

    An interrupt keeps what is done for the next run; an error removes it.

    Raises:
        UsageError: paths or settings that cannot be meant.
        CheckpointError: an input that is corrupt or not finite, a place that cannot be written.
        FormatError: a preset whose format names are unknown.
        WorkerError: workers that are lost or unfit; what is done is kept for the next run.
        MissingDependencyError: workers are asked for and Ray is absent.
    """
    request = replace(request, source=Path(request.source), target=Path(request.target))
    check_target(request.source, request.target, request.report_path)
    check_workers(request.workers)
    with SafetensorsCheckpoint(request.source) as checkpoint:
        _check_not_quantized(checkpoint)
        is_directory = checkpoint.is_directory and request.target.suffix != ".safetensors"
        output_name = None if is_directory else request.target.name
        plan = make_plan(checkpoint, request.rules, request.preset, output_name)
        if not os.path.lexists(get_unfinished_folder(request.target)):
            check_free_space(request.target, plan.output_bytes)
        checked = _check_source(checkpoint, plan, on_progress)
        provenance = _make_provenance(request, checked)
        plan = add_provenance(plan, provenance)
        if _is_finished(request.target, provenance) and not request.force:
            UnfinishedOutput.remove_leftovers(request.target)
            return QuantizeFileResult("already_done", 0, None)
        check_may_replace(
            request.target, is_directory, request.force, "this input with these settings"
        )
        fingerprint = _make_fingerprint(request, provenance)

        with (
            start_workers(
                request.workers, lambda text: on_progress(ProgressEvent("note", 0, 0, text))
            ) as workers,
            UnfinishedOutput(request.target, plan.files, fingerprint) as output,
        ):
            run = _Run(request, checkpoint, plan, checked, on_progress, workers)
            try:
                return run.write(output, is_directory)
            except WorkerError:
                raise  # nothing is wrong with what is done
            except Exception:
                output.discard()
                raise


class _Run:
    """One pass over the units of a plan."""

    def __init__(
        self,
        request: QuantizeFileRequest,
        checkpoint: SafetensorsCheckpoint,
        plan: FilePlan,
        checked: CheckedInput,
        on_progress: OnProgress,
        workers: RayWorkers | None,
    ) -> None:
        self.request = request
        self.checkpoint = checkpoint
        self.plan = plan
        self.checked = checked
        self.on_progress = on_progress
        self.workers = workers
        self.quantizer = UnitQuantizer(checkpoint, plan.layers, request.preset)

    def write(self, output: UnfinishedOutput, is_directory: bool) -> QuantizeFileResult:
        resumed = self._work_off(output)
        check_unchanged(self.checked.stamps, "quantized")
        if is_directory:
            self._write_side_files(output)
        report = self._make_report(output)
        write_bytes_atomically(self.request.report_path, encode_report(report))
        output.finish(is_directory)
        return QuantizeFileResult("written", resumed, report)

    def _work_off(self, output: UnfinishedOutput) -> int:
        """Quantize every unit that is left; return how many were there."""
        request = self.request

        def put(layers: Sequence[str], result: UnitResult) -> None:
            self._put(output, layers, result)

        def show(stage: Literal["quantize", "note"], done: int, text: str) -> None:
            total = self.plan.input_bytes if stage == "quantize" else 0
            self.on_progress(ProgressEvent(stage, done, total, text))

        run = UnitRun(
            self.plan.units,
            UnitOutput(output, self._tensors_of, put, self._iter_bytes),
            UnitReports(partial(show, "quantize"), partial(show, "note", 0)),
        )
        resumed = run.resume()
        if self.workers is None:
            run.work_here(lambda unit: iter([self.quantizer.work_off(unit)]))
        else:
            job = QuantizeJob(request.source.resolve(), request.preset, request.rules)
            run.work_with(self.workers, job, self.quantizer)
        return resumed

    def _iter_bytes(self, tensor: str) -> Iterator[torch.Tensor]:
        return self.checkpoint.file_of(tensor).iter_bytes(tensor)

    def _tensors_of(self, unit: WorkUnit) -> list[str]:
        return [*self._parts_of(unit.layers), *unit.copies]

    def _parts_of(self, layers: Sequence[str]) -> list[str]:
        return [
            make_tensor_name(layer, part)
            for layer in layers
            for part in self.plan.layers[layer].parts
        ]

    def _put(self, output: UnfinishedOutput, layers: Sequence[str], result: UnitResult) -> None:
        """Write the tensors of `layers`, which must be those that were planned."""
        promised = set(self._parts_of(layers))
        if promised != result.tensors.keys():
            raise CheckpointError(
                f"{list(layers)}: made {sorted(result.tensors)}, planned were {sorted(promised)}; "
                "this is a defect in halfbyte"
            )
        for name, tensor in result.tensors.items():
            file = output.file_of(name)
            entry = file.layout.tensors[name]
            if entry.dtype.torch_dtype != tensor.dtype or entry.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)}, planned was {entry.dtype.name} "
                    f"{list(entry.shape)}; this is a defect in halfbyte"
                )
            file.write_bytes(name, tensor)

    def _write_side_files(self, output: UnfinishedOutput) -> None:
        for name in self.checked.side_files:
            write_bytes_atomically(output.folder / name, read_side_file(self.request.source, name))
        if self.plan.index_name is None:
            return
        data = encode_index(self.plan.files)
        write_bytes_atomically(output.folder / self.plan.index_name, data)

    def _make_report(self, output: UnfinishedOutput) -> dict[str, Any]:
        layers = [
            LayerReport(**{**entry, "group": tuple(entry["group"])})
            for unit in self.plan.units
            for entry in output.finished[unit.name].layers
        ]
        copies = [name for unit in self.plan.units for name in unit.copies]
        settings = {
            "input": str(self.request.source),
            "output": str(self.request.target),
            "input_sha256": self.checked.digest,
            **describe_preset(self.request.preset, self.request.rules),
        }
        others = {
            "passthrough": {
                "tensors": len(copies),
                "bytes": sum(self.checkpoint.entry(name).num_bytes for name in copies),
            },
            "unindexed": list(self.checkpoint.unindexed),
            "copied_files": list(self.checked.side_files),
            "not_copied": list(self.checked.not_copied),
            "file_bytes": {"input": self.checkpoint.num_bytes, "output": self.plan.output_bytes},
        }
        return make_report(settings, layers, others)


def _check_source(
    checkpoint: SafetensorsCheckpoint, plan: FilePlan, on_progress: OnProgress
) -> CheckedInput:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        on_progress(ProgressEvent("check", done, checkpoint.num_bytes, checkpoint.path.name))

    finite = {layer + WEIGHT_SUFFIX for layer in plan.layers}
    finite |= {layer + BIAS_SUFFIX for layer, r in plan.layers.items() if "bias" in r.parts}
    return check_input(checkpoint, frozenset(finite), advance)


def _make_provenance(request: QuantizeFileRequest, checked: CheckedInput) -> dict[str, Any]:
    settings = describe_preset(request.preset, request.rules)
    rules = json.dumps(settings["rules"], sort_keys=True).encode()
    return {
        "tool": "halfbyte quantize",
        "arithmetic": ARITHMETIC_VERSION,
        "format_version": FORMAT_VERSION,
        "input_sha256": checked.digest,
        "preset": settings["preset"],
        "include": list(request.rules.include),
        "exclude": list(request.rules.exclude),
        "rules_sha256": hashlib.sha256(rules).hexdigest(),
    }


def _make_fingerprint(request: QuantizeFileRequest, provenance: dict[str, Any]) -> str:
    """Return what a run must share with an interrupted one to continue it.

    More than the output says of itself: matrix products of another machine or number of threads
    round otherwise, and half of each would be the bytes of no undisturbed run.
    """
    workers = request.workers
    threads = torch.get_num_threads() if workers is None else workers.threads
    computed_by = asdict(Identity.read(threads))
    for name in ("halfbyte", "code"):  # ARITHMETIC_VERSION speaks for these
        del computed_by[name]
    return json.dumps({**provenance, "computed_by": computed_by})


def _is_finished(target: Path, provenance: dict[str, Any]) -> bool:
    if not os.path.lexists(target):
        return False
    try:
        with SafetensorsCheckpoint(target) as checkpoint:
            texts = [shard.metadata.get(PROVENANCE_KEY) for shard in checkpoint.shards.values()]
        return bool(texts) and all(text and json.loads(text) == provenance for text in texts)
    except (CheckpointError, ValueError):
        return False


def _check_not_quantized(checkpoint: SafetensorsCheckpoint) -> None:
    for shard in checkpoint.shards.values():
        if is_halfbyte_metadata(shard.metadata):
            raise CheckpointError(
                f"{shard.path}: is a halfbyte file already; give the original checkpoint"
            )
