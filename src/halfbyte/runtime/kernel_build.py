"""Turns a kernel source into the parts that an entry on disk holds."""

import logging
from pathlib import Path

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import HalfbyteError, MissingDependencyError
from halfbyte.runtime.cute_compiler import CompiledKernel, check_compiler, compile_source
from halfbyte.runtime.kernel_entry import (
    CUBIN,
    DEVICE_LIBRARY,
    DEVICE_OBJECT,
    PTX,
    VIRTUAL_LIBRARY,
    VIRTUAL_OBJECT,
    KernelEntry,
    KernelFacts,
    write_entry,
)
from halfbyte.runtime.kernel_key import read_toolchain
from halfbyte.runtime.linking import (
    find_c_compiler,
    find_runtime_archive,
    link_for_device,
    link_for_virtual,
)

_log = logging.getLogger(__name__)


def build_entry(source: KernelSource, source_key: str, folder: Path) -> KernelEntry:
    """Compile a source and write its entry to `folder`.

    Raises:
        MissingDependencyError: CuTe DSL or TVM FFI is not installed.
        OSError: the folder cannot be written.
    """
    check_compiler()
    toolchain = read_toolchain()
    if toolchain is None:  # importable, but installed in a way that tells no version
        raise MissingDependencyError(
            "nvidia-cutlass-dsl or apache-tvm-ffi has no version on record; reinstall them: "
            'pip install "halfbyte[kernels]"'
        )
    compiled = compile_source(source)
    facts = KernelFacts(
        name=source.name,
        config=repr(source.config),
        target=source.target,
        source_key=source_key,
        function=compiled.function,
        toolchain=toolchain,
        ptxas=compiled.ptxas,
        ptx_version=compiled.ptx_version,
    )
    return write_entry(folder, facts, make_parts(compiled))


def make_parts(compiled: CompiledKernel) -> dict[str, bytes]:
    """Return file name -> bytes: shared objects, or object files where nothing can link them."""
    parts = {PTX: compiled.ptx.encode(), CUBIN: compiled.cubin}
    compiler, archive = find_c_compiler(), find_runtime_archive()
    if compiler is not None and archive is not None:
        try:
            parts[DEVICE_LIBRARY] = link_for_device(compiler, archive, compiled.device_object)
            parts[VIRTUAL_LIBRARY] = link_for_virtual(compiler, compiled.virtual_object)
            return parts
        except HalfbyteError as error:  # a compiler without its linker, or CC that is none
            _log.warning("%s; the kernel needs CuTe DSL to be loaded", error)
            parts.pop(DEVICE_LIBRARY, None)
    parts[DEVICE_OBJECT] = compiled.device_object
    parts[VIRTUAL_OBJECT] = compiled.virtual_object
    return parts
