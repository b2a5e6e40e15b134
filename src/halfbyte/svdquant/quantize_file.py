"""SVDQuant over a safetensors file or sharded directory, without data and in bounded memory.

Invariants: the target appears whole or not at all; a run that was killed anywhere and started
again gives the bytes of an undisturbed run (on the same machine with the same number of threads);
what is held in memory is one group of linears, never the model.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from halfbyte.errors import CheckpointError, FormatError, printable
from halfbyte.formats.file_target import check_free_space, check_may_replace, check_target
from halfbyte.formats.halfbyte_file import FORMAT_VERSION, is_halfbyte_metadata, make_tensor_name
from halfbyte.formats.halfbyte_layer import check_linear_values, split_linear
from halfbyte.formats.output_files import WorkUnit, encode_index, encode_report
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_writer import write_bytes_atomically
from halfbyte.formats.side_files import check_unchanged, read_side_file
from halfbyte.formats.unfinished_output import (
    FinishedUnit,
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
from halfbyte.svdquant.large_weights import WeightRows, quantize_large_group
from halfbyte.svdquant.linear_rules import BIAS_SUFFIX, WEIGHT_SUFFIX, LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.quantize_layer import quantize_linear_group
from halfbyte.svdquant.weight_error import make_snr_db, measure_weight_error

# Raised when a change to the arithmetic changes output bytes: a run that an older version began is
# then not continued by a newer one.
ARITHMETIC_VERSION = 1

# A group with more weights than this is never held whole: the quantizer keeps up to seven float32
# copies of what it holds.
MAX_HELD_WEIGHTS = 4 * 2**20


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
    """

    source: Path
    target: Path
    preset: SVDQuantPreset
    rules: LinearRules = field(default_factory=LinearRules)
    report: Path | None = None
    force: bool = False

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
    """
    request = replace(request, source=Path(request.source), target=Path(request.target))
    check_target(request.source, request.target, request.report_path)
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
        run = _Run(request, checkpoint, plan, checked, on_progress)
        with UnfinishedOutput(request.target, plan.files, json.dumps(provenance)) as output:
            try:
                return run.write(output, is_directory)
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
    ) -> None:
        self.request = request
        self.checkpoint = checkpoint
        self.plan = plan
        self.checked = checked
        self.on_progress = on_progress

    def write(self, output: UnfinishedOutput, is_directory: bool) -> QuantizeFileResult:
        resumed = self._drop_damaged_units(output)
        self._note_resumption(output, resumed)
        done = 0
        for unit in self.plan.units:
            self._show(done, unit.name)
            if unit.name not in output.finished:
                layers = self._work_off(output, unit)
                checksum = output.measure_checksum(self._tensors_of(unit))
                output.record(FinishedUnit(unit.name, checksum, layers))
            done += unit.num_bytes
        self._show(done, "")
        check_unchanged(self.checked.stamps, "quantized")
        if is_directory:
            self._write_side_files(output)
        report = self._make_report(output)
        write_bytes_atomically(self.request.report_path, encode_report(report))
        output.finish(is_directory)
        return QuantizeFileResult("written", resumed, report)

    def _show(self, done: int, text: str) -> None:
        self.on_progress(ProgressEvent("quantize", done, self.plan.input_bytes, text))

    def _note_resumption(self, output: UnfinishedOutput, resumed: int) -> None:
        text = ""
        if output.was_other_run:
            text = "an interrupted run had another input or other settings; starting over"
        elif resumed:
            text = f"continuing an interrupted run: {resumed} of {len(self.plan.units)} units done"
        if text:
            self.on_progress(ProgressEvent("note", 0, 0, text))

    def _drop_damaged_units(self, output: UnfinishedOutput) -> int:
        units = {unit.name: unit for unit in self.plan.units}
        for name, finished in list(output.finished.items()):
            unit = units.get(name)
            tensors = self._tensors_of(unit) if unit else []
            if unit is None or output.measure_checksum(tensors) != finished.checksum:
                output.drop(name)
        return len(output.finished)

    def _tensors_of(self, unit: WorkUnit) -> list[str]:
        parts = [
            make_tensor_name(layer, part)
            for layer in unit.layers
            for part in self.plan.layers[layer].parts
        ]
        return [*parts, *unit.copies]

    def _work_off(self, output: UnfinishedOutput, unit: WorkUnit) -> list[dict[str, Any]]:
        for name in unit.copies:
            start = 0
            for chunk in self.checkpoint.file_of(name).iter_bytes(name):
                output.file_of(name).write_bytes(name, chunk, start)
                start += chunk.numel()
        if not unit.layers:
            return []
        reports = []
        linears = self._quantize(unit)
        for layer, linear in zip(unit.layers, linears, strict=True):
            check_linear_values(f"{self.request.source}: {layer}", linear)
            self._write_linear(output, layer, linear)
            reports.append(asdict(self._report_layer(unit, layer, linear)))
        return reports

    def _quantize(self, unit: WorkUnit) -> list[QuantizedLinear]:
        try:
            return self._quantize_group(unit)
        except FormatError as error:
            raise CheckpointError(
                f"{self.request.source}: {', '.join(map(printable, unit.layers))}: {error}; its "
                "weights may be too large for float32 arithmetic: mend them or --exclude the layer"
            ) from error

    def _quantize_group(self, unit: WorkUnit) -> list[QuantizedLinear]:
        biases = [self._read_bias(layer) for layer in unit.layers]
        preset = self.request.preset
        weights = [self._open_rows(layer) for layer in unit.layers]
        if sum(weight.rows * weight.columns for weight in weights) > MAX_HELD_WEIGHTS:
            return quantize_large_group(weights, biases, preset)
        held = [read_float_weight(weight) for weight in weights]
        linears, _ = quantize_linear_group(held, biases, None, preset)
        return linears

    def _open_rows(self, layer: str) -> WeightRows:
        name = layer + WEIGHT_SUFFIX
        file = self.checkpoint.file_of(name)
        rows, columns = file.entry(name).shape
        return WeightRows(rows, columns, lambda start, stop: file.read_rows(name, start, stop))

    def _read_bias(self, layer: str) -> torch.Tensor | None:
        if "bias" not in self.plan.layers[layer].parts:
            return None
        return self.checkpoint.read_tensor(layer + BIAS_SUFFIX)

    def _write_linear(self, output: UnfinishedOutput, layer: str, linear: QuantizedLinear) -> None:
        record, tensors = split_linear(linear)
        planned = self.plan.layers[layer]
        if record != planned:
            raise CheckpointError(
                f"{self.request.source}: {layer}: quantized to {record}, planned was {planned}; "
                "this is a defect in halfbyte"
            )
        for part, tensor in tensors.items():
            name = make_tensor_name(layer, part)
            file = output.file_of(name)
            entry = file.layout.tensors[name]
            if entry.dtype.torch_dtype != tensor.dtype or entry.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)}, planned was {entry.dtype.name} "
                    f"{list(entry.shape)}; this is a defect in halfbyte"
                )
            file.write_bytes(name, tensor)

    def _report_layer(self, unit: WorkUnit, layer: str, linear: QuantizedLinear) -> LayerReport:
        name = layer + WEIGHT_SUFFIX
        error = measure_weight_error(self._open_rows(layer).read, linear)
        before = self.checkpoint.entry(name).num_bytes
        if linear.bias is not None:
            before += self.checkpoint.entry(layer + BIAS_SUFFIX).num_bytes
        return LayerReport(
            name=layer,
            out_features=linear.out_features,
            in_features=linear.in_features,
            format=linear.weight.format.name,
            rank=linear.rank,
            group=unit.layers,
            relative_error=error.relative_error,
            snr_db=make_snr_db(error.relative_error),
            blocks=error.counts.blocks,
            saturated=error.counts.saturated,
            flushed=error.counts.flushed,
            zero=error.counts.zero,
            bytes_before=before,
            bytes_after=linear.num_bytes,
        )

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
            for unit in output.finished.values()
            for entry in unit.layers
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


def read_float_weight(weight: WeightRows) -> torch.Tensor:
    """Return the whole weight as [N, K] float32, never holding a second whole copy."""
    whole = torch.empty(weight.rows, weight.columns, dtype=torch.float32)
    for start, stop, chunk in weight.iter_chunks():
        whole[start:stop] = chunk
    return whole


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
