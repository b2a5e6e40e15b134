"""One unit of work of a file: its linears read, quantized and described, wherever that happens.

The run over a file calls it in its own process, a worker in another; both make the same tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from halfbyte.errors import CheckpointError, FormatError, printable
from halfbyte.formats.halfbyte_file import make_tensor_name
from halfbyte.formats.halfbyte_layer import LayerRecord, check_linear_values, split_linear
from halfbyte.formats.output_files import WorkUnit
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.svdquant.file_plan import make_plan
from halfbyte.svdquant.file_report import LayerReport
from halfbyte.svdquant.large_weights import WeightRows, quantize_large_group
from halfbyte.svdquant.linear_rules import BIAS_SUFFIX, WEIGHT_SUFFIX, LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.quantize_layer import quantize_linear_group
from halfbyte.svdquant.weight_error import make_snr_db, measure_weight_error
from halfbyte.workers.job import UnitResult

# A group with more weights than this is never held whole: the quantizer keeps up to seven float32
# copies of what it holds.
MAX_HELD_WEIGHTS = 4 * 2**20


@dataclass(frozen=True)
class QuantizeJob:
    """What a worker needs to quantize units of a file (a `workers.job.Job`).

    Attributes:
        source: absolute path of the input, which each worker reads.
        preset, rules: as in the request.
    """

    source: Path
    preset: SVDQuantPreset
    rules: LinearRules

    def open(self) -> "UnitQuantizer":
        """Return the quantizer with the input open; CheckpointError if it cannot be read."""
        checkpoint = SafetensorsCheckpoint(self.source)
        layers = make_plan(checkpoint, self.rules, self.preset, None).layers
        return UnitQuantizer(checkpoint, layers, self.preset)


class UnitQuantizer:
    """Quantizes units of an open checkpoint (a `workers.job.OpenJob`)."""

    def __init__(
        self,
        checkpoint: SafetensorsCheckpoint,
        layers: Mapping[str, LayerRecord],
        preset: SVDQuantPreset,
    ) -> None:
        """Quantize layers of `checkpoint` into what `layers` promises of each."""
        self.checkpoint = checkpoint
        self.layers = layers
        self.preset = preset

    def work_off(self, unit: WorkUnit) -> UnitResult:
        """Return the unit's output tensors, as planned, and a report entry for each layer.

        Raises:
            CheckpointError: weights that cannot be quantized, naming the layers.
        """
        if not unit.layers:
            return UnitResult({}, [])
        tensors: dict[str, torch.Tensor] = {}
        reports = []
        for layer, linear in zip(unit.layers, self._quantize(unit), strict=True):
            check_linear_values(f"{self.checkpoint.path}: {layer}", linear)
            tensors |= self._name_tensors(layer, linear)
            reports.append(asdict(self._report_layer(unit, layer, linear)))
        return UnitResult(tensors, reports)

    def iter_source_bytes(self, unit: WorkUnit) -> Iterator[torch.Tensor]:
        """Yield the bytes of the unit's weights and biases."""
        for layer in unit.layers:
            yield from self._iter_bytes(layer + WEIGHT_SUFFIX)
            if "bias" in self.layers[layer].parts:
                yield from self._iter_bytes(layer + BIAS_SUFFIX)

    def _iter_bytes(self, name: str) -> Iterator[torch.Tensor]:
        return self.checkpoint.file_of(name).iter_bytes(name)

    def _quantize(self, unit: WorkUnit) -> list[QuantizedLinear]:
        try:
            return self._quantize_group(unit)
        except FormatError as error:
            raise CheckpointError(
                f"{self.checkpoint.path}: {', '.join(map(printable, unit.layers))}: {error}; its "
                "weights may be too large for float32 arithmetic: mend them or --exclude the layer"
            ) from error

    def _quantize_group(self, unit: WorkUnit) -> list[QuantizedLinear]:
        biases = [self._read_bias(layer) for layer in unit.layers]
        weights = [self._open_rows(layer) for layer in unit.layers]
        if sum(weight.rows * weight.columns for weight in weights) > MAX_HELD_WEIGHTS:
            return quantize_large_group(weights, biases, self.preset)
        held = [read_float_weight(weight) for weight in weights]
        linears, _ = quantize_linear_group(held, biases, None, self.preset)
        return linears

    def _open_rows(self, layer: str) -> WeightRows:
        name = layer + WEIGHT_SUFFIX
        file = self.checkpoint.file_of(name)
        rows, columns = file.entry(name).shape
        return WeightRows(rows, columns, lambda start, stop: file.read_rows(name, start, stop))

    def _read_bias(self, layer: str) -> torch.Tensor | None:
        if "bias" not in self.layers[layer].parts:
            return None
        return self.checkpoint.read_tensor(layer + BIAS_SUFFIX)

    def _name_tensors(self, layer: str, linear: QuantizedLinear) -> dict[str, torch.Tensor]:
        record, tensors = split_linear(linear)
        planned = self.layers[layer]
        if record != planned:
            raise CheckpointError(
                f"{self.checkpoint.path}: {layer}: quantized to {record}, planned was {planned}; "
                "this is a defect in halfbyte"
            )
        return {make_tensor_name(layer, part): tensor for part, tensor in tensors.items()}

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


def read_float_weight(weight: WeightRows) -> torch.Tensor:
    """Return the whole weight as [N, K] float32, never holding a second whole copy."""
    whole = torch.empty(weight.rows, weight.columns, dtype=torch.float32)
    for start, stop, chunk in weight.iter_chunks():
        whole[start:stop] = chunk
    return whole
