"""What loading a checkpoint into a model will do, known before a value is read.

Each quantized layer of the file gets its place among the model's linears, each other tensor its
place among the model's parameters and buffers: by its name, by its name in the key map, or as a
part of a fused linear (or as the fused linear whose parts the model keeps). What has no place, and
what would stay empty, is an error that names it; so is everything that does not fit.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from halfbyte.checkpoints.family import read_layer
from halfbyte.checkpoints.fusion import fuse_linears, take_linear_rows
from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.checkpoints.registry import Recognised
from halfbyte.checkpoints.tensor_source import MetaSource, TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted
from halfbyte.nn.model_file import TIES_KEY
from halfbyte.nn.module_places import list_places
from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.ops.linear_parts import make_spec

_MAX_NAMED = 8
_FLOATS = (*FLOAT_DTYPES, torch.float64)


@dataclass(frozen=True)
class Piece:
    """Rows of a layer or tensor of the file.

    Attributes:
        name: in the file.
        rows: first and one past the last; None for all.
    """

    name: str
    rows: tuple[int, int] | None = None


Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class LoadPlan:
    """The whole work.

    Attributes:
        linears: name of a linear of the model -> the layers of the file whose rows become it.
        tensors: name of a parameter or buffer -> the tensors of the file whose rows become it.
        ties: names of the model that are one tensor, those that stay; by the first of them.
    """

    linears: Mapping[str, Pieces]
    tensors: Mapping[str, Pieces]
    ties: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Entry:
    """A name of the file and where it wants to go: owner "a.q_proj", suffix ".weight" or ""."""

    name: str
    owner: str
    suffix: str

    @property
    def target(self) -> str:
        return self.owner + self.suffix


@dataclass
class _Assignment:
    """Places and what goes there; what found none."""

    path: object
    places: dict[str, dict[int, Piece]] = field(default_factory=dict)
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of a fused place
    homeless: list[_Entry] = field(default_factory=list)

    def put(self, place: str, index: int, piece: Piece) -> None:
        pieces = self.places.setdefault(place, {})
        if index in pieces:
            raise CheckpointError(
                f"{self.path}: {quoted(pieces[index].name)} and {quoted(piece.name)} are both "
                f"{quoted(place)} of the model; leave one out with a key map"
            )
        pieces[index] = piece

    def finish(self) -> dict[str, Pieces]:
        """Return the pieces of every place in order; CheckpointError where one lacks parts."""
        for place, parts in self.parts.items():
            found = self.places[place]
            missing = [part for index, part in enumerate(parts) if index not in found]
            if missing or len(found) != len(parts):
                given = ", ".join(quoted(piece.name) for piece in found.values())
                raise CheckpointError(
                    f"{self.path}: {quoted(place)} of the model is {' and '.join(parts)} in one, "
                    f"the file has {given} and no {' or '.join(missing)} of that kind"
                )
        return {
            place: tuple(pieces[index] for index in sorted(pieces))
            for place, pieces in self.places.items()
        }


def plan_load(
    source: TensorSource, found: Recognised, model: nn.Module, key_map: KeyMap
) -> LoadPlan:
    """Return what goes where.

    Raises:
        CheckpointError: a layer or tensor of the file without a place, a parameter or buffer that
            nothing fills, sizes, formats or dtypes that do not fit. The message names it.
        UsageError: a key map that cannot be meant.
    """
    ties = _read_ties(source, found)
    renamed = key_map.rename([*found.layers, *found.passthrough, *ties])
    linears = _plan_linears(source, found, model, (key_map, renamed))
    replaced = [model.get_submodule(place) for place in linears]
    prefixes = tuple(f"{name}." for module in replaced for name in list_places(model, module))
    state = {n: t for n, t in list_tensors(model).items() if not n.startswith(prefixes)}
    sources = {**{name: name for name in found.passthrough}, **ties}
    entries = _list_tensor_entries(sources, renamed)
    assignment = _assign(source.path, entries, key_map, state.__contains__, _read_rows(state))
    tensors = assignment.finish()
    groups = _group_ties(state)
    _check_nothing_left(source, found, assignment.homeless, (groups, tensors))
    for place, pieces in tensors.items():
        _check_tensor(source, pieces, place, state[place])
    _check_other_buffers(source, model, state, prefixes)
    return LoadPlan(linears, tensors, groups)


def list_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model under all their names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    kept = model.state_dict().keys()
    return {name: tensor for name, tensor in named if name in kept}


def _plan_linears(
    source: TensorSource,
    found: Recognised,
    model: nn.Module,
    naming: tuple[KeyMap, Mapping[str, str | None]],
) -> dict[str, Pieces]:
    key_map, renamed = naming
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = ((name, renamed[name]) for name in found.layers)
    entries = [_Entry(name, target, "") for name, target in wanted if target is not None]
    rows = {
        name: module.out_features
        for name, module in modules.items()
        if isinstance(module, nn.Linear | W4A4Linear)
    }
    assignment = _assign(source.path, entries, key_map, modules.__contains__, rows.__getitem__)
    if assignment.homeless:
        _refuse_homeless(source, assignment.homeless, "quantized layer(s)", modules)
    plan = assignment.finish()
    meta = MetaSource(source)
    seen: dict[int, str] = {}
    for place, pieces in plan.items():
        module = modules[place]
        if seen.setdefault(id(module), place) != place:
            raise CheckpointError(
                f"{source.path}: {quoted(seen[id(module)])} and {quoted(place)} are one module of "
                "the model and two layers of the file; leave one out with a key map"
            )
        records = {
            piece.name: read_layer(found.family, meta, found.layers[piece.name]).linear
            for piece in pieces
        }
        _check_linear(source, pieces, records, (place, module))
    return plan


def join_pieces(
    place: str, pieces: Pieces, read: Callable[[str], QuantizedLinear]
) -> QuantizedLinear:
    """Return the linear that the pieces make; CheckpointError where they cannot be fused."""
    parts = []
    for piece in pieces:
        linear = read(piece.name)
        parts.append(linear if piece.rows is None else take_linear_rows(linear, *piece.rows))
    try:
        return fuse_linears(parts)
    except FormatError as error:
        names = ", ".join(quoted(piece.name) for piece in pieces)
        raise CheckpointError(f"{place} of {names}: {error}") from error


def _assign(
    path: object,
    entries: Iterable[_Entry],
    key_map: KeyMap,
    has: Callable[[str], bool],
    rows: Callable[[str], int],
) -> _Assignment:
    """Return where each entry goes: its own name, a fused one, or its parts."""
    assignment = _Assignment(path)
    fused_names = key_map.list_fused()
    for entry in entries:
        if has(entry.target):
            assignment.put(entry.target, 0, Piece(entry.name))
        elif not _assign_fused(assignment, entry, fused_names, (has, rows)):
            assignment.homeless.append(entry)
    return assignment


def _assign_fused(
    assignment: _Assignment,
    entry: _Entry,
    fused_names: Iterable[tuple[str, tuple[str, ...]]],
    model: tuple[Callable[[str], bool], Callable[[str], int]],
) -> bool:
    has, rows = model
    parent, dot, leaf = entry.owner.rpartition(".")
    for fused, parts in fused_names:
        place = f"{parent}{dot}{fused}{entry.suffix}"
        if leaf in parts and has(place):
            assignment.put(place, parts.index(leaf), Piece(entry.name))
            assignment.parts[place] = parts
            return True
        places = [f"{parent}{dot}{part}{entry.suffix}" for part in parts]
        if leaf == fused and all(map(has, places)):
            start = 0
            for place in places:
                stop = start + rows(place)
                assignment.put(place, 0, Piece(entry.name, (start, stop)))
                start = stop
            return True
    return False


def _check_linear(
    source: TensorSource,
    pieces: Pieces,
    records: Mapping[str, QuantizedLinear],
    target: tuple[str, nn.Module],
) -> None:
    place, module = target
    where = f"{source.path}: {' + '.join(quoted(piece.name) for piece in pieces)}"
    if not isinstance(module, nn.Linear | W4A4Linear):
        raise CheckpointError(
            f"{where} is 4-bit in the file, {quoted(place)} of the model is a "
            f"{type(module).__name__}, wanted torch.nn.Linear"
        )
    if hasattr(module, "_hf_hook"):
        raise CheckpointError(
            f"{where}: {quoted(place)} of the model has a hook of accelerate, which a replaced "
            "linear would lose; load first, then call accelerate.dispatch_model"
        )
    _check_rows(where, pieces, records, place)
    record = join_pieces(f"{source.path}: {quoted(place)}", pieces, records.__getitem__)
    sizes = (record.in_features, record.out_features)
    wanted = (module.in_features, module.out_features)
    if sizes != wanted:
        raise CheckpointError(
            f"{where} is {sizes[0]} -> {sizes[1]} in the file, {quoted(place)} is "
            f"{wanted[0]} -> {wanted[1]} in the model; build it from the file's configuration"
        )
    if isinstance(module, W4A4Linear):
        spec = make_spec(record)
        if spec != module.spec:
            raise CheckpointError(
                f"{where} is {spec.encode()} in the file, {quoted(place)} is already "
                f"{module.spec.encode()} in the model; load into a model built from config"
            )
    elif module.bias is not None:
        bare = [piece.name for piece in pieces if records[piece.name].bias is None]
        if bare:
            raise CheckpointError(
                f"{where}: {quoted(place)} of the model has a bias, the file has none in "
                f"{', '.join(map(quoted, bare))}"
            )


def _check_rows(
    where: str, pieces: Pieces, records: Mapping[str, QuantizedLinear], place: str
) -> None:
    """Check that a layer that is split has rows for the piece."""
    for piece in pieces:
        have = records[piece.name].out_features
        if piece.rows is not None and piece.rows[1] > have:
            raise CheckpointError(
                f"{where} has {have} rows in the file, {quoted(place)} of the model would be its "
                f"rows {piece.rows[0]} to {piece.rows[1]}"
            )


def _list_tensor_entries(
    sources: Mapping[str, str], renamed: Mapping[str, str | None]
) -> list[_Entry]:
    entries = []
    for name, held in sources.items():
        target = renamed[name]
        if target is not None:
            owner, dot, leaf = target.rpartition(".")
            entries.append(_Entry(held, owner, dot + leaf))
    return entries


def _read_rows(state: Mapping[str, torch.Tensor]) -> Callable[[str], int]:
    def rows(name: str) -> int:
        return state[name].shape[0] if state[name].ndim else 0

    return rows


def _group_ties(state: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, ...]]:
    """Return the names of each tensor by its first name."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def _check_nothing_left(
    source: TensorSource,
    found: Recognised,
    homeless: list[_Entry],
    filling: tuple[Mapping[str, tuple[str, ...]], Mapping[str, Pieces]],
) -> None:
    groups, tensors = filling
    empty = [first for first, names in groups.items() if not any(n in tensors for n in names)]
    problems = []
    if empty:
        problems.append(
            f"nothing in the file fills {len(empty)} tensor(s) of the model: {_list(empty)}"
        )
    if homeless:
        left = [entry.name for entry in homeless]
        problems.append(f"{len(left)} tensor(s) of the file have no place: {_list(left)}")
    if problems:
        raise CheckpointError(
            f"{source.path}: read as {found.family.name}, {'; '.join(problems)}. Build the model "
            "from the configuration of the file, or say with key_map how names differ (None for a "
            "tensor that is not wanted)"
        )


