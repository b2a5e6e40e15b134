"""A quantized model to and from a halfbyte file: 4-bit linears and every other tensor.

`halfbyte quantize` writes the same files, so that a quantized checkpoint is loaded into the model
class it was made for.
"""

import json
import os
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import HalfbyteFile, LazyTensors, write_halfbyte_file
from halfbyte.nn.module_places import list_places, replace_module
from halfbyte.nn.w4a4_linear import W4A4Linear, choose_part_dtype

TIES_KEY = "halfbyte_tied_tensors"
_MAX_NAMED = 8  # names that one error message lists


def save_model(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the model's 4-bit linears and all its other tensors to one file, atomically.

    Tensors that share their memory (a tied output head) are written once.

    Args:
        model: holds at least one `W4A4Linear`.
        path: the file; replaced if it exists.

    Raises:
        CheckpointError: no 4-bit linear in the model, a value that the reader would refuse, or a
            place that cannot be written.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, W4A4Linear)}
    if not linears:
        raise CheckpointError(f"{path}: the model holds no W4A4Linear; quantize it first")
    others, ties = _split_ties(model, _list_prefixes(model, linears.values()))
    metadata = {TIES_KEY: json.dumps(ties, sort_keys=True)} if ties else None
    records = {name: module.to_record() for name, module in linears.items()}
    write_halfbyte_file(path, records, others, metadata)


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Put a halfbyte file or sharded directory into `model`, in place; return the model.

    Each quantized layer of the file replaces the linear of that name; all other tensors are
    loaded into the parameters and buffers of their names. Everything is checked before anything
    changes.

    Args:
        model: of the class that the file was made from, quantized already or not; linears may
            be on the "meta" device.
        path: what `save_model` or `halfbyte quantize` wrote.

    Raises:
        CheckpointError: not such a file; a layer that is no linear of that size in the model; a
            tensor of another shape, missing or left over. The message names it.
    """
    with HalfbyteFile(path) as file:
        _check_layers(model, file, path)
        others: Mapping[str, torch.Tensor] = LazyTensors(file.checkpoint, file.passthrough_names)
        ties = _read_ties(file, path)
        _check_others(model, file, ties, path)
        records = {name: file.read_linear(name) for name in file.layers}
        state = {name: others[name] for name in others}
    for name, record in records.items():
        old = model.get_submodule(name)
        replace_module(model, old, W4A4Linear.from_record(record, choose_part_dtype(old)))
    for name, source in ties.items():
        state[name] = state[source]
    is_meta = any(tensor.is_meta for tensor in model.state_dict().values())
    model.load_state_dict(state, strict=False, assign=is_meta)
    return model


def _split_ties(
    model: nn.Module, prefixes: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors beside the 4-bit linears, and the names that share one of them."""
    others: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, value in model.state_dict().items():
        if name.startswith(prefixes) or not isinstance(value, torch.Tensor):
            continue
        key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() and key in seen:
            ties[name] = seen[key]
        else:
            seen[key] = name
            others[name] = value.detach().cpu().contiguous()
    return others, ties


def _check_layers(model: nn.Module, file: HalfbyteFile, path: str | os.PathLike[str]) -> None:
    modules = dict(model.named_modules())
    for name, record in file.layers.items():
        module = modules.get(name)
        wanted = (record.in_features, record.out_features)
        if not isinstance(module, nn.Linear | W4A4Linear):
            what = "nothing" if module is None else type(module).__name__
            raise CheckpointError(
                f"{path}: layer {name!r} is 4-bit in the file, the model has {what} there; load "
                "the file into the model class that it was made from"
            )
        if (module.in_features, module.out_features) != wanted:
            found = (module.in_features, module.out_features)
            raise CheckpointError(
                f"{path}: layer {name!r} is {wanted[0]} -> {wanted[1]} in the file and "
                f"{found[0]} -> {found[1]} in the model"
            )


def _check_others(
    model: nn.Module, file: HalfbyteFile, ties: Mapping[str, str], path: str | os.PathLike[str]
) -> None:
    state = model.state_dict()
    prefixes = _list_prefixes(model, [model.get_submodule(name) for name in file.layers])
    wanted = {name for name in state if not name.startswith(prefixes)}
    given = {*file.passthrough_names, *ties}
    for problem, names in (("is missing", wanted - given), ("is left over", given - wanted)):
        if names:
            listed = ", ".join(sorted(names)[:_MAX_NAMED])
            raise CheckpointError(
                f"{path}: {len(names)} tensor(s) of which the first {problem}: {listed}; load the "
                "file into the model class that it was made from"
            )
    for name in given:
        source = ties.get(name, name)
        shape = tuple(file.checkpoint.entry(source).shape)
        if shape != tuple(state[name].shape):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {shape} in the file and {tuple(state[name].shape)} "
                "in the model"
            )


def _read_ties(file: HalfbyteFile, path: str | os.PathLike[str]) -> dict[str, str]:
    text = file.metadata.get(TIES_KEY, "{}")
    try:
        ties = json.loads(text)
    except ValueError:
        ties = None
    names = set(file.passthrough_names)
    if not isinstance(ties, dict) or not all(
        isinstance(source, str) and source in names and name not in names
        for name, source in ties.items()
    ):
        raise CheckpointError(f"{path}: metadata {TIES_KEY!r} is not a map of tensor names")
    return ties


def _list_prefixes(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return "name." for every place of the modules; a shared linear has several."""
    return tuple(f"{name}." for module in modules for name in list_places(model, module))
