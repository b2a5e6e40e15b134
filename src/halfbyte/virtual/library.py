"""Finds and loads the compiled core of the virtual GPU (plain C interface, see machine/abi.cpp)."""

import ctypes
import os
from functools import cache
from pathlib import Path

from halfbyte.errors import MissingDependencyError

ABI_VERSION = 3
LEVELS = ("avx512", "avx2", "generic")  # best first
_FOLDER = Path(__file__).parent
_REQUIRED_FLAGS = {
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "bmi2", "fma", "f16c"},
    "avx2": {"avx2", "bmi2", "fma", "f16c", "movbe"},
    "generic": set(),
}

PrintCallback = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_uint64)
PollCallback = ctypes.CFUNCTYPE(ctypes.c_int32)


class LaunchConfig(ctypes.Structure):
    """`LaunchConfig` of machine/simulation.h, field by field."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("max_resident_clusters", ctypes.c_uint32),
        ("num_sms", ctypes.c_uint32),
        ("parameters", ctypes.c_char_p),
        ("parameter_bytes", ctypes.c_uint32),
        ("adversarial_try_wait", ctypes.c_uint32),
        ("livelock_instructions", ctypes.c_uint64),
        ("max_instructions", ctypes.c_uint64),
        ("num_threads", ctypes.c_uint32),
        ("shared_poison", ctypes.c_uint32),
        ("latency_seed", ctypes.c_uint32),
        ("reverse_warps", ctypes.c_uint32),
        ("reserved_shared_bytes", ctypes.c_uint32),
        ("max_warps_per_sm", ctypes.c_uint32),
        ("tensor_memory_columns", ctypes.c_uint32),
        ("compute_capability", ctypes.c_uint32),
        ("clock_hz", ctypes.c_double),
        ("print", PrintCallback),
        ("poll", PollCallback),
    )


class ProgramSizes(ctypes.Structure):
    """`ProgramSizes` of machine/abi.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            "num_instructions",
            "num_operands",
            "num_attributes",
            "num_constants",
            "register_slots",
            "num_predicates",
            "static_shared_end",
            "local_bytes",
        )
    )


class ConstantRecord(ctypes.Structure):
    """`ConstantRecord` of machine/abi.cpp."""

    _fields_ = (
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("words", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    )


def load_core() -> ctypes.CDLL:
    """Return the compiled core.

    Environment: HALFBYTE_VIRTUAL_LIBRARY names a library file to use instead of the built ones.

    Raises:
        MissingDependencyError: the core is not built, or was built for another version.
    """
    override = os.environ.get("HALFBYTE_VIRTUAL_LIBRARY")
    if not override:
        return _load(_find_library())
    path = Path(override).absolute()  # a bare name would be looked for in the system's folders
    if not path.exists():
        raise MissingDependencyError(
            f"HALFBYTE_VIRTUAL_LIBRARY names {path}, which does not exist; unset it to use the "
            "built core"
        )
    return _load(path)


def describe() -> dict[str, str]:
    """Return whether the core can be loaded, as `halfbyte doctor` prints it."""
    try:
        core = load_core()
    except MissingDependencyError as error:
        return {"state": str(error)}
    return {"state": "loaded", "file": str(core._name)}


def _find_library() -> Path:
    flags = _read_cpu_flags()
    for level in LEVELS:
        path = _FOLDER / f"_virtual_{level}.so"
        if path.exists() and flags >= _REQUIRED_FLAGS[level]:
            return path
    raise MissingDependencyError(
        "the virtual GPU's compiled core is not built: install a C++ compiler (g++) and reinstall "
        "halfbyte (pip install --force-reinstall --no-deps)"
    )


@cache
def _read_cpu_flags() -> set[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return set(line.partition(":")[2].split())
    except OSError:
        pass
    return set()


@cache
def _load(path: Path) -> ctypes.CDLL:
    try:
        core = ctypes.CDLL(str(path))
    except OSError as error:
        raise MissingDependencyError(f"{path} cannot be loaded: {error}") from error
    try:
        core.hb_abi_version.restype = ctypes.c_uint32
        version = core.hb_abi_version()
    except AttributeError:
        raise MissingDependencyError(f"{path} is no core of the virtual GPU") from None
    if version != ABI_VERSION:
        raise MissingDependencyError(
            f"{path} was built for another version (interface {version}, {ABI_VERSION} is wanted): "
            "reinstall halfbyte (pip install --force-reinstall --no-deps)"
        )
    _declare(core)
    return core


def _declare(core: ctypes.CDLL) -> None:
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    signatures = {
        "hb_free_text": (None, [pointer]),
        "hb_list_handlers": (pointer, []),
        "hb_memory_create": (pointer, []),
        "hb_memory_destroy": (None, [pointer]),
        "hb_memory_register": (
            None,
            [pointer, ctypes.c_uint64, ctypes.c_uint64, text, ctypes.c_uint32],
        ),
        "hb_memory_mark_freed": (None, [pointer, ctypes.c_uint64]),
        "hb_program_create": (
            pointer,
            [
                ctypes.POINTER(ProgramSizes),
                pointer,
                pointer,
                pointer,
                ctypes.POINTER(ConstantRecord),
                text,
                ctypes.POINTER(pointer),
            ],
        ),
        "hb_program_destroy": (None, [pointer]),
        "hb_launch": (pointer, [pointer, pointer, ctypes.POINTER(LaunchConfig)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(core, name)
        function.restype = result
        function.argtypes = arguments


def take_text(core: ctypes.CDLL, pointer: int) -> str:
    """Return the text that the core allocated at `pointer`, and free it there."""
    try:
        return ctypes.string_at(pointer).decode("utf-8", "replace")
    finally:
        core.hb_free_text(pointer)


def list_handlers() -> tuple[str, ...]:
    """Return the names of the routines that the core has, sorted."""
    core = load_core()
    return tuple(take_text(core, core.hb_list_handlers()).split())
