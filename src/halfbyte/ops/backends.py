"""Who runs an op: the one place that knows which device has which kernel.

| backend | tensors on | runs |
|---|---|---|
| auto | cpu | the cpu backend |
| auto | cuda, sm_100 or sm_103 | the Blackwell kernels |
| auto | cuda, sm_90 | the Hopper kernels, or torch: see `hopper_modes` |
| cpu | cpu | the cpu backend |
| virtual-b200, virtual-b300 | cpu | the Blackwell kernels on a virtual GPU |
| virtual-h200 | cpu | what a real H200 runs, its kernels on a virtual one |

Everything else is refused by name, with what runs instead.
"""

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.kernels.gemm_w4a4.config import TARGETS as BLACKWELL_TARGETS

HOPPER_TARGET: Final = "sm_90a"
TARGETS: Final = {**BLACKWELL_TARGETS, HOPPER_TARGET: "h200"}
BACKENDS: Final = ("auto", "cpu", *(f"virtual-{gpu}" for gpu in TARGETS.values()))
_NO_CONTEXT: Final = contextlib.nullcontext()
Layout = Literal["cpu", "blackwell", "hopper"]
_VIRTUAL_PREFIX: Final = "virtual-"
_CPU_RUNS_IT: Final = "the cpu backend runs it: .to('cpu')"


@dataclass(frozen=True)
class Backend:
    """Who runs a call.

    Attributes:
        target: the PTX target of the kernels; None for the cpu backend.
        virtual_gpu: the virtual GPU that CPU tensors are lent to; None for tensors where they are.
    """

    target: str | None = None
    virtual_gpu: str | None = None

    @property
    def layout(self) -> Layout:
        """Whose layouts quantized activations have."""
        if self.target is None:
            return "cpu"
        return "hopper" if self.target == HOPPER_TARGET else "blackwell"


CPU: Final = Backend()


def check_backend(name: str) -> None:
    """Raise UsageError unless `name` is a backend, UnsupportedHardwareError for one to come."""
    if name in BACKENDS:
        return
    if isinstance(name, str) and name.startswith(_VIRTUAL_PREFIX):
        from halfbyte.arch.gpus import GPUS

        gpu = GPUS.get(name.removeprefix(_VIRTUAL_PREFIX))
        if gpu is not None:
            raise UnsupportedHardwareError(
                f"backend {name!r}: the kernel for {gpu.target} does not exist yet; "
                f"choose one of {', '.join(BACKENDS)}"
            )
    raise UsageError(f"backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")


def find_layout(op: str, device: torch.device, backend: str) -> Layout:
    """Return whose layouts quantized activations on `device` have, for the fakes of `op`.

    A process that fakes CUDA tensors without a GPU gets Blackwell's.
    """
    if backend.startswith(_VIRTUAL_PREFIX):
        return choose_backend(op, torch.device("cpu"), backend).layout
    if device.type != "cuda":
        return "cpu"
    with see_session():
        if not torch.cuda.is_available():
            return "blackwell"
        return Backend(_find_target(op, device)).layout


def choose_backend(op: str, device: torch.device, name: str = "auto") -> Backend:
    """Return who runs `op` on tensors of `device`.

    Args:
        op: named in errors, e.g. "w4a4_linear".
        device: of x and of the linear.
        name: one of BACKENDS.

    Raises:
        UsageError: an unknown backend.
        FormatError: tensors on another device than the backend takes.
        UnsupportedHardwareError: no kernel for the device; names it and what runs the op.
    """
    check_backend(name)
    if name == "auto":
        return CPU if device.type == "cpu" else Backend(_find_target(op, device))
    if device.type != "cpu":
        raise FormatError(
            f"halfbyte::{op}: backend {name!r} takes tensors on the cpu, they are on {device}; "
            "move module and input with .to('cpu'), or use backend 'auto'"
        )
    if name == "cpu":
        return CPU
    gpu = name.removeprefix(_VIRTUAL_PREFIX)
    return Backend(next(target for target, found in TARGETS.items() if found == gpu), gpu)


def _find_target(op: str, device: torch.device) -> str:
    if device.type != "cuda":
        raise UnsupportedHardwareError(f"halfbyte::{op} has no kernel for {device}; {_CPU_RUNS_IT}")
    # Not of a session, whose GPU is another than that of the process.
    is_fixed = device.index is not None and see_session() is _NO_CONTEXT
    target = (_read_target if is_fixed else _read_target.__wrapped__)(device)
    if target not in TARGETS:
        raise UnsupportedHardwareError(
            f"halfbyte::{op} on {describe_device(device)}: this kernel does not exist yet (there "
            f"are {', '.join(TARGETS)}); {_CPU_RUNS_IT}"
        )
    return target


@lru_cache(maxsize=64)
def _read_target(device: torch.device) -> str:
    """Return the PTX target of a GPU, or what it would be called."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def describe_device(device: torch.device) -> str:
    """Return a device in words, for CUDA with its name and sm number."""
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def see_session() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an op sees the "cuda" of a session on a virtual GPU.

    torch calls an op without the function mode that answers for the session's tensors.
    """
    from halfbyte.virtual.driver.session import get_active

    active = get_active()
    mode = None if active is None else active.runtime.torch_mode
    return _NO_CONTEXT if mode is None else mode