def _refuse_homeless(
    source: TensorSource, homeless: list[_Entry], what: str, modules: Iterable[str]
) -> None:
    names = [entry.name for entry in homeless]
    targets = sorted(name for name in modules if name)
    raise CheckpointError(
        f"{source.path}: {len(names)} {what} have no place in the model: {_list(names)}. It has "
        f"modules like {_list(targets[-3:])}; say with key_map how names differ"
    )


def _check_tensor(source: TensorSource, pieces: Pieces, place: str, wanted: torch.Tensor) -> None:
    where = f"{source.path}: tensor {' + '.join(quoted(piece.name) for piece in pieces)}"
    specs = [source.specs[piece.name] for piece in pieces]
    shapes = []
    for piece, spec in zip(pieces, specs, strict=True):
        shape = tuple(spec.shape)
        if piece.rows is not None and shape:
            shape = (max(0, min(piece.rows[1], shape[0]) - piece.rows[0]), *shape[1:])
        shapes.append(shape)
    joined = shapes[0]
    if len(shapes) > 1 and all(shapes) and len({shape[1:] for shape in shapes}) == 1:
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    if joined != tuple(wanted.shape):
        raise CheckpointError(
            f"{where} is {' + '.join(str(list(spec.shape)) for spec in specs)} in the file, "
            f"{quoted(place)} is {list(wanted.shape)} in the model"
        )
    for spec in specs:
        dtype = spec.dtype.torch_dtype
        if dtype != wanted.dtype and not (dtype in _FLOATS and wanted.dtype in _FLOATS):
            raise CheckpointError(
                f"{where} is {spec.dtype.name} in the file, {quoted(place)} is {wanted.dtype} in "
                "the model; one cannot be converted to the other without knowing more"
            )


