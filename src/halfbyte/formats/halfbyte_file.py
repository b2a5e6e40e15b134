"""Our own file, version 1: safetensors whose metadata says what every tensor is.

Invariants: each tensor of a file belongs to a layer's record or passes through under its own
name; reading checks all of them; writing is atomic and equal input gives equal bytes, so that
save, load, save is byte-equal. `docs/formats.md` specifies the format.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_layer import (
    ALL_PARTS,
    LayerRecord,
    check_linear_values,
    join_linear,
    parse_layer_record,
    split_linear,
)
from halfbyte.formats.layer_origin import (
    ORIGINS_KEY,
    LayerOrigin,
    OriginRecord,
    encode_origins,
    make_origin_name,
    make_origin_record,
    read_origin_records,
)
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import quoted, read_strict_json
from halfbyte.formats.safetensors_reader import SafetensorsFile
from halfbyte.formats.safetensors_writer import write_safetensors

FORMAT_VERSION = "1"
VERSION_KEY = "halfbyte_format_version"
LAYERS_KEY = "halfbyte_layers"
RESERVED_KEYS = (VERSION_KEY, LAYERS_KEY, ORIGINS_KEY)


class LazyTensors(Mapping[str, torch.Tensor]):
    """A read-only map of tensors that are read from the checkpoint when asked for."""

    def __init__(self, checkpoint: SafetensorsCheckpoint, names: tuple[str, ...]) -> None:
        """Map `names` to the tensors of `checkpoint`, which stays open for it."""
        self._checkpoint = checkpoint
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, read anew at every call."""
        if name not in self._names:
            raise KeyError(name)
        return self._checkpoint.read_tensor(name)

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self._names)


@dataclass(frozen=True, eq=False)
class HalfbyteContents:
    """Everything in a file.

    Attributes:
        linears: the quantized layers by name.
        passthrough: the other tensors, read when asked for.
        metadata: the file's own further metadata, as written.
    """

    linears: dict[str, QuantizedLinear]
    passthrough: Mapping[str, torch.Tensor]
    metadata: dict[str, str]


class HalfbyteFile:
    """An open halfbyte file or sharded directory, layer by layer; a context manager.

    Attributes:
        checkpoint: the safetensors below.
        layers: the record of every layer, in name order.
        origins: what converted layers came from, by layer name.
        passthrough_names: names of the tensors that belong to no layer.
        metadata: further metadata of the first shard.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path` and account for each of its tensors; CheckpointError if one is left over."""
        self.checkpoint = SafetensorsCheckpoint(path)
        try:
            self.layers: dict[str, LayerRecord] = {}
            self.origins: dict[str, OriginRecord] = {}
            others: list[str] = []
            for shard in self.checkpoint.shards.values():
                records = read_layer_records(shard)
                for name in records.keys() & self.layers.keys():
                    raise CheckpointError(f"{shard.path}: layer {quoted(name)} is in two shards")
                self.layers.update(records)
                origins = read_origin_records(shard.path, shard.metadata, records)
                self.origins.update(origins)
                others += take_out_origins(shard, split_tensor_names(shard, records), origins)
            self.layers = dict(sorted(self.layers.items()))
            self.passthrough_names = tuple(sorted(others))
            first = next(iter(self.checkpoint.shards.values()))
            self.metadata = {k: v for k, v in first.metadata.items() if k not in RESERVED_KEYS}
        except BaseException:
            self.checkpoint.close()
            raise

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.checkpoint.close()

    def read_linear(self, name: str) -> QuantizedLinear:
        """Return the layer called `name` with every value checked.

        Raises CheckpointError for an unknown name, or values that contradict the record.
        """
        if name not in self.layers:
            raise CheckpointError(
                f"{self.checkpoint.path}: has no layer {quoted(name)}; it holds "
                f"{len(self.layers)} others"
            )
        record = self.layers[name]
        tensors = {
            part: self.checkpoint.read_tensor(make_tensor_name(name, part)) for part in record.parts
        }
        return join_linear(f"{self.checkpoint.path}: {name}", record, tensors)

    def read_origin(self, name: str) -> LayerOrigin | None:
        """Return what layer `name` was converted from, None where it was quantized here."""
        record = self.origins.get(name)
        if record is None:
            return None
        parts = {
            part: self.checkpoint.read_tensor(make_origin_name(name, part)) for part in record.parts
        }
        return LayerOrigin(record.family, parts, record.facts)


def read_halfbyte_file(path: str | os.PathLike[str]) -> HalfbyteContents:
    """Return all layers of a halfbyte file or directory, checked, and the other tensors lazily.

    Raises:
        CheckpointError: not such a file, another version, a tensor missing, left over or with
            values that no sound quantizer writes; the message names it.
    """
    file = HalfbyteFile(path)
    linears = {name: file.read_linear(name) for name in file.layers}
    return HalfbyteContents(
        linears, LazyTensors(file.checkpoint, file.passthrough_names), file.metadata
    )


