"""GPUs for kernel tests, virtual ones where there are none, and one compilation of each kernel.

Where the machine has the GPU itself, the same tests run on it: kernels come from the artifacts that
HALFBYTE_ARTIFACTS names, or are compiled.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import halfbyte.virtual
from halfbyte.arch.gpus import find_gpu
from halfbyte.device.kernel_source import KernelSource
from halfbyte.runtime.targets import read_device_target
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.kernels.compiled_source import IS_ON_SILICON, compile_source_once

CompileSource = Callable[[KernelSource], Any]


def _open_gpu(name: str) -> Iterator[Any]:
    if IS_ON_SILICON:
        if read_device_target() != find_gpu(name).target:
            pytest.skip(f"this machine has a GPU, and no {name}")
        yield SimpleNamespace(log=[])
        return
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
def gpu(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the session on the GPU that an indirect parameter of this name names.

    For modules that run on several, each closed before the next: not beside the fixtures above.
    """
    yield from _open_gpu(request.param)


@pytest.fixture(scope="module")
def compile_source() -> CompileSource:
    """Return a function that compiles a KernelSource once and returns what to call with tensors.

    Use it together with the fixture of a GPU: CuTe DSL compiles for the session that is open.
    """
    compiled: dict[str, Any] = {}

    def compile_once(source: KernelSource) -> Any:
        key = repr((source.name, source.target, source.config))
        if key not in compiled:
            compiled[key] = compile_source_once(source)
        return compiled[key]

    return compile_once
