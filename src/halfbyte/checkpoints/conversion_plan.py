"""What converting a checkpoint will do, known before a value is read.

Every layer is decoded and encoded once without values, so that each output tensor has its name,
dtype, shape and place, and a layer that the target cannot hold is an error before any work.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halfbyte.checkpoints.carried_files import QUANTIZATION_KEYS, choose_files, read_stamps
from halfbyte.checkpoints.family import Family, Layer, Parts, SideContent, write_layer
from halfbyte.checkpoints.layer_changes import LayerReader
from halfbyte.checkpoints.registry import Recognised, list_reading_metadata
from halfbyte.checkpoints.tensor_source import MetaSource, SafetensorsSource, TensorSource
from halfbyte.errors import CheckpointError, FormatError, UsageError
from halfbyte.formats.gguf_header import make_gguf_layout
from halfbyte.formats.halfbyte_file import RESERVED_KEYS
from halfbyte.formats.output_files import OutputFile, WorkUnit, make_copy_units
from halfbyte.formats.safetensors_header import (
    SafetensorsHeader,
    TensorSpec,
    make_layout,
    make_spec,
    quoted,
)
from halfbyte.formats.side_files import Stamp
from halfbyte.wording import counted

FILE_SUFFIXES: Final = (".safetensors", ".sft", ".gguf")  # of a target that is one file
DEFAULT_SHARD: Final = "model.safetensors"
UNIT_BYTES: Final = 64 * 2**20  # layers are finished, and put on the disk, in batches of this size
MAX_NAMED: Final = 3  # layers in an error message
MakeLayout = Callable[[Iterable[TensorSpec], Mapping[str, str]], tuple[SafetensorsHeader, bytes]]
# Container -> what lays its files out. A family in a container that is not listed is not written.
LAYOUTS: dict[str, MakeLayout] = {"safetensors": make_layout, "gguf": make_gguf_layout}


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of the output.

    Attributes:
        tensors: the target's part name -> name and what it is.
        shard: output file that holds them.
    """

    tensors: Mapping[str, TensorSpec]
    shard: str


@dataclass(frozen=True)
class ConversionPlan:
    """The whole run.

    Attributes:
        target: the family that is written.
        layers: by name.
        units: in the order in which they are worked off.
        files: the output files, in name order.
        is_directory: whether the output is a directory.
        index_name: name of the index to write, None without one.
        side_files: bytes of the files that the target family makes beside its tensors.
        copied_files: names of the source's files that go along.
        not_copied: names of those that do not.
        stamps: of every file of the source that was looked at.
    """

    target: Family
    layers: Mapping[str, PlannedLayer]
    units: tuple[WorkUnit, ...]
    files: tuple[OutputFile, ...]
    is_directory: bool
    index_name: str | None
    side_files: Mapping[str, bytes]
    copied_files: tuple[str, ...]
    not_copied: tuple[str, ...]
    stamps: Mapping[Path, Stamp]

    @property
    def output_bytes(self) -> int:
        """Bytes of all output files."""
        return sum(file.layout.file_bytes for file in self.files)

    @property
    def input_bytes(self) -> int:
        """Bytes that all units read."""
        return sum(unit.num_bytes for unit in self.units)

    def tensors_of(self, unit: WorkUnit) -> list[str]:
        """Return the names of the output tensors that a unit fills."""
        specs = [spec for layer in unit.layers for spec in self.layers[layer].tensors.values()]
        return [*(spec.name for spec in specs), *unit.copies]

    def make_fingerprint(self, reader: LayerReader) -> str:
        """Return what two runs have in common that may continue each other, as JSON."""
        hasher = hashlib.sha256()
        for file in self.files:
            hasher.update(f"{file.name}\0".encode(errors="surrogateescape") + file.prefix)
        for name, data in sorted(self.side_files.items()):
            hasher.update(f"{name}\0".encode() + data)
        stamps = sorted((path.name, *stamp) for path, stamp in self.stamps.items())
        settings = {"from": reader.found.family.name, "to": self.target.name, "stamps": stamps}
        if reader.is_changing:
            settings["merged"] = reader.changes.fingerprint
        return json.dumps({**settings, "headers": hasher.hexdigest()}, sort_keys=True)


