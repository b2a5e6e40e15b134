"""What a checkpoint is, how large it is and what can run it, without loading it.

Our own files are read whole, layer by layer, so that a damaged value is found; of other families
only headers are looked at.
"""

import os
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from halfbyte.checkpoints.families import Family, recognise_layers
from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import (
    FORMAT_VERSION,
    HalfbyteFile,
    is_halfbyte_metadata,
    make_tensor_name,
)
from halfbyte.formats.halfbyte_layer import BLOCK_SCALE, CODES
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import GGUF_MAGIC, TensorEntry
from halfbyte.formats.safetensors_reader import open_regular_file

_GGUF_HEAD = struct.Struct("<4sIQQ")  # magic, version, tensors, key-value pairs (gguf spec, v2+)
_Key = TypeVar("_Key", str, int)
KINDS = ("codes", "block_scales", "low_rank", "other_parts", "passthrough")


@dataclass(frozen=True)
class Hardware:
    """One kind of machine and what it can do with a family in this version."""

    machine: str
    state: str
    needs: str


_NO_KERNEL = "no kernel in this version"
# What each machine would run 4-bit weights with: the instruction or the emulation.
HARDWARE = (
    Hardware("CPU", "yes", "any x86-64 or Arm; compiled loops where built"),
    Hardware("B200, B300 (sm_100a, sm_103a)", _NO_KERNEL, "tcgen05 block-scaled MMA"),
    Hardware("H100, H200 (sm_90a)", _NO_KERNEL, "wgmma on weights widened on the fly"),
    Hardware("RTX Blackwell (sm_120a, sm_121a)", _NO_KERNEL, "mma.sync block-scaled"),
    Hardware("Turing to Ada (sm_75 to sm_89)", _NO_KERNEL, "mma.sync INT4"),
)


