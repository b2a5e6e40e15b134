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
from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.checkpoints.registry import Recognised
from halfbyte.checkpoints.tensor_source import MetaSource, TensorSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import quoted
from halfbyte.nn.load_fit import Piece, Pieces, check_linear, check_tensor
from halfbyte.nn.model_file import TIES_KEY
from halfbyte.nn.module_places import list_places
from halfbyte.nn.w4a4_linear import W4A4Linear

_MAX_NAMED = 8
_ARCHITECTURE_KEY = "general.architecture"  # of GGUF files, and of what is converted from them
# Architectures whose tensors are in a GGUF file as the model has them: llama.cpp's converter
# (convert_hf_to_gguf.py) renames those of Qwen, ComfyUI-GGUF's (tools/convert.py) not even that.
_UNCHANGED_ARCHITECTURES = frozenset(
    (
        *("unknown", "qwen2", "qwen3"),
        *("flux", "qwen_image", "lumina2", "sd1", "sdxl", "sd3", "aura", "hidream", "cosmos"),
        *("ltxv", "hyvid", "wan"),
    )
)


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
    _check_architecture(source)
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
        check_tensor(source, pieces, place, state[place])
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


def _check_architecture(source: TensorSource) -> None:
    """Check that nothing but names differs from the model's own checkpoint."""
    architecture = source.metadata.get(_ARCHITECTURE_KEY, "unknown")
    if architecture not in _UNCHANGED_ARCHITECTURES:
        raise CheckpointError(
            f"{source.path}: a GGUF file of architecture {quoted(architecture)}, whose tensors "
            "llama.cpp's converter may change beside renaming them (rows of q and k in another "
            "order, ones added to norms); a key map cannot undo that, the model would be silently "
            "wrong. Quantize the model's own checkpoint: halfbyte quantize"
        )


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
        check_linear(source, pieces, records, (place, module))
    return plan


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
