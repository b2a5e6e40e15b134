"""What a run over a checkpoint will do, known before it starts: units of work, files, layouts.

Everything follows from headers, rules and preset alone, so that every output byte has its place
before the first weight is read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath

import torch

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.dtypes import FLOAT_BY_NAME, FLOAT_DTYPES, get_scale_dtype
from halfbyte.formats.halfbyte_file import LAYERS_KEY, VERSION_KEY, make_metadata, make_tensor_name
from halfbyte.formats.halfbyte_layer import (
    ALL_PARTS,
    BLOCK_SCALE,
    CODES,
    GLOBAL_SCALE,
    NIBBLE_ORDER,
    SCALE_LAYOUT,
    LayerRecord,
)
from halfbyte.formats.output_files import OutputFile, WorkUnit, make_copy_units
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import (
    TensorSpec,
    make_layout,
    make_spec,
    quoted,
)
from halfbyte.svdquant.linear_rules import BIAS_SUFFIX, WEIGHT_SUFFIX, LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset

PROVENANCE_KEY = "halfbyte_provenance"


@dataclass(frozen=True)
class FilePlan:
    """The whole run.

    Attributes:
        layers: the planned record of every linear.
        units: in the order in which they are worked off.
        files: the output files, in name order.
        file_of: output file of every output tensor.
        index_name: name of the index to write, None for a single file.
    """

    layers: dict[str, LayerRecord]
    units: tuple[WorkUnit, ...]
    files: tuple[OutputFile, ...]
    file_of: dict[str, str]
    index_name: str | None

    @property
    def output_bytes(self) -> int:
        """Bytes of all output files."""
        return sum(file.layout.file_bytes for file in self.files)

    @property
    def input_bytes(self) -> int:
        """Bytes that all units read."""
        return sum(unit.num_bytes for unit in self.units)


def find_linears(checkpoint: SafetensorsCheckpoint, rules: LinearRules) -> dict[str, TensorSpec]:
    """Return the weights to quantize by layer name.

    Raises:
        UsageError: the include and exclude globs leave none.
        CheckpointError: the checkpoint has none.
    """
    siblings: dict[str, list[str]] = {}
    for name in checkpoint.shard_of:
        layer, _, part = name.rpartition(".")
        siblings.setdefault(layer, []).append(part)
    found: dict[str, TensorSpec] = {}
    for name in sorted(checkpoint.shard_of):
        entry = checkpoint.entry(name)
        layer = name.removesuffix(WEIGHT_SUFFIX)
        if rules.is_linear(entry, siblings.get(layer, ())):
            found[layer] = entry
    if not found:
        if rules.include or rules.exclude:
            raise UsageError(
                f"{checkpoint.path}: no linear is left by include {list(rules.include)} and "
                f"exclude {list(rules.exclude)}; globs are matched with layer names such as "
                f"{quoted(_find_example(checkpoint))}"
            )
        raise CheckpointError(
            f"{checkpoint.path}: none of its {len(checkpoint.shard_of)} tensors is a linear: a "
            f"2-D float tensor '<layer>.weight' of at least {rules.min_features} rows and columns"
        )
    return found


def _find_example(checkpoint: SafetensorsCheckpoint) -> str:
    """Return the name of some matrix as globs see it, of a linear where there is one."""
    entries = (checkpoint.entry(name) for name in sorted(checkpoint.shard_of))
    layers = [
        entry.name.removesuffix(WEIGHT_SUFFIX)
        for entry in entries
        if entry.name.endswith(WEIGHT_SUFFIX) and len(entry.shape) == 2
    ]
    taken = [layer for layer in layers if LinearRules().takes_name(layer)]
    return (taken or layers or ["model.layers.0.mlp.up_proj"])[0]


def make_plan(
    checkpoint: SafetensorsCheckpoint,
    rules: LinearRules,
    preset: SVDQuantPreset,
    output_name: str | None,
) -> FilePlan:
    """Return the plan of quantizing `checkpoint`, its metadata still without provenance.

    Args:
        checkpoint: the open input.
        rules: which tensors are linears.
        preset: weight-only or with a dynamic activation format.
        output_name: the one output file's name, or None for a directory that keeps shard names.
    """
    weights = find_linears(checkpoint, rules)
    records: dict[str, LayerRecord] = {}
    specs: dict[str, list[TensorSpec]] = {}  # by output file
    owned: set[str] = set()
    shard_of = checkpoint.shard_of
    groups = rules.group_linears({layer: spec.shape[1] for layer, spec in weights.items()})
    for group in groups:
        # one lora_down for all: no wider than the smallest of the group allows
        rank = min(preset.rank, *(min(weights[layer].shape) for layer in group))
        for layer in group:
            weight, bias_name = weights[layer], layer + BIAS_SUFFIX
            bias = checkpoint.entry(bias_name) if bias_name in shard_of else None
            records[layer], parts = plan_linear(weight, bias, preset, rank)
            specs.setdefault(output_name or shard_of[weight.name], []).extend(parts)
            owned |= {weight.name, bias_name}
    copies = [name for name in sorted(shard_of) if name not in owned]
    for name in copies:
        specs.setdefault(output_name or shard_of[name], []).append(checkpoint.entry(name))
    units = [
        WorkUnit(group[0], group, (), sum(weights[layer].num_bytes for layer in group))
        for group in groups
    ]
    units += make_copy_units({name: checkpoint.entry(name).num_bytes for name in copies})
    files = tuple(
        _make_file(name, specs[name], records, _kept_metadata(checkpoint, name))
        for name in sorted(specs)
    )
    file_of = {tensor: file.name for file in files for tensor in file.layout.tensors}
    index_name = None
    if output_name is None and (checkpoint.index_name or len(files) > 1):
        index_name = checkpoint.index_name or "model.safetensors.index.json"
    return FilePlan(records, tuple(units), files, file_of, index_name)


def add_provenance(plan: FilePlan, provenance: Mapping[str, object]) -> FilePlan:
    """Return `plan` with `provenance` in the metadata of every output file."""
    # in ASCII: a glob from the command line need not be valid Unicode, metadata must be
    text = json.dumps(provenance, separators=(",", ":"), sort_keys=True)
    files = []
    for file in plan.files:
        metadata = {**file.layout.metadata, PROVENANCE_KEY: text}
        layout, prefix = make_layout(file.layout.tensors.values(), metadata)
        files.append(replace(file, layout=layout, prefix=prefix))
    return replace(plan, files=tuple(files))


def plan_linear(
    weight: TensorSpec, bias: TensorSpec | None, preset: SVDQuantPreset, rank: int
) -> tuple[LayerRecord, list[TensorSpec]]:
    """Return the record and tensors that quantizing one linear without data gives.

    Raises:
        UsageError: the preset's activation needs a calibrated scale.
        CheckpointError: a bias that does not belong to the weight.
    """
    rows, columns = weight.shape
    layer = weight.name.removesuffix(WEIGHT_SUFFIX)
    block_format = get_format(preset.weight_format)
    activation = get_activation_format(preset.activation) if preset.activation else None
    if activation is not None and (activation.global_scale == "static" or activation.shift):
        raise UsageError(
            f"preset {preset.name!r}: activation {activation.name!r} needs calibration data; "
            "choose a weight-only preset or a dynamic activation"
        )
    blocks = block_format.num_blocks(columns)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        CODES: (torch.uint8, (rows, block_format.row_bytes(columns))),
        BLOCK_SCALE: (get_scale_dtype(block_format.scale), (rows, blocks)),
    }
    if block_format.has_global_scale:
        shapes[GLOBAL_SCALE] = (torch.float32, ())
    if rank:
        dtype = FLOAT_BY_NAME[preset.low_rank_dtype]
        shapes["lora_down"] = (dtype, (rank, columns))
        shapes["lora_up"] = (dtype, (rows, rank))
    if bias is not None:
        bias_dtype = bias.dtype.torch_dtype
        if bias.shape != (rows,) or bias_dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"tensor {quoted(bias.name)}: {bias.dtype.name} {list(bias.shape)}, wanted a float "
                f"vector of {rows} for {quoted(weight.name)}; exclude the layer or mend the file"
            )
        shapes["bias"] = (bias_dtype, (rows,))
    record = LayerRecord(
        format=block_format.name,
        activation=preset.activation,
        in_features=columns,
        out_features=rows,
        rank=rank,
        nibble_order=NIBBLE_ORDER,
        scale_layout=SCALE_LAYOUT,
        parts=tuple(part for part in ALL_PARTS if part in shapes),
    )
    specs = [
        make_spec(make_tensor_name(layer, part), dtype, shape)
        for part, (dtype, shape) in shapes.items()
    ]
    return record, specs


def describe_preset(preset: SVDQuantPreset, rules: LinearRules) -> dict[str, object]:
    """Return preset and rules as plain JSON values; equal settings give equal values."""
    settings = {"preset": asdict(preset), "rules": asdict(rules)}
    plain: dict[str, object] = json.loads(json.dumps(settings, default=str, sort_keys=True))
    return plain


def _make_file(
    name: str,
    specs: list[TensorSpec],
    records: Mapping[str, LayerRecord],
    metadata: Mapping[str, str],
) -> OutputFile:
    held = {spec.name for spec in specs}
    here = {
        layer: record for layer, record in records.items() if make_tensor_name(layer, CODES) in held
    }
    layout, prefix = make_layout(specs, make_metadata(here, metadata))
    return OutputFile(PurePath(name).name, layout, prefix)


def _kept_metadata(checkpoint: SafetensorsCheckpoint, name: str) -> dict[str, str]:
    shard = checkpoint.shards.get(name) or next(iter(checkpoint.shards.values()))
    dropped = (VERSION_KEY, LAYERS_KEY, PROVENANCE_KEY)
    return {key: value for key, value in shard.metadata.items() if key not in dropped}
