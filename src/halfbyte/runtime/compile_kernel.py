"""From a kernel source to a kernel that can be launched: memory, artifacts, cache, compiler.

The first that has it answers. A kernel is loaded once for the GPUs of torch, and once for each
virtual CUDA runtime.
"""

import atexit
import logging
import shutil
import tempfile
import threading
import weakref
from collections.abc import Hashable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import CheckpointError, HalfbyteError, MissingDependencyError
from halfbyte.runtime.artifact import explain_absence, find_artifact
from halfbyte.runtime.cute_compiler import check_compiler
from halfbyte.runtime.kernel_build import build_entry
from halfbyte.runtime.kernel_cache import KernelCache, find_cache_folder
from halfbyte.runtime.kernel_entry import KernelEntry
from halfbyte.runtime.kernel_key import make_cache_key, make_source_key, read_toolchain
from halfbyte.runtime.launch import LoadedKernel
from halfbyte.runtime.loading import load_for_device
from halfbyte.runtime.virtual_kernel import load_virtual_kernel
from halfbyte.virtual.driver import session
from halfbyte.virtual.driver.runtime import VirtualRuntime

_KEY_NAME = "_memory_key"  # beside the fields of a KernelSource, which is frozen
_log = logging.getLogger(__name__)
_lock = threading.RLock()
_on_devices: dict[Hashable, LoadedKernel] = {}
_on_virtual: weakref.WeakKeyDictionary[VirtualRuntime, dict[Hashable, LoadedKernel]] = (
    weakref.WeakKeyDictionary()
)
_entries: dict[Hashable, KernelEntry] = {}
_private_folder: Path | None = None


def compile_kernel(source: KernelSource, runtime: VirtualRuntime | None = None) -> LoadedKernel:
    """Return a source's kernel, compiled where neither artifacts nor cache have it.

    Args:
        source: what to run. Its modules are taken as they are at the first call for it: later
            changes of their text count in the next process.
        runtime: a virtual CUDA runtime; None for that of the active session on a virtual GPU, and
            without a session for the GPUs of torch.

    Raises:
        MissingDependencyError: it must be compiled and CuTe DSL is not installed; tells which
            artifacts were looked at.
        UnsupportedHardwareError: torch has no CUDA runtime.
        HalfbyteError: it cannot be compiled, linked or loaded.
    """
    if runtime is None:
        active = session.get_active()
        runtime = None if active is None else active.runtime
    key = _make_memory_key(source)
    loaded = _get_loaded(runtime)
    kernel = loaded.get(key)
    if kernel is not None:
        return kernel
    with _lock:
        kernel = loaded.get(key)
        if kernel is None:
            kernel = loaded[key] = _load(source, key, runtime)
        return kernel


class _MemoryKey(tuple[Any, ...]):
    """A tuple that is hashed once: every launch looks its kernel up."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()


@lru_cache(maxsize=4096)
def _intern_key(key: _MemoryKey) -> _MemoryKey:
    """Return the first of equal keys: one that is found again is not compared field by field."""
    return key


def _make_memory_key(source: KernelSource) -> Hashable:
    """Return what tells sources of this process apart; made once for a source object."""
    known: Hashable = source.__dict__.get(_KEY_NAME)
    if known is not None:
        return known
    config: Any = source.config
    try:
        hash(config)
    except TypeError:
        config = repr(config)
    fields = source.name, source.target, source.modules, type(source.config), config
    key = source.__dict__[_KEY_NAME] = _intern_key(_MemoryKey(fields))
    return key


def _get_loaded(runtime: VirtualRuntime | None) -> dict[Hashable, LoadedKernel]:
    if runtime is None:
        return _on_devices
    with _lock:
        return _on_virtual.setdefault(runtime, {})


def _load(source: KernelSource, key: Hashable, runtime: VirtualRuntime | None) -> LoadedKernel:
    entry = _entries.get(key) or find_entry(source)
    try:
        kernel = _load_entry(entry, runtime)
    except (CheckpointError, OSError) as error:  # damaged, or removed since it was found
        _entries.pop(key, None)
        if find_artifact(entry.facts.source_key) is not None:
            raise
        _log.warning("%s; it is built again", error)
        entry = _build(source, entry.facts.source_key)
        kernel = _load_entry(entry, runtime)
    _entries[key] = entry
    return kernel


def _load_entry(entry: KernelEntry, runtime: VirtualRuntime | None) -> LoadedKernel:
    if runtime is not None:
        return load_virtual_kernel(entry, runtime)
    return LoadedKernel(entry, load_for_device(entry))


def find_entry(source: KernelSource) -> KernelEntry:
    """Return a source's compiled kernel on disk, compiling it where it is not there.

    Raises:
        MissingDependencyError: it must be compiled and CuTe DSL is not installed.
    """
    source_key = make_source_key(source)
    entry = find_artifact(source_key)
    if entry is not None:
        return entry
    toolchain = read_toolchain()
    if toolchain is not None:
        entry = KernelCache(find_cache_folder()).find(make_cache_key(source_key, toolchain))
        if entry is not None:
            return entry
    return _build(source, source_key)


def _build(source: KernelSource, source_key: str) -> KernelEntry:
    """Compile into the cache; where that cannot be written, into a folder of this process."""
    toolchain = read_toolchain()
    try:
        check_compiler()
    except MissingDependencyError as error:
        raise MissingDependencyError(f"{source.name}: {error}. {explain_absence(source)}") from None
    if toolchain is None:  # importable, but installed in a way that tells no version
        raise MissingDependencyError(
            f"{source.name}: nvidia-cutlass-dsl or apache-tvm-ffi has no version on record; "
            f'reinstall them: pip install "halfbyte[kernels]". {explain_absence(source)}'
        )
    cache, key = KernelCache(find_cache_folder()), make_cache_key(source_key, toolchain)
    if cache.is_safe():
        try:
            cache.make_folder()
            entry = build_entry(source, source_key, cache.get_place(key))
            cache.trim()
            return entry
        except OSError as error:
            _log.warning(
                "the kernel cache %s cannot be written (%s): %s is compiled in every process",
                cache.folder, error, source.name,
            )  # fmt: skip
    return build_entry(source, source_key, _get_private_folder() / key)


def _get_private_folder() -> Path:
    """Return a folder of this process, removed when it ends."""
    global _private_folder
    with _lock:
        if _private_folder is None:
            folder = Path(tempfile.mkdtemp(prefix="halfbyte-kernels-"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            _private_folder = folder
        return _private_folder


def forget_loaded() -> None:
    """Forget what is in memory, so that the next use looks on disk again; for tests and tools."""
    with _lock:
        _on_devices.clear()
        _on_virtual.clear()
        _entries.clear()


def describe_absence(source: KernelSource) -> str:
    """Return "" where a source can be run, else why not: no artifact and no compiler."""
    try:
        if find_artifact(make_source_key(source)) is not None or read_toolchain() is not None:
            return ""
    except HalfbyteError as error:
        return str(error)
    return explain_absence(source)
