"""Adapters that become part of a checkpoint while it is converted, without a model."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoints.layer_changes import BindChanges, ChangeLayer, LayerChanges
from halfbyte.errors import UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.side_files import Stamp, read_stamp
from halfbyte.nn.adapters.adapter_targets import Shapes, resolve_targets
from halfbyte.nn.adapters.live_adapters import merge_delta
from halfbyte.nn.adapters.read_adapter import list_adapter_files, read_adapter
from halfbyte.nn.low_rank_stack import LowRankDelta


@dataclass(frozen=True)
class AdapterMerge:
    """An adapter to merge.

    Attributes:
        path: a safetensors file or a PEFT directory.
        strength: finite; 0 checks the adapter and merges nothing.
    """

    path: Path
    strength: float = 1.0


def parse_merge(text: str) -> AdapterMerge:
    """Return what `ADAPTER[=STRENGTH]` means; UsageError for a strength that is no number.

    A text that names a file as a whole is that file.
    """
    path, equals, strength = text.rpartition("=")
    is_whole = os.path.lexists(text)
    if not equals or not path:
        return AdapterMerge(Path(text))
    if is_whole and os.path.lexists(path):
        raise UsageError(f"--merge {text}: both {text} and {path} are there; give {text}=1 or ./")
    if is_whole:
        return AdapterMerge(Path(text))
    try:
        value = float(strength)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"--merge {text}: strength {strength!r}, wanted a finite number")
    return AdapterMerge(Path(path), value)


def read_merges(merges: Sequence[AdapterMerge], ignore: Sequence[str] = ()) -> BindChanges | None:
    """Return what `ConvertRequest.merge` takes; None for no adapters.

    Files are read when the checkpoint's layers are known, and are held in memory then.

    Args:
        merges: in the order in which their ranks stand.
        ignore: patterns of tensor names that are left out.

    Raises:
        UsageError: an adapter that is named twice, patterns without an adapter.
    """
    if not merges:
        if ignore:
            raise UsageError("--merge-ignore: names tensors of an adapter, but no --merge is given")
        return None
    paths = [os.path.realpath(merge.path) for merge in merges]
    for merge, path in zip(merges, paths, strict=True):
        if paths.count(path) > 1:
            raise UsageError(f"--merge {merge.path}: given twice; give it once, strengths added")
    return _MergeFiles(tuple(merges), tuple(ignore))


@dataclass(frozen=True)
class _MergeFiles:
    merges: tuple[AdapterMerge, ...]
    ignore: tuple[str, ...]

    def __call__(self, shapes: Shapes) -> LayerChanges:
        """Return the changes; raises what `read_adapter` and `resolve_targets` raise."""
        stamps: dict[Path, Stamp] = {}
        settings: list[object] = [list(self.ignore)]
        by_layer: dict[str, list[tuple[LowRankDelta, float]]] = {}
        described = []
        for merge in self.merges:
            found = {path: read_stamp(path) for path in list_adapter_files(merge.path)}
            adapter = read_adapter(merge.path, ignore=self.ignore)
            deltas = resolve_targets(adapter, shapes, {})
            for name, delta in deltas.items():
                if merge.strength != 0:
                    by_layer.setdefault(name, []).append((delta, merge.strength))
            files = [(path.name, *stamp) for path, stamp in found.items()]
            settings.append([files, merge.strength])
            error = max(delta.error for delta in deltas.values())
            described.append(
                f"{merge.path} at strength {merge.strength:g}: {len(deltas)} layers, "
                f"largest error of a low-rank form {error:.2g}, {len(adapter.ignored)} tensors "
                "left out"
            )
            stamps |= found
        changes: Mapping[str, ChangeLayer] = {
            name: _Merged(tuple(deltas)) for name, deltas in by_layer.items()
        }
        return LayerChanges(changes, json.dumps(settings), stamps, tuple(described))


@dataclass(frozen=True)
class _Merged:
    deltas: tuple[tuple[LowRankDelta, float], ...]

    def __call__(self, linear: QuantizedLinear) -> QuantizedLinear:
        for delta, strength in self.deltas:
            linear = merge_delta(linear, delta, strength)
        return linear
