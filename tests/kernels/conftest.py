"""Virtual GPUs for kernel tests, and one compilation of each kernel a module."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import halfbyte.virtual
from halfbyte.device.kernel_source import KernelSource
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts

CompileSource = Callable[[KernelSource], Any]


def _open_gpu(name: str) -> Iterator[Any]:
    # A session a module, since sessions do not nest: tests of one module share one GPU.
    missing = [*find_missing_parts(), *find_absent_packages()]
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")
    with halfbyte.virtual.cuda(name) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def b200() -> Iterator[Any]:
    """Return the session in which "cuda" is a virtual B200 (sm_100a)."""
    yield from _open_gpu("b200")


@pytest.fixture(scope="module")
def b300() -> Iterator[Any]:
    """Return the session in which "cuda" is a virtual B300 (sm_103a)."""
    yield from _open_gpu("b300")


@pytest.fixture(scope="module")
def h200() -> Iterator[Any]:
    """Return the session in which "cuda" is a virtual H200 (sm_90a)."""
    yield from _open_gpu("h200")


@pytest.fixture(scope="module")
def rtx5090() -> Iterator[Any]:
    """Return the session in which "cuda" is a virtual RTX 5090 (sm_120a)."""
    yield from _open_gpu("rtx5090")


@pytest.fixture(scope="module")
def compile_source() -> CompileSource:
    """Return a function that compiles a KernelSource once and returns what to call with tensors.

    Use it together with the fixture of a GPU: CuTe DSL compiles for the session that is open.
    """
    compiled: dict[str, Any] = {}

    def compile_once(source: KernelSource) -> Any:
        key = repr((source.name, source.target, source.config))
        if key not in compiled:
            import cutlass.cute as cute

            host, arguments = source.make()
            compiled[key] = cute.compile(host, *arguments, options="--enable-tvm-ffi")
        return compiled[key]

    return compile_once
