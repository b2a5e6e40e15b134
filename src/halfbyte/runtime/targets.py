"""Which PTX target a GPU gets, and which targets a user may name."""

import functools
import re
from typing import TYPE_CHECKING

from halfbyte.arch.gpus import GPUS
from halfbyte.errors import UnsupportedHardwareError, UsageError, printable
from halfbyte.virtual.driver import session

if TYPE_CHECKING:
    import torch

# Instructions that the kernels use (block-scaled tcgen05.mma, wgmma, mma with block scales) exist
# only in targets with the suffix "a": PTX ISA, "Target ISA Notes" of each.
_TARGET_BY_CAPABILITY = {gpu.capability: gpu.target for gpu in GPUS.values()}
TARGETS = tuple(_TARGET_BY_CAPABILITY.values())
_TARGET = re.compile(r"sm_(\d+)([af]?)")


def choose_target(capability: tuple[int, int], device_name: str) -> str:
    """Return the PTX target of a GPU by its compute capability, e.g. (10, 3) -> "sm_103a".

    Raises:
        UnsupportedHardwareError: no kernel is written for it; names the device and what runs.
    """
    target = _TARGET_BY_CAPABILITY.get(capability)
    if target is None:
        known = ", ".join(
            f"{major}.{minor} ({target})"
            for (major, minor), target in _TARGET_BY_CAPABILITY.items()
        )
        raise UnsupportedHardwareError(
            f"{printable(device_name)} has compute capability {capability[0]}.{capability[1]}; "
            f"kernels are written for {known}. Move the model to the CPU: backend='cpu' runs "
            "every format there"
        )
    return target


def read_device_target(device: "torch.device | str | int | None" = None) -> str:
    """Return the PTX target of a CUDA device of torch (None: the current one).

    Raises:
        UnsupportedHardwareError: no kernel is written for the device.
    """
    import torch

    capability = torch.cuda.get_device_capability(device)
    return choose_target((capability[0], capability[1]), torch.cuda.get_device_name(device))


def check_runs_on(name: str, target: str, device: "torch.device") -> None:
    """Raise where a kernel made for `target` cannot run on a CUDA device.

    A launch would fail too, but leave its error behind for torch's next call.

    Raises:
        UnsupportedHardwareError: the device has another target, or none.
    """
    active = session.get_active()
    if active is None:
        present, model = _read_real_device(device.index)
    else:
        present, model = active.runtime.gpu.target, active.runtime.gpu.device_name
    if present != target:
        raise UnsupportedHardwareError(
            f"{name} was made for {target}, and {printable(model)} ({device}) runs {present}"
        )


@functools.cache
def _read_real_device(index: int | None) -> tuple[str, str]:
    import torch

    return read_device_target(index), torch.cuda.get_device_name(index)


def check_target(text: str) -> str:
    """Return a target that a user named, as it is spelled in PTX.

    Raises:
        UsageError: a wrong suffix or no GPU that is known; the message has the right spelling.
    """
    match = _TARGET.fullmatch(text)
    if text in TARGETS:
        return text
    right = f"sm_{match[1]}a" if match else ""
    if match is None or right not in TARGETS:
        raise UsageError(f"target {printable(text)!r}: choose from {', '.join(TARGETS)}")
    if match[2] == "f":
        raise UsageError(
            f"target {text!r} has the suffix 'f' of a family of GPUs; the kernels use instructions "
            f"of one architecture, which need the suffix 'a': {right}"
        )
    raise UsageError(
        f"target {text!r} lacks the suffix 'a', without which PTX has no block-scaled products and "
        f"no asynchronous tensor instructions: {right}"
    )


def list_targets(text: str) -> list[str]:
    """Return the targets of a comma-separated list, each once, in its order.

    Raises:
        UsageError: the list is empty or one of them is refused by `check_target`.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"no target is named: choose from {', '.join(TARGETS)}")
    return list(dict.fromkeys(check_target(name) for name in names))
