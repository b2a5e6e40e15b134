"""Benchmark functions of other packages: on a virtual GPU one run is enough.

A wall time here says nothing about a GPU, so that what would run hundreds of times runs once; its
time is the device's clock. An autotuner takes its first configuration that runs.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import VirtualRuntime

_NEVER_CHOSEN_MS = 1e9


def measure_once_ms(runtime: VirtualRuntime, function: Callable[[], Any]) -> float:
    """Return the milliseconds of one call: the device's clock, else this computer's."""
    started_ms, started = runtime.clock_ms, time.perf_counter()
    function()
    return runtime.clock_ms - started_ms or (time.perf_counter() - started) * 1e3


def patch_benchmarks(patches: Patches, runtime: VirtualRuntime) -> None:
    """Replace the benchmark functions of packages, now or when the program imports them."""
    _patch_now_or_later(
        patches,
        {
            "triton.testing": lambda module: _patch_triton(patches, runtime, module),
            "quack.autotuner": lambda module: _patch_quack(patches, runtime, module),
        },
    )


def _patch_triton(patches: Patches, runtime: VirtualRuntime, module: ModuleType) -> None:
    def bench_once(fn: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
        milliseconds = measure_once_ms(runtime, fn)
        return milliseconds if quantiles is None else [milliseconds] * len(quantiles)

    patches.set_present(module, {"do_bench": bench_once, "do_bench_cudagraph": bench_once})


def _patch_quack(patches: Patches, runtime: VirtualRuntime, module: Any) -> None:
    def bench(self: Any, *arguments: Any, config: Any, **keywords: Any) -> list[float]:
        """Run until one configuration works; the others get a time that is never chosen."""
        if getattr(self, "_halfbyte_nargs", None) is self.nargs:
            return [_NEVER_CHOSEN_MS] * 3
        everything = {**keywords, **config.all_kwargs()}
        with sys.modules["quack.cache.async_compile"].suppress_pool():
            milliseconds = measure_once_ms(runtime, lambda: self.fn(*arguments, **everything))
        self._halfbyte_nargs = self.nargs  # one dictionary for each tuning run
        return [milliseconds] * 3

    patches.set(module.Autotuner, "_bench", bench)
    patches.set(module, "_gpu_warmup", lambda *_, **__: None)


def _patch_now_or_later(patches: Patches, actions: dict[str, Callable[[ModuleType], None]]) -> None:
    later = dict(actions)
    for name, action in actions.items():
        if name in sys.modules:
            action(sys.modules[name])
            del later[name]
    watch = ImportWatch(later)
    sys.meta_path.insert(0, watch)
    patches.call_on_undo(lambda: sys.meta_path.remove(watch))


class ImportWatch(MetaPathFinder):
    """Calls a function with a module right after it was imported."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        """Wait for the modules named by `actions`."""
        self._actions = actions

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, its loader wrapped; None for others."""
        action = self._actions.pop(name, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader, action)
        return spec


class _ActingLoader(Loader):
    """A loader that acts after the one it wraps."""

    def __init__(self, loader: Any, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
