"""What a checkpoint is, how large it is, what can run it and what it can be converted into.

Our own files are read whole, layer by layer, so that a damaged value is found; of other families
only headers are looked at. How a layer is read is said by the registry's families; `families` knows
looks alone, also of kinds that nothing here reads.
"""

import os
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from halfbyte.checkpoints.families import Family, recognise_layers
from halfbyte.checkpoints.open_source import ARCHIVE_MAGIC, OPENERS, open_source, read_head
from halfbyte.checkpoints.readings import FileReadings, Reading, list_readings
from halfbyte.checkpoints.registry import FAMILIES
from halfbyte.checkpoints.tensor_source import SafetensorsSource, TensorSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import (
    FORMAT_VERSION,
    HalfbyteFile,
    is_halfbyte_metadata,
    make_tensor_name,
)
from halfbyte.formats.halfbyte_layer import BLOCK_SCALE, CODES
from halfbyte.formats.safetensors_header import GGUF_MAGIC, TensorSpec
from halfbyte.formats.safetensors_reader import open_regular_file
from halfbyte.wording import counted

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
_BLACKWELL = "NVFP4 and MXFP4 W4A4; not yet run on silicon"
_HOPPER = "NVFP4, MXFP4, INT4 W4A4 exactly or with 8-bit activations; other formats in bf16"
# What each machine would run 4-bit weights with: the instruction or the emulation.
HARDWARE = (
    Hardware("CPU", "yes", "any x86-64 or Arm; compiled loops where built"),
    Hardware("B200, B300 (sm_100a, sm_103a)", _BLACKWELL, "tcgen05 block-scaled MMA"),
    Hardware("H100, H200 (sm_90a)", _HOPPER, "wgmma on weights widened in registers"),
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
        readings: the families that claim its layers.
        targets: family -> "yes", or why the layers cannot be converted into it.
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
    readings: tuple[Reading, ...] = ()
    targets: Mapping[str, str] = field(default_factory=dict)


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
        head = read_head(place)
        if head[: len(GGUF_MAGIC)] == GGUF_MAGIC:
            return _inspect_gguf(place)
        if head.startswith(ARCHIVE_MAGIC) and ARCHIVE_MAGIC in OPENERS:
            with closing(open_source(place)) as archive:
                return _inspect_others(archive, 1, place.stat().st_size)
    with closing(open_source(place)) as source:
        if is_halfbyte_metadata(source.metadata):
            return _inspect_halfbyte(place, is_quick)
        if isinstance(source, SafetensorsSource):
            checkpoint = source.checkpoint
            return _inspect_others(source, len(checkpoint.shards), checkpoint.num_bytes)
        files = [file for file in place.iterdir() if file.suffix == ".safetensors"]
        return _inspect_others(source, len(files), sum(file.stat().st_size for file in files))


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
        with closing(SafetensorsSource(path)) as source:
            found = list_readings(source)
        return Inspection(
            path=str(path),
            family="halfbyte",
            format_version=FORMAT_VERSION,
            num_files=len(file.checkpoint.shards),
            file_bytes=file.checkpoint.num_bytes,
            num_tensors=len(file.checkpoint.shard_of),
            notes=notes,
            readings=found.readings,
            targets=found.targets,
            hardware=HARDWARE,
            **_count_layers(layers, dict(sizes)),
        )


def _inspect_others(source: TensorSource, num_files: int, file_bytes: int) -> Inspection:
    looks = recognise_layers(source.specs)
    found = list_readings(source)
    sizes: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    owners = {
        name: (layer, part)
        for layer, parts in _list_claimed(source, found).items()
        for part, name in parts.items()
    }
    layer_bytes: Counter[str] = Counter()
    for name, spec in source.specs.items():
        layer, _, part = name.rpartition(".")
        if layer in looks:
            sizes[_kind_of_foreign_part(looks[layer], part)] += spec.num_bytes
        elif name in owners:
            layer, part = owners[name]
            sizes[_guess_kind(part, spec)] += spec.num_bytes
        else:
            sizes["passthrough"] += spec.num_bytes
        layer_bytes[layer] += spec.num_bytes
    layers = [
        _describe_layer(name, looks.get(name), source.specs, layer_bytes[name], found)
        for name in sorted({*looks, *found.layers})
    ]
    return Inspection(
        path=str(source.path),
        family=_name_family(looks, found),
        format_version=None,
        num_files=num_files,
        file_bytes=file_bytes,
        num_tensors=len(source.specs),
        notes=_make_notes(source, found, bool(looks)),
        readings=found.readings,
        targets=found.targets,
        hardware=_list_hardware(bool(layers), bool(found.readings)),
        **_count_layers(layers, dict(sizes)),
    )


def _list_claimed(source: TensorSource, found: FileReadings) -> dict[str, dict[str, str]]:
    """Return part -> tensor name of every layer, where one family reads the file."""
    if not found.layers:
        return {}
    (reading,) = (reading for reading in found.readings if reading.is_candidate)
    claim = FAMILIES[reading.family].claim(source)
    return {name: dict(plan.tensors) for name, plan in claim.layers.items()}


def _name_family(looks: Mapping[str, Family], found: FileReadings) -> str:
    names = sorted({family.name for family in looks.values()})
    titles = [FAMILIES[one.family].title for one in found.readings if one.is_candidate]
    return " + ".join(names) or " or ".join(titles) or "plain safetensors"


def _make_notes(source: TensorSource, found: FileReadings, is_known: bool) -> tuple[str, ...]:
    notes = list(found.notes)
    if found.layers and found.targets.get("halfbyte") == "yes":
        notes.append("to run it here: halfbyte convert FILE OUT --to halfbyte")
    elif is_known and not found.readings:
        notes.append("recognised by its tensor names; this version has no loader for it")
    if isinstance(source, SafetensorsSource) and source.checkpoint.unindexed:
        count = len(source.checkpoint.unindexed)
        notes.append(f"{counted(count, 'tensor is', 'tensors are')} not in the index")
    return tuple(notes)


def _describe_layer(
    name: str,
    family: Family | None,
    tensors: Mapping[str, TensorSpec],
    num_bytes: int,
    found: FileReadings,
) -> InspectedLayer:
    if name in found.layers:
        linear = found.layers[name].linear
        (reading,) = (reading for reading in found.readings if reading.is_candidate)
        return InspectedLayer(
            name,
            reading.family if family is None else family.name,
            linear.weight.format.name,
            None if linear.activation is None else linear.activation.name,
            linear.out_features,
            linear.in_features,
            linear.rank,
            num_bytes,
        )
    assert family is not None  # a layer has a look, or a reading
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


def _count_layers(layers: list[InspectedLayer], sizes: dict[str, int]) -> dict[str, Any]:
    """Return the fields of an inspection that follow from its layers and bytes."""
    weights = sum((layer.out_features or 0) * (layer.in_features or 0) for layer in layers)
    is_known = weights > 0 and all(layer.in_features is not None for layer in layers)
    stored = sum(layer.num_bytes for layer in layers)
    return {
        "formats": _count(layer.format for layer in layers),
        "ranks": _count(layer.rank for layer in layers),
        "bytes_by_kind": sizes,
        "num_weights": weights,
        "bits_per_weight": stored * 8 / weights if is_known else None,
        "layers": tuple(sorted(layers, key=lambda layer: layer.name)),
    }


def _inspect_gguf(path: Path) -> Inspection:
    fd = open_regular_file(path)
    with open(fd, "rb") as stream:
        head = stream.read(_GGUF_HEAD.size)
        file_bytes = os.fstat(stream.fileno()).st_size
    if len(head) < _GGUF_HEAD.size:
        raise CheckpointError(f"{path}: a GGUF file of {file_bytes} bytes; it is cut off")
    _, version, tensors, _ = _GGUF_HEAD.unpack(head)
    try:
        with closing(open_source(path)) as source:
            found = _inspect_others(source, 1, file_bytes)
    except CheckpointError as error:
        found = Inspection(
            path=str(path),
            family="GGUF",
            format_version=None,
            num_files=1,
            file_bytes=file_bytes,
            num_tensors=tensors,
            notes=(f"recognised by its first bytes, and not read: {error}",),
            hardware=_list_hardware(is_quantized=True, is_read=False),
            **_count_layers([], dict.fromkeys(KINDS, 0)),
        )
    return replace(found, family="GGUF", format_version=str(version))


def _list_hardware(is_quantized: bool, is_read: bool) -> tuple[Hardware, ...]:
    state = "quantize it first"
    if is_quantized:
        state = "convert it first" if is_read else "no loader in this version"
    return tuple(Hardware(row.machine, state, row.needs) for row in HARDWARE)


def _guess_kind(part: str, spec: TensorSpec) -> str:
    """Return the kind of a part that a family's own look does not tell."""
    if "lora" in part or "proj_" in part:
        return "low_rank"
    if "scale" in part and spec.num_elements > 1:
        return "block_scales"
    is_bytes = spec.dtype.bits <= 8 and len(spec.shape) >= 2
    return "codes" if is_bytes else "other_parts"


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
