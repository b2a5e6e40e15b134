"""What is done to layers between reading and writing a checkpoint: adapters that become part of it.

The changes of a run are bound once, to the shapes of all layers, and then applied to one layer at
a time, without values too, so that a conversion is planned and streamed as without them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from halfbyte.checkpoints.family import Family, Layer, read_layer
from halfbyte.checkpoints.registry import Recognised
from halfbyte.checkpoints.tensor_source import MetaSource, TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.halfbyte_layer import check_linear_values
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.side_files import Stamp

ChangeLayer = Callable[[QuantizedLinear], QuantizedLinear]


@dataclass(frozen=True)
class LayerChanges:
    """The changes of a run; none by default.

    Attributes:
        by_layer: name of a layer -> the record that it becomes; pure, runs without values too.
        fingerprint: everything that decides what they are, in words that two equal runs share.
        stamps: of the files that they were read from.
        described: one line each, for the report.
    """

    by_layer: Mapping[str, ChangeLayer] = field(default_factory=dict)
    fingerprint: str = ""
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)
    described: tuple[str, ...] = ()


# (N, K) of every layer by name -> the changes.
BindChanges = Callable[[Mapping[str, tuple[int, int]]], LayerChanges]


@dataclass(frozen=True)
class LayerReader:
    """Reads layers as they are to be written: a recognised checkpoint and the changes to it.

    Attributes:
        found: the checkpoint.
        changes: to its layers.
        target: the family that is written.
        shared_rank: that W4A4 layers are filled up to with zero ranks; 0 for none.
    """

    found: Recognised
    changes: LayerChanges
    target: Family
    shared_rank: int = 0

    @property
    def is_changing(self) -> bool:
        """Whether the output is another model than the source."""
        return bool(self.changes.fingerprint)

    def read(self, source: TensorSource, name: str) -> Layer:
        """Return a layer; raises what `read_layer` does, and for values that do not fit."""
        layer = read_layer(self.found.family, source, self.found.layers[name])
        if not self.is_changing:
            return layer
        where = f"{source.path}: {name}"
        try:
            linear = self._change(name, layer.linear)
        except FormatError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not linear.weight.data.is_meta:
            check_linear_values(where, linear)
        origin = layer.origin
        if origin is None or origin.family != self.target.name:
            return Layer(name, linear)
        # How names and dtypes were spelled still holds; the bytes do for an unchanged layer alone.
        kept = origin.parts if linear is layer.linear else {}
        return Layer(name, linear, LayerOrigin(origin.family, kept, origin.facts))

    def _change(self, name: str, linear: QuantizedLinear) -> QuantizedLinear:
        change = self.changes.by_layer.get(name)
        if change is not None:
            linear = fill_ranks(change(linear), self.target.rank_step)
        if self.shared_rank and linear.activation is not None:
            linear = fill_ranks(linear, self.shared_rank)
        return linear


def bind_changes(
    source: TensorSource, found: Recognised, target: Family, bind: BindChanges | None
) -> LayerReader:
    """Return how layers of `source` are read; CheckpointError for changes of layers it lacks."""
    if bind is None:
        return LayerReader(found, LayerChanges(), target)
    meta = MetaSource(source)
    linears = {
        name: read_layer(found.family, meta, plan).linear for name, plan in found.layers.items()
    }
    changes = bind({name: (one.out_features, one.in_features) for name, one in linears.items()})
    reader = LayerReader(found, changes, target)
    if not target.has_one_rank:
        return reader
    ranks = [
        layer.rank
        for layer in (reader.read(meta, name).linear for name in found.layers)
        if layer.activation is not None
    ]
    return replace(reader, shared_rank=max(ranks, default=0))


def fill_ranks(linear: QuantizedLinear, step: int) -> QuantizedLinear:
    """Return `linear` with zero ranks up to a multiple of `step`: the same values."""
    missing = -linear.rank % step
    if missing == 0:
        return linear
    down, up = linear.lora_down, linear.lora_up
    if down is None or up is None:
        dtype, device = _choose_dtype(linear), linear.weight.data.device
        down = torch.zeros(0, linear.in_features, dtype=dtype, device=device)
        up = torch.zeros(linear.out_features, 0, dtype=dtype, device=device)
        missing = step
    return replace(
        linear,
        lora_down=torch.cat([down, down.new_zeros(missing, down.shape[1])]),
        lora_up=torch.cat([up, up.new_zeros(up.shape[0], missing)], dim=1),
    )


def _choose_dtype(linear: QuantizedLinear) -> torch.dtype:
    for part in (linear.bias, linear.smooth):
        if part is not None:
            return part.dtype
    return torch.bfloat16
