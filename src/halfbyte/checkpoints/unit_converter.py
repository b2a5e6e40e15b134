"""Layers of a checkpoint decoded and encoded, wherever that happens.

The run over a checkpoint calls it in its own process, a worker in another; both make the same
tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.family import Layer, Parts, write_layer
from halfbyte.checkpoints.layer_changes import LayerReader, bind_changes
from halfbyte.checkpoints.open_source import open_source
from halfbyte.checkpoints.registry import get_family, recognise
from halfbyte.checkpoints.tensor_source import TensorSource, iter_tensor_bytes
from halfbyte.errors import CheckpointError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.halfbyte_layer import has_only_finite
from halfbyte.formats.output_files import WorkUnit
from halfbyte.workers.job import UnitResult


@dataclass(frozen=True)
class ConvertJob:
    """What a worker needs to convert units of a checkpoint (a `workers.job.Job`).

    Attributes:
        source: absolute path of the input, which each worker reads.
        origin: name of its family, decided already.
        target: name of the family to write.
    """

    source: Path
    origin: str
    target: str

    def open(self) -> "UnitConverter":
        """Return the converter with the input open; CheckpointError if it cannot be read."""
        source = open_source(self.source)
        found = recognise(source, self.origin)
        return UnitConverter(source, bind_changes(source, found, get_family(self.target), None))


class UnitConverter:
    """Converts layers of an open checkpoint (a `workers.job.OpenJob`)."""

    def __init__(self, source: TensorSource, reader: LayerReader) -> None:
        """Convert layers of `source`, read by `reader`, into those of its target."""
        self.source = source
        self.reader = reader
        self.found = reader.found
        self.target = reader.target

    def work_off(self, unit: WorkUnit) -> UnitResult:
        """Return the output tensors of all layers of a unit, and a report entry for each."""
        tensors: dict[str, torch.Tensor] = {}
        entries: list[dict[str, Any]] = []
        for name in unit.layers:
            result = self.convert_layer(name)
            tensors |= result.tensors
            entries += result.layers
        return UnitResult(tensors, entries)

    def iter_source_bytes(self, unit: WorkUnit) -> Iterator[torch.Tensor]:
        """Yield the bytes of every tensor that the unit's layers are read from."""
        for layer in unit.layers:
            for _, name in sorted(self.found.layers[layer].tensors.items()):
                yield from iter_tensor_bytes(self.source, name)

    def convert_layer(self, name: str) -> UnitResult:
        """Return the output tensors of one layer and its report entry.

        Raises:
            CheckpointError: values that the source's family forbids or the target cannot hold.
        """
        layer = self.reader.read(self.source, name)
        parts = write_layer(self.target, layer)
        self._check_finite(name, parts)
        tensors = {self.target.tensor_name(name, part): tensor for part, tensor in parts.items()}
        return UnitResult(tensors, [self._describe(layer, parts)])

    def _check_finite(self, name: str, parts: Parts) -> None:
        for part, tensor in parts.items():
            if tensor.dtype in FLOAT_DTYPES and not has_only_finite(tensor):
                raise CheckpointError(
                    f"{self.source.path}: {name}: {part} of {self.target.name} would be infinite "
                    "or NaN: a scale of the source is too small for its reciprocal"
                )

    def _describe(self, layer: Layer, parts: Parts) -> dict[str, Any]:
        linear, plan = layer.linear, self.found.layers[layer.name]
        return {
            "name": layer.name,
            "out_features": linear.out_features,
            "in_features": linear.in_features,
            "format": linear.weight.format.name,
            "activation": None if linear.activation is None else linear.activation.name,
            "rank": linear.rank,
            "bytes_before": sum(self.source.specs[n].num_bytes for n in plan.tensors.values()),
            "bytes_after": sum(part.numel() * part.element_size() for part in parts.values()),
        }
