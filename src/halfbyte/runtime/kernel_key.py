"""What a compiled kernel depends on, as digests: its source, and the tools that compiled it.

The source key needs no compiler: ahead-of-time artifacts are found by it. The cache key adds the
compiler, so that another version of it compiles again.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UsageError

FORMAT_VERSION = 1  # of entries on disk: their parts, their symbols, the stub linked into them

# CuTe DSL's wheels: its Python code, and the libraries that hold the compiler with ptxas inside.
_COMPILER_WHEELS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
_SETTINGS_PREFIX = "CUTE_DSL_"
# Variables of CuTe DSL that change where things are written or printed, not what is compiled; the
# target is always set by us. One that is not listed counts.
_HARMLESS_SETTINGS = (
    *("ARCH", "LIBS", "KEEP", "DUMP_DIR", "CACHE_DIR", "NO_CACHE", "DISABLE_FILE_CACHING"),
    *("LOG_", "PRINT_", "JIT_", "SHOW_STACKTRACE", "FILTER_STACKTRACE", "WARNINGS_IGNORE"),
    "ENABLE_TVM_FFI",
)


@dataclass(frozen=True)
class Toolchain:
    """What compiles kernels on this machine.

    Attributes:
        cute_dsl: version of CuTe DSL.
        wheels: every wheel of it with its version; ptxas is inside those named `libs`.
        tvm_ffi: version of TVM FFI, whose calling convention the compiled code has.
        settings: environment variables of CuTe DSL that change what is compiled.
    """

    cute_dsl: str
    wheels: tuple[str, ...]
    tvm_ffi: str
    settings: tuple[tuple[str, str], ...] = ()


def make_source_key(source: KernelSource) -> str:
    """Return the digest of a kernel's name, configuration, target and source text.

    Raises:
        UsageError: a module that the source names is not there.
    """
    return _digest(
        {
            "format": FORMAT_VERSION,
            "name": source.name,
            "config": repr(source.config),
            "target": source.target,
            "modules": {name: read_module_text(name) for name in source.modules},
        }
    )


def make_cache_key(source_key: str, toolchain: Toolchain) -> str:
    """Return the digest of a source key and the tools that compile it."""
    return _digest({"source": source_key, **asdict(toolchain)})


def read_module_text(name: str) -> str:
    """Return the source text of a module without importing it (its packages are imported).

    Raises:
        UsageError: there is no such module, or it has no source text.
    """
    try:
        spec = importlib.util.find_spec(name)
        text = spec.loader.get_source(name) if spec and spec.loader else None  # type: ignore[attr-defined]
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"kernel source: module {name!r} cannot be read: {error}") from None
    if not isinstance(text, str):
        raise UsageError(
            f"kernel source: module {name!r} has no source text; list the modules by full name "
            "that decide what is compiled"
        )
    return text


def read_toolchain() -> Toolchain | None:
    """Return the tools that are installed, or None without CuTe DSL or TVM FFI."""
    versions = _read_versions()
    cute_dsl, tvm_ffi = versions.get(_COMPILER_WHEELS[0]), versions.get("apache-tvm-ffi")
    if cute_dsl is None or tvm_ffi is None:
        return None
    wheels = tuple(f"{name} {versions[name]}" for name in _COMPILER_WHEELS if name in versions)
    return Toolchain(cute_dsl, wheels, tvm_ffi, _list_settings(os.environ))


@functools.cache
def _read_versions() -> dict[str, str]:
    versions = {}
    for name in (*_COMPILER_WHEELS, "apache-tvm-ffi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _list_settings(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    harmless = tuple(_SETTINGS_PREFIX + name for name in _HARMLESS_SETTINGS)
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(_SETTINGS_PREFIX) and not name.startswith(harmless)
        )
    )


def _digest(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
