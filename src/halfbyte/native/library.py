"""Finds, checks and loads the compiled library; a library that does not fit is refused."""

import ctypes
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halfbyte.errors import HalfbyteError
from halfbyte.native.records import ABI_VERSION, RECORDS

LIBRARY_PATH = Path(__file__).with_name("_halfbyte.so")
LEVELS = ("generic", "avx2", "avx512")  # index = the level that the C functions take
_REBUILD = "rebuild it: reinstall halfbyte (pip install --force-reinstall --no-deps)"


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """The loaded library and the instruction set its loops run with.

    Attributes:
        functions: the ctypes library; its calls release the interpreter lock.
        level: an index into `LEVELS`.
        path: the file it was loaded from.
    """

    functions: ctypes.CDLL
    level: int
    path: Path

    @property
    def isa(self) -> str:
        """The instruction set in use: "generic", "avx2" or "avx512"."""
        return LEVELS[self.level]

    def call(self, function: str, job: ctypes.Structure) -> None:
        """Run one exported function on its record.

        Raises:
            HalfbyteError: the library rejects the record or runs out of memory.
        """
        job.struct_bytes = ctypes.sizeof(job)
        status = getattr(self.functions, function)(self.level, ctypes.byref(job))
        if status != 0:
            reason = "out of memory" if status == 2 else "the record does not fit the library"
            raise HalfbyteError(f"{function} failed: {reason} (status {status})")


def library() -> NativeLibrary | None:
    """Return the compiled library, or None where the torch path is to be used.

    Environment, read on each call: HALFBYTE_NATIVE=0 disables the library; HALFBYTE_NATIVE_ISA
    (generic, avx2 or avx512) caps the instruction set, for tests.

    Raises:
        HalfbyteError: HALFBYTE_NATIVE_ISA names no level.
    """
    if os.environ.get("HALFBYTE_NATIVE") == "0":
        return None
    return _load(LIBRARY_PATH, os.environ.get("HALFBYTE_NATIVE_ISA", LEVELS[-1]))


def describe() -> dict[str, str]:
    """Return what is loaded, as `halfbyte doctor` prints it: state, instruction set, file."""
    if os.environ.get("HALFBYTE_NATIVE") == "0":
        return {"state": "disabled by HALFBYTE_NATIVE=0"}
    if not LIBRARY_PATH.exists():
        return {"state": f"not built; install a C++ compiler (g++) and {_REBUILD}"}
    loaded = library()
    if loaded is None:
        return {"state": f"present but refused; {_REBUILD}", "file": str(LIBRARY_PATH)}
    levels = available_levels(loaded)
    return {
        "state": "loaded",
        "isa": loaded.isa,
        "available": ", ".join(levels),
        "file": str(loaded.path),
    }


def available_levels(loaded: NativeLibrary) -> list[str]:
    """Return the instruction sets that are built and that this CPU has, slowest first."""
    has_level = loaded.functions.halfbyte_has_level
    return [name for level, name in enumerate(LEVELS) if has_level(level)]


@cache
def _load(path: Path, highest: str) -> NativeLibrary | None:
    if highest not in LEVELS:
        raise HalfbyteError(f"HALFBYTE_NATIVE_ISA={highest!r}, wanted one of: {', '.join(LEVELS)}")
    if not path.exists():
        return None
    try:
        functions = ctypes.CDLL(str(path))
        problem = _find_mismatch(functions)
    except (OSError, AttributeError) as error:
        problem = str(error)
    if problem:
        warnings.warn(
            f"{path} is refused and the slower torch path used: {problem}; {_REBUILD}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    level = LEVELS.index(highest)
    while level > 0 and not functions.halfbyte_has_level(level):
        level -= 1
    return NativeLibrary(functions, level, path)


def _find_mismatch(functions: ctypes.CDLL) -> str:
    functions.halfbyte_record_bytes.restype = ctypes.c_int64
    version = functions.halfbyte_abi_version()
    if version != ABI_VERSION:
        return f"it has ABI version {version}, this package needs {ABI_VERSION}"
    for index, record in enumerate(RECORDS):
        built = functions.halfbyte_record_bytes(index)
        if built != ctypes.sizeof(record):
            return f"{record.__name__} has {built} bytes there and {ctypes.sizeof(record)} here"
    return ""
