"""A quantized checkpoint of any family into a model: `halfbyte.load`.

Invariants: everything is planned and read before the model changes; what is in the file is used and
what is in the model is filled, or an error names it; loading again gives the same model.
"""

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from halfbyte.checkpoints.family import read_layer
from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.checkpoints.open_source import OpenSources
from halfbyte.checkpoints.registry import Recognised, recognise
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted
from halfbyte.nn.device_places import DevicePlaces, make_device_places
from halfbyte.nn.load_fit import Pieces, join_pieces
from halfbyte.nn.load_plan import LoadPlan, list_tensors, plan_load
from halfbyte.nn.module_places import replace_module
from halfbyte.nn.w4a4_linear import W4A4Linear, choose_part_dtype
from halfbyte.ops.backends import check_backend
from halfbyte.ops.checks import check_float_dtype

Model = TypeVar("Model", bound=nn.Module)
DeviceMap = Mapping[str, Any] | torch.device | str | int


def load(
    path: str | os.PathLike[str],
    model: Model,
    *,
    family: str | None = None,
    original: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    key_map: KeyMap | Mapping[str, str | None] | None = None,
    device_map: DeviceMap | None = None,
    backend: str = "auto",
) -> Model:
    """Put a quantized checkpoint of any known family into `model`, in place; return the model.

    Every nn.Linear that the file quantizes becomes a `W4A4Linear`; every other tensor of the file
    goes into the parameter or buffer of its name. Linears that the model fuses and the file keeps
    apart are fused, and the reverse (`checkpoints.fusion`). Nothing changes before all is read.

    Args:
        path: file or directory of any family in `checkpoints.registry`.
        model: built from its configuration, on any device; what it holds stays in memory until all
            is read, "meta" holds nothing.
        family: what the file is, where it could be read in several ways.
        original: the unquantized checkpoint, which decides that by trial.
        dtype: float16, bfloat16 or float32 for parameters and the 16/32-bit parts of 4-bit
            linears, converted once, here. None: the model's; beside a wider linear than 16 bits
            the parts stay as they are.
        key_map: how names of the file become the model's; see `checkpoints.key_map`.
        device_map: one device, or name -> device as accelerate writes it. None: where the model's
            tensors are, the CPU for "meta". Inputs are not moved: `accelerate.dispatch_model` does.
        backend: of the 4-bit linears, one of `ops.BACKENDS`.

    Raises:
        CheckpointError: no such file; a layer or tensor without a place, a parameter that nothing
            fills, a size, format, dtype or value that does not fit.
        UsageError: a family, backend, key map or device map that cannot be meant.
        FormatError: a dtype that is none of the three.
    """
    check_backend(backend)
    if dtype is not None:
        check_float_dtype("dtype", dtype)
    names = key_map if isinstance(key_map, KeyMap) else KeyMap(dict(key_map or {}))
    devices = make_device_places(model, device_map)
    with OpenSources() as sources:
        source = sources.open(Path(path))
        trial = None if original is None else sources.open(Path(original))
        found = recognise(source, family, trial)
        plan = plan_load(source, found, model, names)
        reader = _Reader(source, found, dtype, devices)
        linears = {
            place: reader.read_linear(place, pieces, model.get_submodule(place), backend)
            for place, pieces in plan.linears.items()
        }
        state = list_tensors(model)
        tensors = reader.read_tensors(plan, state)
    for place, linear in linears.items():
        replace_module(model, model.get_submodule(place), linear)
    for group, value in tensors.items():
        _fill(model, group, state[group[0]], value)
    _move_other_buffers(model, devices)
    return model


class _Reader:
    """Reads what a plan wants, converted and on its device."""

    def __init__(
        self,
        source: TensorSource,
        found: Recognised,
        dtype: torch.dtype | None,
        devices: DevicePlaces,
    ) -> None:
        self.source = source
        self.dtype = dtype
        self.devices = devices

        @lru_cache(maxsize=1)  # the parts of one fused layer come one after the other
        def read(name: str) -> QuantizedLinear:
            return read_layer(found.family, source, found.layers[name]).linear

        self._read: Callable[[str], QuantizedLinear] = read

    def read_linear(self, place: str, pieces: Pieces, old: nn.Module, backend: str) -> W4A4Linear:
        where = f"{self.source.path}: {quoted(place)}"
        record = join_pieces(where, pieces, self._read)
        dtype, current = self.dtype, torch.device("cpu")
        if isinstance(old, W4A4Linear):
            dtype, current = dtype or _read_part_dtype(old), old.weight_data.device
        elif isinstance(old, nn.Linear):
            dtype, current = dtype or choose_part_dtype(old), old.weight.device
        try:
            linear = W4A4Linear.from_record(record, dtype, backend=backend)
        except FormatError as error:
            raise CheckpointError(f"{where}: {error}; choose another dtype") from error
        return linear.to(self.devices.find(place, current))

    def read_tensors(
        self, plan: LoadPlan, state: Mapping[str, torch.Tensor]
    ) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the value of each tensor of the model by all its names."""
        values = {}
        for names in plan.ties.values():
            given = [name for name in names if name in plan.tensors]
            read = [self._read_tensor(name, plan.tensors[name], state[name]) for name in given]
            for name, value in zip(given[1:], read[1:], strict=True):
                if not torch.equal(value, read[0]):
                    raise CheckpointError(
                        f"{self.source.path}: {quoted(given[0])} and {quoted(name)} are one tensor "
                        "of the model and two in the file, with different values; build the model "
                        "with tie_word_embeddings as the file has it"
                    )
            values[names] = read[0]
        return values

    def _read_tensor(self, place: str, pieces: Pieces, old: torch.Tensor) -> torch.Tensor:
        parts = []
        for piece in pieces:
            part = self.source.read(piece.name)
            parts.append(part if piece.rows is None else part[slice(*piece.rows)])
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
        dtype = old.dtype
        if self.dtype is not None and isinstance(old, nn.Parameter) and dtype.is_floating_point:
            dtype = self.dtype
        converted = value.to(dtype)
        if converted.dtype != value.dtype and bool(
            (torch.isfinite(value) & ~torch.isfinite(converted)).any()
        ):
            raise CheckpointError(
                f"{self.source.path}: tensor {quoted(place)}: {value.dtype} up to "
                f"{value.abs().max().item():g} does not fit {dtype}; choose another dtype"
            )
        return converted.to(self.devices.find(place, old.device))


def _read_part_dtype(linear: W4A4Linear) -> torch.dtype | None:
    names = ("smooth", "lora_down", "bias")
    parts: tuple[torch.Tensor | None, ...] = tuple(getattr(linear, name) for name in names)
    return next((part.dtype for part in parts if part is not None), None)


def _fill(model: nn.Module, names: tuple[str, ...], old: torch.Tensor, value: torch.Tensor) -> None:
    """Put a value into the tensor of these names: in place where it can be, so that views stay."""
    if not old.is_meta and (old.dtype, old.device) == (value.dtype, value.device):
        with torch.no_grad():
            old.copy_(value)
        return
    tensor = value.contiguous()
    if isinstance(old, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=old.requires_grad)
    for name in names:
        _assign(model, name, tensor)


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(tensor, nn.Parameter):
        module._parameters[attribute] = tensor
    else:
        module._buffers[attribute] = tensor


def _move_other_buffers(model: nn.Module, devices: DevicePlaces) -> None:
    """Move the buffers that are in no state to where the map says."""
    if not devices.devices:
        return
    state = model.state_dict().keys()
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name not in state:
            _assign(model, name, buffer.to(devices.find(name, buffer.device)))
