"""A session on the virtual GPU: everything is replaced on entry and put back on exit."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from halfbyte.cache_home import find_cache_home
from halfbyte.errors import UsageError
from halfbyte.virtual.driver.benchmarks import patch_benchmarks
from halfbyte.virtual.driver.calls import answer_call
from halfbyte.virtual.driver.cuda_bindings import patch_cuda_bindings
from halfbyte.virtual.driver.cute_dsl import ERROR_KIND, make_environment, patch_cute_dsl
from halfbyte.virtual.driver.launches import LaunchLog
from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import VirtualRuntime
from halfbyte.virtual.driver.stand_in import StandIn, find_library

_active: "cuda | None" = None


class cuda:  # noqa: N801 - reads as the device that programs name
    """A context in which "cuda" is a virtual GPU.

    Programs that use torch's cuda device, CuTe DSL, CUDA's Python bindings or TVM FFI run in it
    unmodified; import them inside it where possible.

    Attributes:
        runtime: the virtual CUDA runtime.
        log: the launches so far.
    """

    def __init__(self, gpu: str = "b200", *, device: Any = None, options: Any = None) -> None:
        """Prepare a session on the product `gpu`, or on a `device` at hand.

        Raises:
            MissingDependencyError: the stand-in for the CUDA runtime or the core is not built.
        """
        if device is None:
            from halfbyte.virtual.device import Device

            device = Device(gpu)
        find_library()
        self.runtime = VirtualRuntime(device, options)
        self._patches = Patches()
        self._stand_in: StandIn | None = None
        self._leave_torch: Callable[[], None] | None = None

    @property
    def log(self) -> LaunchLog:
        """The launches so far."""
        return self.runtime.log

    def __enter__(self) -> "cuda":
        """Replace the CUDA runtime, its bindings and torch's cuda device.

        Raises:
            UsageError: a session is active; they cannot be nested.
        """
        global _active
        if _active is not None:
            raise UsageError("a session on a virtual GPU is active; leave it before the next one")
        try:
            self._install()
        except BaseException:
            self._remove()
            raise
        _active = self
        return self

    def _install(self) -> None:
        from halfbyte.virtual.driver.torch_cuda.installation import patch_torch

        self._stand_in = StandIn(self._answer)
        environment = make_environment(
            self.runtime.gpu.target, self._stand_in.path, find_cache_folder()
        )
        for name, value in environment.items():
            self._patches.set_environment(name, value)
        patch_cuda_bindings(self._patches, self.runtime)
        self._leave_torch = patch_torch(self._patches, self.runtime)
        patch_benchmarks(self._patches, self.runtime)
        patch_cute_dsl(self._patches, self.runtime, self._stand_in.set_error)

    def _answer(self, name: str, words: list[int]) -> int:
        code = answer_call(self.runtime, name, words)
        if code and self._stand_in is not None:
            fault = self.runtime.fault
            kind = "" if fault is None else ERROR_KIND
            self._stand_in.set_error(kind, f"{type(fault).__name__}: {fault}")
        return code

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Put everything back."""
        global _active
        _active = None
        self._remove()

    def _remove(self) -> None:
        if self._leave_torch is not None:
            self._leave_torch()
            self._leave_torch = None
        self._patches.undo()
        if self._stand_in is not None:
            self._stand_in.close()
            self._stand_in = None


def find_cache_folder() -> Path:
    """Return where compiled objects of a session are kept: they carry their PTX.

    HALFBYTE_VIRTUAL_CACHE names another folder. Never a shared one: its files are run.
    """
    named = os.environ.get("HALFBYTE_VIRTUAL_CACHE")
    if named:
        return Path(named)
    return find_cache_home() / "halfbyte-virtual"


def get_active() -> cuda | None:
    """Return the active session, or None."""
    return _active
