"""Where each part of a model goes: device maps as accelerate writes them, honoured or refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.errors import UsageError
from halfbyte.formats.safetensors_header import quoted

_MAX_NAMED = 8
_OFFLOADS = ("disk", "meta")  # accelerate's words for weights that are not in memory


@dataclass(frozen=True)
class DevicePlaces:
    """Devices by the first components of names; the longest that fits decides.

    Attributes:
        devices: name of a module, or of one tensor -> device; "" stands for the whole model.
            Empty: everything stays where it is.
    """

    devices: Mapping[str, torch.device]

    def find(self, name: str, current: torch.device) -> torch.device:
        """Return the device of tensor or module `name`; without a map, where it is now.

        Tensors without values (device "meta") come to the CPU.
        """
        place = name
        while True:
            if place in self.devices:
                return self.devices[place]
            if not place:
                return torch.device("cpu") if current.type == "meta" else current
            place = place.rpartition(".")[0]

    def covers(self, name: str) -> bool:
        """Return whether the map says where `name` goes."""
        components = name.split(".")
        heads = (".".join(components[:count]) for count in range(len(components) + 1))
        return any(head in self.devices for head in heads)


def make_device_places(
    model: nn.Module, device_map: Mapping[str, Any] | torch.device | str | int | None
) -> DevicePlaces:
    """Return where the parts of `model` go.

    Args:
        model: the names must be of its modules or tensors.
        device_map: None; one device for all; or name -> device as in `model.hf_device_map`, each an
            index of a CUDA device, a string or a torch.device.

    Raises:
        UsageError: a name that the model does not have, a part that no entry covers, a device that
            is not there, or one that means offloading; the message names the entry.
    """
    if device_map is None:
        return DevicePlaces({})
    entries = device_map if isinstance(device_map, Mapping) else {"": device_map}
    tensors = [
        *(name for name, _ in model.named_parameters()),
        *(name for name, _ in model.named_buffers()),
    ]
    known = {*(name for name, _ in model.named_modules(remove_duplicate=False)), *tensors}
    unknown = sorted(name for name in entries if name not in known)
    if unknown:
        raise UsageError(
            f"device map: the model has no {', '.join(map(quoted, unknown[:_MAX_NAMED]))}; make "
            "the map from this model (accelerate.infer_auto_device_map)"
        )
    places = DevicePlaces({name: _read_device(name, value) for name, value in entries.items()})
    bare = [name for name in tensors if not places.covers(name)]
    if bare:
        raise UsageError(
            f"device map: says nothing of {len(bare)} tensors, of which the first are "
            f"{', '.join(bare[:_MAX_NAMED])}; add their modules"
        )
    return places


def _read_device(name: str, value: Any) -> torch.device:
    where = f"device map {quoted(name)}: {quoted(value)}"
    if value in _OFFLOADS:
        raise UsageError(
            f"{where} means weights outside of memory, which 4-bit linears cannot be run from; "
            "name a device, 4 bits may fit where 16 did not"
        )
    if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
        raise UsageError(f"{where}, wanted an index, a string or a torch.device")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{where} is no device of this machine ({reason})") from error
    if device.type == "meta":
        return _read_device(name, "meta")
    return device