def plan_conversion(source: TensorSource, reader: LayerReader, place: Path) -> ConversionPlan:
    """Return the plan of writing `source`, as `reader` reads it, at `place`.

    Raises:
        UsageError: a place that cannot hold what the family writes.
        CheckpointError: a layer that the family cannot hold, or a tensor name that is taken twice.
    """
    found, target = reader.found, reader.target
    if not target.can_write or target.container not in LAYOUTS:
        raise UsageError(f"{target.name} is read, not written; choose another --to")
    check_suffix(target, place)
    is_own = found.family.name == target.name
    layers = plan_layers(source, reader)
    view = hide_records(source, reader.is_changing)
    content = target.make_side_content(layers, view)
    is_directory = decide_directory(source, place, content)
    shards = dict.fromkeys(source.specs, DEFAULT_SHARD if is_directory else place.name)
    if is_directory and isinstance(source, SafetensorsSource) and source.checkpoint.is_directory:
        shards = dict(source.checkpoint.shard_of)
    planned = {
        name: PlannedLayer(
            _name_tensors(target, name, write_layer(target, layer)),
            _find_shard(found, name, source, shards),
        )
        for name, layer in layers.items()
    }
    files = _lay_out(source, found, planned, shards, (reader, layers))
    carried = choose_files(source, content, keeps_all=is_own or target.keeps_origins)
    return ConversionPlan(
        target=target,
        layers=planned,
        units=_make_units(source, found),
        files=files,
        is_directory=is_directory,
        index_name=_name_index(source, files) if is_directory else None,
        side_files=carried.made if is_directory else {},
        copied_files=carried.copied if is_directory else (),
        not_copied=carried.left if is_directory else (),
        stamps={
            **read_stamps(source, carried.copied if is_directory else ()),
            **reader.changes.stamps,
        },
    )


def plan_layers(source: TensorSource, reader: LayerReader) -> dict[str, Layer]:
    """Return every layer without values; CheckpointError names those that `target` cannot hold."""
    target = reader.target
    meta = MetaSource(source)
    layers: dict[str, Layer] = {}
    obstacles: dict[str, str] = {}
    for name in reader.found.layers:
        layer = reader.read(meta, name)
        problem = find_obstacle(target, layer, reader.is_changing)
        if problem is not None:
            obstacles[name] = problem
        layers[name] = layer
    if obstacles:
        shown = "; ".join(f"{quoted(name)}: {text}" for name, text in obstacles.items())
        if len(obstacles) > MAX_NAMED:
            first = list(obstacles.items())[:MAX_NAMED]
            shown = "; ".join(f"{quoted(name)}: {text}" for name, text in first)
            shown += f"; and {counted(len(obstacles) - MAX_NAMED, 'more layer')}"
        raise CheckpointError(f"{source.path}: cannot be written as {target.name}: {shown}")
    return layers


def find_obstacle(target: Family, layer: Layer, is_changed: bool = False) -> str | None:
    """Return why `target` cannot hold a layer; its own layers always fit, unless changed."""
    if not is_changed and layer.origin is not None and layer.origin.family == target.name:
        return None
    try:
        problem = target.find_obstacle(layer.linear)
        if problem is None:
            target.make_facts(layer.name, layer.linear)
    except (CheckpointError, FormatError) as error:
        return str(error)
    return problem


def decide_directory(source: TensorSource, place: Path, content: SideContent) -> bool:
    """Return whether the output at `place` is a directory; UsageError where it must and is not."""
    is_file = place.suffix in FILE_SUFFIXES
    if is_file and content.files:
        names = ", ".join(sorted(content.files))
        raise UsageError(
            f"{place}: the family says in {names} beside its tensors what they mean; give a "
            "directory as OUT (a name without .safetensors)"
        )
    return not is_file and (bool(content.files) or source.path.is_dir() or place.is_dir())


def hide_records(source: TensorSource, is_changed: bool = False) -> TensorSource:
    """Return `source` without tensors' values and without what our own format says of layers.

    Of layers that are changed on the way, what other formats say (their rank) is hidden too.
    """
    hidden = (*RESERVED_KEYS, *QUANTIZATION_KEYS) if is_changed else RESERVED_KEYS
    view = MetaSource(source)
    view.metadata = {k: v for k, v in source.metadata.items() if k not in hidden}
    return view