@dataclass(frozen=True)
class InspectedLayer:
    """One quantized layer; sizes that a family does not say are None."""

    name: str
    family: str
    format: str
    activation: str | None
    out_features: int | None
    in_features: int | None
    rank: int
    num_bytes: int


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        path: as given.
        family: "halfbyte", a family's name, "plain safetensors", "GGUF", or several joined.
        format_version: of a halfbyte or GGUF file, else None.
        formats: number formats with their count of layers.
        ranks: low-rank widths with their count of layers.
        num_files: files read.
        file_bytes: their bytes.
        num_tensors: tensors in them.
        bytes_by_kind: bytes of each of `KINDS`.
        num_weights: logical weights of the quantized layers, where known.
        bits_per_weight: bits of everything stored for them over `num_weights`; None if unknown.
        hardware: what can run it in this version.
        layers: the quantized layers in name order.
        notes: what else a user should know.
    """

    path: str
    family: str
    format_version: str | None
    formats: dict[str, int]
    ranks: dict[int, int]
    num_files: int
    file_bytes: int
    num_tensors: int
    bytes_by_kind: dict[str, int]
    num_weights: int
    bits_per_weight: float | None
    hardware: tuple[Hardware, ...]
    layers: tuple[InspectedLayer, ...] = ()
    notes: tuple[str, ...] = field(default=())


def inspect_checkpoint(path: str | os.PathLike[str], *, is_quick: bool = False) -> Inspection:
    """Return what the file or directory `path` is.

    Args:
        path: a safetensors file, a directory of them, or a GGUF file.
        is_quick: look at the headers of a halfbyte file alone, not at its values.

    Raises:
        CheckpointError: anything else, or a damaged file; the message names file and tensor.
    """
    place = Path(path)
    if not place.is_dir():
        gguf = _inspect_gguf(place)
        if gguf is not None:
            return gguf
    with SafetensorsCheckpoint(place) as checkpoint:
        if any(is_halfbyte_metadata(shard.metadata) for shard in checkpoint.shards.values()):
            return _inspect_halfbyte(place, is_quick)
        return _inspect_others(checkpoint)


def _inspect_halfbyte(path: Path, is_quick: bool) -> Inspection:
    with HalfbyteFile(path) as file:
        sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        layers = []
        for name, record in file.layers.items():
            part_bytes = {
                part: file.checkpoint.entry(make_tensor_name(name, part)).num_bytes
                for part in record.parts
            }
            for part, count in part_bytes.items():
                sizes[_kind_of_part(part)] += count
            if not is_quick:
                file.read_linear(name)
            layers.append(
                InspectedLayer(
                    name,
                    "halfbyte",
                    record.format,
                    record.activation,
                    record.out_features,
                    record.in_features,
                    record.rank,
                    sum(part_bytes.values()),
                )
            )
        for name in file.passthrough_names:
            sizes["passthrough"] += file.checkpoint.entry(name).num_bytes
        notes = ("values not read (--quick)",) if is_quick else ("every value read and sound",)
        return _summarise(file.checkpoint, "halfbyte", layers, dict(sizes), notes)


def _inspect_others(checkpoint: SafetensorsCheckpoint) -> Inspection:
    tensors = {name: checkpoint.entry(name) for name in checkpoint.shard_of}
    families = recognise_layers(tensors)
    sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    layer_bytes: Counter[str] = Counter()
    for name, entry in tensors.items():
        layer, _, part = name.rpartition(".")
        family = families.get(layer)
        sizes[_kind_of_foreign_part(family, part)] += entry.num_bytes
        layer_bytes[layer] += entry.num_bytes
    layers = [
        _describe_layer(name, family, tensors, layer_bytes[name])
        for name, family in families.items()
    ]
    names = sorted({family.name for family in families.values()})
    notes = ["recognised by its tensor names; this version has no loader for it"] if names else []
    if checkpoint.unindexed:
        notes.append(f"{len(checkpoint.unindexed)} tensors are not in the index")
    family_name = " + ".join(names) or "plain safetensors"
    return _summarise(checkpoint, family_name, layers, dict(sizes), tuple(notes))


def _describe_layer(
    name: str, family: Family, tensors: dict[str, TensorEntry], num_bytes: int
) -> InspectedLayer:
    codes = tensors.get(make_tensor_name(name, family.codes))
    rows = columns = None
    if codes is not None and len(codes.shape) == 2 and "packed" not in family.format:
        rows, columns = codes.shape[0], codes.shape[1] * family.values_per_byte
    rank = 0
    if family.rank_axis is not None:
        part, axis = family.rank_axis
        shape = tensors[make_tensor_name(name, part)].shape
        rank = shape[axis] if len(shape) == 2 else 0
    return InspectedLayer(name, family.name, family.format, None, rows, columns, rank, num_bytes)


def _summarise(
    checkpoint: SafetensorsCheckpoint,
    family: str,
    layers: list[InspectedLayer],
    sizes: dict[str, int],
    notes: Iterable[str],
) -> Inspection:
    weights = sum((layer.out_features or 0) * (layer.in_features or 0) for layer in layers)
    is_known = weights > 0 and all(layer.in_features is not None for layer in layers)
    stored = sum(layer.num_bytes for layer in layers)
    return Inspection(
        path=str(checkpoint.path),
        family=family,
        format_version=FORMAT_VERSION if family == "halfbyte" else None,
        formats=_count(layer.format for layer in layers),
        ranks=_count(layer.rank for layer in layers),
        num_files=len(checkpoint.shards),
        file_bytes=checkpoint.num_bytes,
        num_tensors=len(checkpoint.shard_of),
        bytes_by_kind=sizes,
        num_weights=weights,
        bits_per_weight=stored * 8 / weights if is_known else None,
        hardware=_list_hardware(family),
        layers=tuple(sorted(layers, key=lambda layer: layer.name)),
        notes=tuple(notes),
    )


def _inspect_gguf(path: Path) -> Inspection | None:
    fd = open_regular_file(path)
    with open(fd, "rb") as stream:
        head = stream.read(_GGUF_HEAD.size)
        file_bytes = os.fstat(stream.fileno()).st_size
    if head[:4] != GGUF_MAGIC:
        return None
    if len(head) < _GGUF_HEAD.size:
        raise CheckpointError(f"{path}: a GGUF file of {file_bytes} bytes; it is cut off")
    _, version, tensors, _ = _GGUF_HEAD.unpack(head)
    return Inspection(
        path=str(path),
        family="GGUF",
        format_version=str(version),
        formats={},
        ranks={},
        num_files=1,
        file_bytes=file_bytes,
        num_tensors=tensors,
        bytes_by_kind=dict.fromkeys(KINDS, 0),
        num_weights=0,
        bits_per_weight=None,
        hardware=_list_hardware("GGUF"),
        notes=("recognised by its first bytes; this version has no loader for it",),
    )


def _list_hardware(family: str) -> tuple[Hardware, ...]:
    if family == "halfbyte":
        return HARDWARE
    state = "quantize it first" if family == "plain safetensors" else "no loader in this version"
    return tuple(Hardware(row.machine, state, row.needs) for row in HARDWARE)


def _kind_of_part(part: str) -> str:
    kinds = {CODES: "codes", BLOCK_SCALE: "block_scales"}
    return "low_rank" if part.startswith("lora_") else kinds.get(part, "other_parts")


def _kind_of_foreign_part(family: Family | None, part: str) -> str:
    if family is None:
        return "passthrough"
    if part == family.codes:
        return "codes"
    if part in family.block_scales:
        return "block_scales"
    return "low_rank" if part in family.low_rank else "other_parts"


def _count(values: Iterable[_Key]) -> dict[_Key, int]:
    return dict(sorted(Counter(values).items()))
