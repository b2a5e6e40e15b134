"""Loads the host half of a compiled kernel into this process; its kernel goes to the device later.

The device's variant finds CUDA's runtime in the process (torch's), the virtual GPU's variant finds
the stand-in. CuTe DSL is needed only where no C compiler linked the kernel.
"""

import ctypes
import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, MissingDependencyError, UnsupportedHardwareError
from halfbyte.runtime.kernel_entry import (
    DEVICE_LIBRARY,
    DEVICE_OBJECT,
    VIRTUAL_LIBRARY,
    VIRTUAL_OBJECT,
    KernelEntry,
)

_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class LoadedFunction:
    """A kernel's host function.

    Attributes:
        call: takes tensors and integers, launches on the current stream.
        skip_launches: while called with 1 last, `call` does everything but the launch; None where
            the kernel was not linked by us.
        connect: takes the stand-in's handle; None where CUDA itself is called.
    """

    call: Callable[..., Any]
    skip_launches: Callable[[int], Any] | None = None
    connect: Callable[[int], int] | None = None


def load_for_device(entry: KernelEntry) -> LoadedFunction:
    """Return a kernel's function for the GPUs of torch.

    Raises:
        CheckpointError: the entry is damaged.
        UnsupportedHardwareError: this torch has no CUDA runtime.
        MissingDependencyError: TVM FFI (or, for an entry that is not linked, CuTe DSL) is missing.
    """
    check_tvm_ffi()
    if not entry.has_part(DEVICE_LIBRARY):
        return _load_object(entry, DEVICE_OBJECT, _find_cute_runtime())
    make_cuda_runtime_global()
    entry.read_part(DEVICE_LIBRARY)  # compared with its digest
    return _load_library(entry.folder / DEVICE_LIBRARY, entry.facts.function, is_kept=True)


def load_for_virtual(entry: KernelEntry, stand_in: Path) -> LoadedFunction:
    """Return a kernel's function for one virtual CUDA runtime; `stand_in` is its library.

    The host code keeps what it loaded onto a device, so that every virtual runtime gets a copy of
    its own, unloaded when the function is dropped.

    Raises:
        CheckpointError: the entry is damaged.
        MissingDependencyError: TVM FFI (or, for an entry that is not linked, CuTe DSL) is missing.
    """
    check_tvm_ffi()
    if not entry.has_part(VIRTUAL_LIBRARY):
        return _load_object(entry, VIRTUAL_OBJECT, [str(stand_in)])
    content = entry.read_part(VIRTUAL_LIBRARY)
    with tempfile.TemporaryDirectory(prefix="halfbyte-kernel-") as folder:
        path = Path(folder) / VIRTUAL_LIBRARY
        path.write_bytes(content)
        function = _load_library(path, entry.facts.function, is_kept=False)
    _connect(function, stand_in)
    return function


def _connect(function: LoadedFunction, stand_in: Path) -> None:
    handle = ctypes.CDLL(str(stand_in))._handle  # it stays loaded for the life of the process
    missing = function.connect(handle) if function.connect is not None else 0
    if missing:
        raise HalfbyteError(
            f"{stand_in} lacks {missing} functions that compiled kernels call: it is of another "
            "version; reinstall halfbyte"
        )


def check_tvm_ffi() -> None:
    """Raise MissingDependencyError where TVM FFI is not installed."""
    if importlib.util.find_spec("tvm_ffi") is None:
        raise MissingDependencyError(
            "GPU kernels are called through TVM FFI, which is not installed: "
            "pip install apache-tvm-ffi"
        )


def _load_library(path: Path, function: str, *, is_kept: bool) -> LoadedFunction:
    """Load a shared object; `is_kept`: for the life of the process."""
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(str(path), keep_module_alive=is_kept)
        call: Any = module.get_function(function)
        skip: Any = module.get_function("halfbyte_skip_launches")
        connect: Any = None if is_kept else module.get_function("halfbyte_connect")
    except (OSError, RuntimeError, AttributeError) as error:
        raise HalfbyteError(
            f"the compiled kernel {function} ({path}) cannot be loaded: {error}; with "
            f"apache-tvm-ffi {tvm_ffi.__version__}, was it built for another version? Clear the "
            "kernel cache, or build the artifact again"
        ) from None
    return LoadedFunction(call, skip, connect)


def _load_object(entry: KernelEntry, part: str, libraries: list[str]) -> LoadedFunction:
    """Link an object file in memory with CuTe DSL's execution engine."""
    content = entry.read_part(part)
    if importlib.util.find_spec("cutlass") is None:
        raise MissingDependencyError(
            f"{entry.folder} was built without a C compiler and needs CuTe DSL to be loaded: "
            'pip install "halfbyte[kernels]", or build it again where there is one'
        )
    import tvm_ffi

    engines: Any = importlib.import_module("cutlass._mlir._mlir_libs._cutlass_ir._execution_engine")
    engine = engines.BinaryExecutionEngine(content, libraries, True)
    address = engine.lookup(f"__tvm_ffi_{entry.facts.function}")
    function: Any = tvm_ffi.Function
    return LoadedFunction(function.__from_extern_c__(address, keep_alive_object=engine))


def _find_cute_runtime() -> list[str]:
    runtime: Any = importlib.import_module("cutlass.runtime")
    return [str(path) for path in runtime.find_runtime_libraries(enable_tvm_ffi=True)]


def make_cuda_runtime_global() -> None:
    """Let libraries loaded from here on find the CUDA runtime that torch uses.

    Raises:
        UnsupportedHardwareError: torch loaded none.
    """
    path = find_cuda_runtime()
    if path is None:
        raise UnsupportedHardwareError(
            "torch has loaded no CUDA runtime (libcudart): this torch is a build without CUDA; "
            "install a CUDA build of torch, or run on the CPU: backend='cpu'"
        )
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def find_cuda_runtime() -> str | None:
    """Return the file of the CUDA runtime that this process has loaded, or None."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libcudart"):
            return "/" + path
    return None