def check_suffix(target: Family, place: Path) -> None:
    """Raise UsageError for a file name that says another container than the family's."""
    is_gguf = target.container == "gguf"
    if is_gguf != (place.suffix == ".gguf"):
        wanted = "a name that ends in .gguf" if is_gguf else "another name"
        raise UsageError(f"{place}: {target.name} is in {target.container} files; give {wanted}")


def _name_tensors(target: Family, layer: str, parts: Parts) -> dict[str, TensorSpec]:
    return {
        part: make_spec(target.tensor_name(layer, part), tensor.dtype, tensor.shape)
        for part, tensor in parts.items()
    }


def _find_shard(
    found: Recognised, layer: str, source: TensorSource, shards: Mapping[str, str]
) -> str:
    """Return the output file of a layer: where its largest tensor lies."""
    names = found.layers[layer].tensors.values()
    return shards[max(names, key=lambda name: (source.specs[name].num_bytes, name))]


def _lay_out(
    source: TensorSource,
    found: Recognised,
    planned: Mapping[str, PlannedLayer],
    shards: Mapping[str, str],
    writing: tuple[LayerReader, Mapping[str, Layer]],
) -> tuple[OutputFile, ...]:
    reader, layers = writing
    target = reader.target
    specs: dict[str, dict[str, TensorSpec]] = {}
    owners: dict[str, str] = {}

    def add(spec: TensorSpec, shard: str, owner: str) -> None:
        if owners.setdefault(spec.name, owner) != owner:
            raise CheckpointError(
                f"{source.path}: {owner} and {owners[spec.name]} would both be tensor "
                f"{quoted(spec.name)} of the output; rename one in the source"
            )
        specs.setdefault(shard, {})[spec.name] = spec

    for name, layer in planned.items():
        for part, spec in layer.tensors.items():
            add(spec, layer.shard, f"part {part!r} of layer {quoted(name)}")
    for name in found.passthrough:
        add(source.specs[name], shards[name], f"tensor {quoted(name)}")
    kept = _keep_metadata(source, reader)
    view = hide_records(source, reader.is_changing)
    files = []
    for shard, held in sorted(specs.items()):
        here = {name: layer for name, layer in layers.items() if planned[name].shard == shard}
        listed = here if target.lists_layers else layers
        own = target.make_side_content(listed, view).metadata
        layout, prefix = LAYOUTS[target.container](held.values(), {**kept, **own})
        files.append(OutputFile(shard, layout, prefix))
    return tuple(files)


def _keep_metadata(source: TensorSource, reader: LayerReader) -> dict[str, str]:
    """Return what else the source's header says; not how another family's tensors are read.

    Our own format keeps everything, for the way back.
    """
    origin, target = reader.found.family, reader.target
    dropped: tuple[str, ...] = RESERVED_KEYS
    if reader.is_changing:
        dropped = (*RESERVED_KEYS, *QUANTIZATION_KEYS)
    if target.name != origin.name and not target.keeps_origins:
        dropped = (*RESERVED_KEYS, *QUANTIZATION_KEYS, *list_reading_metadata(source))
    return {key: value for key, value in source.metadata.items() if key not in dropped}


def _name_index(source: TensorSource, files: tuple[OutputFile, ...]) -> str | None:
    if isinstance(source, SafetensorsSource) and source.checkpoint.index_name:
        return source.checkpoint.index_name
    return "model.safetensors.index.json" if len(files) > 1 else None


def _make_units(source: TensorSource, found: Recognised) -> tuple[WorkUnit, ...]:
    units: list[WorkUnit] = []
    batch: list[str] = []
    size = 0
    for name, plan in found.layers.items():
        num_bytes = sum(source.specs[tensor].num_bytes for tensor in plan.tensors.values())
        if batch and size + num_bytes > UNIT_BYTES:
            units.append(WorkUnit(f"layers {len(units)}", tuple(batch), (), size))
            batch, size = [], 0
        batch.append(name)
        size += num_bytes
    if batch:
        units.append(WorkUnit(f"layers {len(units)}", tuple(batch), (), size))
    copies = {name: source.specs[name].num_bytes for name in found.passthrough}
    return (*units, *make_copy_units(copies))


def describe_passthrough(source: TensorSource, found: Recognised) -> dict[str, Any]:
    """Return count and bytes of the tensors that are copied as they are."""
    return {
        "tensors": len(found.passthrough),
        "bytes": sum(source.specs[name].num_bytes for name in found.passthrough),
    }
