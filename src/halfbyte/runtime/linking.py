"""Links a kernel's host object file into a small shared object that needs no compiler to load.

Two variants of one kernel: the device's has CuTe DSL's static runtime archive inside and calls
CUDA; the virtual GPU's leaves those calls open, and the stand-in for the CUDA runtime has them.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from halfbyte.errors import HalfbyteError

_STUB = Path(__file__).with_name("csrc") / "launch_stub.c"
_ARCHIVE = "libcuda_dialect_runtime_static.a"
_FLAGS = (
    *("-shared", "-fPIC", "-O1", "-Wl,--wrap=_cudaLaunchKernelEx"),
    # A missing symbol fails when the library is loaded, not in the middle of a launch; what comes
    # out of the archive never meets a symbol of the same name elsewhere in the process.
    *("-Wl,-z,now", "-Wl,--exclude-libs,ALL", "-Wl,-s"),
)
_SHOWN_CHARACTERS = 2000


def find_c_compiler() -> str | None:
    """Return the C compiler of this machine (CC, else cc, gcc or clang), or None."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    return None


@functools.cache
def find_runtime_archive() -> Path | None:
    """Return CuTe DSL's static CUDA runtime for this machine, the newest CUDA's, or None."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for root in spec.submodule_search_locations or () if spec else ():
        found = sorted(Path(root).glob(f"cu[0-9]*/lib/{_ARCHIVE}"))
        if found:
            return found[-1]
    return None


def link_for_device(compiler: str, archive: Path, host_object: bytes) -> bytes:
    """Return the shared object that calls CUDA's runtime, found in the process when it is loaded.

    Raises:
        HalfbyteError: the C compiler refused; its message is shown.
    """
    return _link(compiler, host_object, [str(archive), "-DHALFBYTE_STATIC_RUNTIME"])


def link_for_virtual(compiler: str, host_object: bytes) -> bytes:
    """Return the shared object that calls the stand-in for the CUDA runtime, once connected to it.

    Raises:
        HalfbyteError: the C compiler refused; its message is shown.
    """
    return _link(compiler, host_object, ["-Wl,-z,defs"])


def _link(compiler: str, host_object: bytes, extra: list[str]) -> bytes:
    tvm_ffi = find_tvm_ffi_library()
    with tempfile.TemporaryDirectory(prefix="halfbyte-link-") as name:
        folder = Path(name)
        source, target = folder / "kernel.o", folder / "kernel.so"
        source.write_bytes(host_object)
        command = [compiler, *_FLAGS, "-o", str(target), str(source), str(_STUB), *extra]
        try:
            done = subprocess.run(
                [*command, str(tvm_ffi), "-ldl"], capture_output=True, text=True, check=False
            )
        except OSError as error:  # e.g. a file of another machine
            raise HalfbyteError(f"{compiler} cannot be run: {error}") from None
        if done.returncode or not target.is_file():
            raise HalfbyteError(
                f"{compiler} could not link a compiled kernel (exit code {done.returncode}): "
                f"{done.stderr.strip()[-_SHOWN_CHARACTERS:]}"
            )
        return target.read_bytes()


def find_tvm_ffi_library() -> Path:
    """Return TVM FFI's shared library, which every compiled kernel calls."""
    import tvm_ffi

    return Path(tvm_ffi.libinfo.find_libtvm_ffi())
