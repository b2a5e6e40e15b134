"""Which linear of a model each path of an adapter means, and the delta that it gets there.

A path is looked up as it stands, then without what tools put before it (`transformer.`,
`base_model.model.`), then with dots for underscores (kohya). Where the model has one linear for
several of the file (`qkv_proj` for `q_proj`, `k_proj`, `v_proj`), their ranks are stacked and their
`up` stand in a block diagonal; where the file has one for several of the model, `up` is cut. What
is found nowhere is an error that lists it: a target that is skipped is an image that is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from halfbyte.errors import CheckpointError
from halfbyte.nn.adapters.adapter_keys import FLAT_PREFIXES, PATH_PREFIXES, list_names
from halfbyte.nn.adapters.read_adapter import Adapter
from halfbyte.nn.low_rank_stack import LowRankDelta

Shapes = Mapping[str, tuple[int, int]]
Rename = Callable[[str], str] | None

# The last name of a fused linear, and of those whose rows it holds, in this order.
FUSED: Final = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("to_qkv", ("to_q", "to_k", "to_v")),
    ("to_kv", ("to_k", "to_v")),
    ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ("add_qkv_proj", ("add_q_proj", "add_k_proj", "add_v_proj")),
    ("query_key_value", ("query", "key", "value")),
    ("qkv", ("q", "k", "v")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
)


@dataclass(frozen=True)
class _Slot:
    """Where a name leads: whole linears, or one part of `num_parts` of a fused one."""

    places: tuple[str, ...]
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True)
class _Directory:
    """Slots by name, and by name with underscores for dots."""

    slots: dict[str, _Slot]
    flat: dict[str, list[str]] = field(default_factory=dict)


def resolve_targets(
    adapter: Adapter, shapes: Shapes, others: Mapping[str, str], rename: Rename = None
) -> dict[str, LowRankDelta]:
    """Return the delta of every linear that the adapter changes.

    Args:
        adapter: with paths as its file spells them.
        shapes: (N, K) of every linear that takes one, by name.
        others: kind of every other module, by name, for messages.
        rename: path of the file -> name in the model, asked first.

    Raises CheckpointError that lists the targets that the model lacks, those that two paths mean,
    and shapes that do not fit, with the wanted ones.
    """
    directory = _make_directory(shapes)
    missing: list[str] = []
    claims: dict[_Slot, str] = {}
    for path in adapter.deltas:
        slot = _find_slot(adapter.where, path if rename is None else rename(path), directory)
        if slot is None:
            missing.append(path)
        elif slot in claims:
            raise CheckpointError(
                f"{adapter.where}: {claims[slot]!r} and {path!r} both mean {slot.places[0]!r}; "
                "leave one out with ignore="
            )
        else:
            claims[slot] = path
    if missing:
        raise _describe_missing(adapter, missing, others)
    by_place: dict[str, dict[_Slot, str]] = {}
    for slot, path in claims.items():
        by_place.setdefault(slot.places[0], {})[slot] = path
    resolved: dict[str, LowRankDelta] = {}
    for place, slots in by_place.items():
        for name, delta in _make_deltas(adapter, slots, shapes).items():
            if name in resolved:
                raise CheckpointError(f"{adapter.where}: two targets mean {name!r}, near {place!r}")
            resolved[name] = delta
    return resolved


def _make_directory(shapes: Shapes) -> _Directory:
    slots = {name: _Slot((name,)) for name in shapes}
    for name in shapes:
        parent, dot, leaf = name.rpartition(".")
        for fused, parts in FUSED:
            if leaf == fused:
                for index, part in enumerate(parts):
                    slots.setdefault(f"{parent}{dot}{part}", _Slot((name,), index, len(parts)))
            places = tuple(f"{parent}{dot}{part}" for part in parts)
            if leaf == parts[0] and all(place in shapes for place in places):
                slots.setdefault(f"{parent}{dot}{fused}", _Slot(places))
        if leaf == "0" and parent.endswith("to_out"):  # a list in diffusers, not in its files
            slots.setdefault(parent, _Slot((name,)))
    directory = _Directory(slots)
    for name in slots:
        directory.flat.setdefault(name.replace(".", "_"), []).append(name)
    return directory


def _find_slot(where: str, path: str, directory: _Directory) -> _Slot | None:
    names = {path}
    rest = path
    while True:
        prefix = next((one for one in PATH_PREFIXES if rest.startswith(one)), None)
        if prefix is None:
            break
        rest = rest.removeprefix(prefix)
        names.add(rest)
    prefix = next((one for one in FLAT_PREFIXES if path.startswith(one)), None)
    if prefix is not None:
        rest = path.removeprefix(prefix)
        names.add(rest)
        names.update(directory.flat.get(rest, ()))
    found = {directory.slots[name]: name for name in sorted(names) if name in directory.slots}
    if len(found) > 1:
        raise CheckpointError(
            f"{where}: {path!r} may mean {list_names(found.values())}; say which with rename="
        )
    return next(iter(found), None)


def _describe_missing(
    adapter: Adapter, missing: Sequence[str], others: Mapping[str, str]
) -> CheckpointError:
    flat = {name.replace(".", "_"): kind for name, kind in others.items()}
    known: list[str] = []
    for path in missing:
        rest = path
        for one in (*FLAT_PREFIXES, *PATH_PREFIXES):
            rest = rest.removeprefix(one)
        kind = others.get(path) or others.get(rest) or flat.get(rest.replace(".", "_"))
        known.append(f"{path} (a {kind})" if kind else path)
    return CheckpointError(
        f"{adapter.where}: {len(missing)} of {len(adapter.deltas)} target(s) are no linear of this "
        f"model: {list_names(known)}; load it into the model that it was trained for, give "
        "rename=, or leave them out knowingly with ignore="
    )


def _make_deltas(
    adapter: Adapter, slots: Mapping[_Slot, str], shapes: Shapes
) -> dict[str, LowRankDelta]:
    """Return the deltas of linears that the slots of one first place lead to."""
    first = next(iter(slots))
    if first.num_parts > 1 and all(slot.num_parts == first.num_parts for slot in slots):
        parts = {slot.part: path for slot, path in slots.items()}
        place = first.places[0]
        return {place: _fuse(adapter, place, parts, (first.num_parts, shapes[place]))}
    if len(slots) > 1:
        raise CheckpointError(
            f"{adapter.where}: {list_names(slots.values())} all mean {first.places[0]!r}, as a "
            "whole and in part; leave some out with ignore="
        )
    path = slots[first]
    delta = adapter.deltas[path]
    n = sum(shapes[place][0] for place in first.places)
    columns = {shapes[place][1] for place in first.places}
    if delta.shape[0] != n or {delta.shape[1]} != columns:
        raise _describe_shape(adapter, path, (" + ".join(first.places), (n, max(columns))))
    rows = [shapes[place][0] for place in first.places]
    ups = torch.split(delta.up, rows) if len(rows) > 1 else (delta.up,)
    # A bound for each part of one that was shortened: its error is told for the whole.
    return {
        place: LowRankDelta(delta.down, up, delta.scale, delta.error)
        for place, up in zip(first.places, ups, strict=True)
    }


def _describe_shape(
    adapter: Adapter, path: str, wanted: tuple[str, tuple[int, int]]
) -> CheckpointError:
    delta = adapter.deltas[path]
    place, (n, k) = wanted
    return CheckpointError(
        f"{adapter.where}: {list_names(adapter.keys[path])} change a weight of "
        f"{list(delta.shape)}; wanted [{n}, {k}], which {place!r} is: down [R, {k}], up [{n}, R]"
    )


def _fuse(
    adapter: Adapter, place: str, parts: Mapping[int, str], into: tuple[int, tuple[int, int]]
) -> LowRankDelta:
    """Return one delta of several: ranks below each other, `up` in a block diagonal."""
    num_parts, (n, k) = into
    deltas = {index: adapter.deltas[path] for index, path in sorted(parts.items())}
    for index, delta in deltas.items():
        if delta.shape[1] != k:
            raise _describe_shape(adapter, parts[index], (place, (delta.shape[0], k)))
    rows = _find_rows({index: delta.shape[0] for index, delta in deltas.items()}, num_parts, n)
    if rows is None:
        found = ", ".join(f"{parts[index]!r} {delta.shape[0]}" for index, delta in deltas.items())
        raise CheckpointError(
            f"{adapter.where}: {place!r} has {n} rows for {num_parts} parts; the rows of {found} "
            "do not add up to them"
        )
    scales = {delta.scale for delta in deltas.values()}
    scale = scales.pop() if len(scales) == 1 else None
    up = torch.zeros(n, sum(delta.rank for delta in deltas.values()))
    first_rank = 0
    for index, delta in deltas.items():
        start = sum(rows[:index])
        block = up[start : start + rows[index], first_rank : first_rank + delta.rank]
        block.copy_(delta.up.float() * (delta.scale if scale is None else 1.0))
        first_rank += delta.rank
    down = torch.cat([delta.down.float() for delta in deltas.values()])
    error = max(delta.error for delta in deltas.values())
    return LowRankDelta(down, up, 1.0 if scale is None else scale, error)


def _find_rows(known: Mapping[int, int], num_parts: int, n: int) -> list[int] | None:
    """Return the rows of every part; of q, k, v the last two are equal. None: they do not fit."""
    rows = dict(known)
    if num_parts == 3:
        for one, other in ((1, 2), (2, 1)):
            if one in rows:
                rows.setdefault(other, rows[one])
        if 1 not in rows and (n - rows[0]) % 2 == 0:
            rows[1] = rows[2] = (n - rows[0]) // 2
    absent = [index for index in range(num_parts) if index not in rows]
    if len(absent) == 1:
        rows[absent[0]] = n - sum(rows.values())
    found = [rows.get(index, 0) for index in range(num_parts)]
    return found if sum(found) == n and min(found) > 0 else None