def write_halfbyte_file(
    path: str | os.PathLike[str],
    linears: Mapping[str, QuantizedLinear],
    passthrough: Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
    origins: Mapping[str, LayerOrigin] | None = None,
) -> None:
    """Write `linears`, their `origins` and the `passthrough` tensors to `path`, atomically.

    Raises:
        CheckpointError: a name that is taken twice or reserved, a value that the reader would
            refuse, or a place that cannot be written.
    """
    records: dict[str, LayerRecord] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, linear in linears.items():
        check_linear_values(f"{path}: {name}", linear)
        records[name], parts = split_linear(linear)
        tensors |= {make_tensor_name(name, part): value for part, value in parts.items()}
    kept = {name: make_origin_record(origin) for name, origin in (origins or {}).items()}
    for name, origin in (origins or {}).items():
        tensors |= {make_origin_name(name, part): value for part, value in origin.parts.items()}
    for name, value in (passthrough or {}).items():
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {quoted(name)} is also part of a layer")
        if find_layer_part(name, records) is not None:
            raise CheckpointError(
                f"{path}: tensor {quoted(name)} would be read as part of a layer; rename it"
            )
        tensors[name] = value
    write_safetensors(path, tensors, make_metadata(records, metadata, kept))


def make_tensor_name(layer: str, part: str) -> str:
    """Return the name of a layer's tensor in the file."""
    return f"{layer}.{part}"


def make_metadata(
    records: Mapping[str, LayerRecord],
    metadata: Mapping[str, str] | None = None,
    origins: Mapping[str, OriginRecord] | None = None,
) -> dict[str, str]:
    """Return the `__metadata__` of a file that holds `records`, with further entries added.

    Raises CheckpointError for a further entry under one of the format's own keys, and for the
    origin of a layer that is not there.
    """
    for name in origins or {}:
        if name not in records:
            raise CheckpointError(f"origin of {quoted(name)}: there is no such layer")
    for key in RESERVED_KEYS:
        if metadata and key in metadata:
            raise CheckpointError(f"metadata key {key!r} is reserved; remove it")
    layers = {name: records[name].to_json() for name in sorted(records)}
    text = json.dumps(layers, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    extra = {ORIGINS_KEY: encode_origins(origins)} if origins else {}
    return {**(metadata or {}), VERSION_KEY: FORMAT_VERSION, LAYERS_KEY: text, **extra}


def is_halfbyte_metadata(metadata: Mapping[str, str]) -> bool:
    """Return whether a safetensors file's metadata claims to be ours, of any version."""
    return VERSION_KEY in metadata or LAYERS_KEY in metadata


def read_layer_records(shard: SafetensorsFile) -> dict[str, LayerRecord]:
    """Return the checked layer records of one file; CheckpointError for another format."""
    version = shard.metadata.get(VERSION_KEY)
    if version is None:
        raise CheckpointError(
            f"{shard.path}: got a safetensors file without {VERSION_KEY}, wanted a halfbyte file; "
            "`halfbyte inspect` says what it is, `halfbyte quantize` makes one"
        )
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{shard.path}: got halfbyte format version {quoted(version)}, this version of "
            f"halfbyte reads {FORMAT_VERSION!r}; update halfbyte"
        )
    text = shard.metadata.get(LAYERS_KEY, "")
    table: Any = read_strict_json(f"{shard.path}: metadata {LAYERS_KEY}", text.encode())
    if not isinstance(table, dict):
        raise CheckpointError(f"{shard.path}: {LAYERS_KEY} is no JSON object; write the file again")
    return {
        name: parse_layer_record(f"{shard.path}: {name}", value) for name, value in table.items()
    }


def split_tensor_names(shard: SafetensorsFile, records: Mapping[str, LayerRecord]) -> list[str]:
    """Return the names of one file's tensors that belong to no layer.

    Raises:
        CheckpointError: a part of a record is missing, or a tensor bears the name of a layer's
            part that its record does not list.
    """
    owned = {
        make_tensor_name(name, part) for name, record in records.items() for part in record.parts
    }
    for name in sorted(owned):
        if name not in shard.tensors:
            raise CheckpointError(
                f"{shard.path}: tensor {quoted(name)} is missing, though the record of its layer "
                "lists it; write the file again"
            )
    others = [name for name in shard.tensors if name not in owned]
    for name in others:
        part = find_layer_part(name, records)
        if part is not None:
            raise CheckpointError(
                f"{shard.path}: tensor {quoted(name)} is left over: the record of its layer does "
                f"not list {part!r}; write the file again"
            )
    return others


def take_out_origins(
    shard: SafetensorsFile, names: list[str], origins: Mapping[str, OriginRecord]
) -> list[str]:
    """Return `names` without the tensors of `origins`; CheckpointError for one that is missing."""
    owned = {
        make_origin_name(layer, part) for layer, record in origins.items() for part in record.parts
    }
    missing = sorted(owned - set(names))
    if missing:
        raise CheckpointError(
            f"{shard.path}: tensor {quoted(missing[0])} is missing, though {ORIGINS_KEY} lists it; "
            "convert the file again"
        )
    return [name for name in names if name not in owned]


def find_layer_part(name: str, records: Mapping[str, LayerRecord]) -> str | None:
    """Return the part of a layer that tensor `name` claims to be, or None."""
    layer, _, part = name.rpartition(".")
    return part if layer in records and part in (*ALL_PARTS, "weight") else None