def _check_other_buffers(
    source: TensorSource,
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    prefixes: tuple[str, ...],
) -> None:
    """Check that no buffer stays without values: those that a state leaves out are built."""
    bare = [
        name
        for name, buffer in model.named_buffers()
        if buffer.is_meta and name not in state and not name.startswith(prefixes)
    ]
    if bare:
        raise CheckpointError(
            f"{source.path}: buffer(s) {_list(bare)} of the model are on the meta device and in no "
            "file, the model makes them itself; build it with its buffers on the CPU "
            "(accelerate.init_empty_weights) or build them again before loading"
        )


def _read_ties(source: TensorSource, found: Recognised) -> dict[str, str]:
    """Return name -> name of the tensor in the file that it shares, of `save_model`'s files."""
    text = source.metadata.get(TIES_KEY)
    if text is None:
        return {}
    try:
        ties = json.loads(text)
    except ValueError:
        ties = None
    names = set(found.passthrough)
    if not isinstance(ties, dict) or not all(
        isinstance(held, str) and held in names and name not in names for name, held in ties.items()
    ):
        raise CheckpointError(f"{source.path}: metadata {TIES_KEY!r} is not a map of tensor names")
    return ties


def _list(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(map(quoted, names[:_MAX_NAMED]))
    return shown if len(names) <= _MAX_NAMED else f"{shown} and {len(names) - _MAX_NAMED} more"
