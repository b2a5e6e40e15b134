"""Compiles a kernel source with CuTe DSL: no GPU, no driver, the target as the source names it.

CuTe DSL takes its target from an environment variable that it reads once, else from the driver,
else it falls back to sm_100a. None of these is asked: the target is set for each compilation and
checked in the PTX that comes out.
"""

import importlib
import importlib.util
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import HalfbyteError, MissingDependencyError
from halfbyte.virtual.driver.cute_dsl import change_images
from halfbyte.virtual.driver.images import add_ptx, strip_ptx

_TARGET = re.compile(r"^\s*\.target\s+(\w+)", re.MULTILINE)
_PTX_VERSION = re.compile(r"^\s*\.version\s+([\d.]+)", re.MULTILINE)
# Compilation goes through one object of CuTe DSL that holds the options of the moment.
_lock = threading.Lock()


@dataclass(frozen=True)
class CompiledKernel:
    """What CuTe DSL made of a kernel source.

    Attributes:
        function: name of the host function, called through TVM FFI.
        device_object: host object file whose image holds machine code alone.
        virtual_object: the same with the PTX in its image, for the virtual GPU.
        ptx: the kernel's PTX.
        cubin: the kernel's machine code.
        ptxas: CUDA version of the ptxas inside CuTe DSL, e.g. "12.9".
        ptx_version: the PTX ISA's version, e.g. "8.8".
    """

    function: str
    device_object: bytes
    virtual_object: bytes
    ptx: str
    cubin: bytes
    ptxas: str
    ptx_version: str


def check_compiler() -> None:
    """Raise MissingDependencyError where CuTe DSL or TVM FFI is not installed."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise MissingDependencyError(
                f"compiling a GPU kernel needs {package}, which is not installed: "
                'pip install "halfbyte[kernels]"'
            )


def compile_source(source: KernelSource) -> CompiledKernel:
    """Return a kernel compiled for `source.target`, whatever this process compiled before.

    Raises:
        MissingDependencyError: CuTe DSL or TVM FFI is not installed.
        HalfbyteError: the compiler made code for another target, or none.
    """
    check_compiler()
    function = f"halfbyte_{re.sub(r'[^0-9A-Za-z_]', '_', source.name)}"
    try:
        with _lock, tempfile.TemporaryDirectory(prefix="halfbyte-compile-") as name:
            return _compile_in(Path(name), source, function)
    except OSError as error:
        raise HalfbyteError(
            f"{source.name}: compiling needs some MB of temporary files, which cannot be written "
            f"({error}): make room, or name another folder in TMPDIR"
        ) from None


def _compile_in(folder: Path, source: KernelSource, function: str) -> CompiledKernel:
    compiled = _compile(source, folder)
    ptx, cubin = _read_dumped(folder, source)
    return CompiledKernel(
        function=function,
        device_object=_export(compiled, function, folder, strip_ptx),
        virtual_object=_export(
            compiled, function, folder, lambda image: add_ptx(strip_ptx(image), ptx)
        ),
        ptx=ptx,
        cubin=cubin,
        ptxas=_read_ptxas_version(),
        ptx_version=_find(_PTX_VERSION, ptx),
    )


def _compile(source: KernelSource, folder: Path) -> Any:
    from cutlass import cute
    from cutlass.base_dsl import compiler
    from cutlass.cutlass_dsl import CuTeDSL

    options = (
        compiler.EnableTVMFFI(True),
        compiler.GPUArch(source.target),
        compiler.KeepPTX(True),
        compiler.KeepCUBIN(True),
        compiler.DumpDir(str(folder)),
    )
    environment = CuTeDSL._get_dsl().envar
    before = environment._arch  # `arch` itself would ask the driver
    environment.arch = source.target
    try:
        host, arguments = source.make()
        # Without its engine CuTe DSL does not load its CUDA runtime into the process, whose symbols
        # would stand before the stand-in's in a later session on a virtual GPU.
        return cute.compile[options](host, *arguments, no_jit_engine=True)
    except HalfbyteError:
        raise
    except Exception as error:
        raise HalfbyteError(
            f"CuTe DSL cannot compile {source}: {type(error).__name__}: {error}"
        ) from error
    finally:
        environment._arch = before


def _read_dumped(folder: Path, source: KernelSource) -> tuple[str, bytes]:
    texts = [path.read_text() for path in sorted(folder.glob("*.ptx"))]
    cubins = [path.read_bytes() for path in sorted(folder.glob("*.cubin"))]
    if len(texts) != 1 or len(cubins) != 1:
        raise HalfbyteError(
            f"{source.name}: CuTe DSL wrote {len(texts)} PTX files and {len(cubins)} cubins; one "
            "of each is wanted, from a host function that launches kernels (is CUTE_DSL_DRYRUN "
            "set?)"
        )
    check_ptx_target(texts[0], source)
    return texts[0], cubins[0]


def check_ptx_target(ptx: str, source: KernelSource) -> None:
    """Raise HalfbyteError where `ptx` was made for another target than the source's."""
    target = _find(_TARGET, ptx)
    if target != source.target:
        raise HalfbyteError(
            f"{source.name}: the compiler made code for {target or 'no target'} where "
            f"{source.target} was asked for; it would fail on the GPU, so that it is not used"
        )


def _find(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _export(compiled: Any, function: str, folder: Path, change: Callable[[bytes], bytes]) -> bytes:
    """Return the host object file, every kernel image in it changed by `change`."""
    change_images(compiled.ir_module, change)
    path = folder / "exported.o"
    compiled.export_to_c(str(path), function_name=function)
    return path.read_bytes()


def _read_ptxas_version() -> str:
    version = importlib.import_module("cutlass.base_dsl.version_info").CUDA_VERSION
    return f"{version.major}.{version.minor}"
