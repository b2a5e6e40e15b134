"""A kernel that is compiled once for all tests, and caches of their own for each."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from halfbyte.errors import MissingDependencyError
from halfbyte.runtime import artifact
from halfbyte.runtime.compile_kernel import find_entry, forget_loaded
from halfbyte.runtime.kernel_cache import FOLDER_VARIABLE
from halfbyte.runtime.kernel_entry import KernelEntry
from halfbyte.runtime.linking import find_c_compiler
from halfbyte.virtual.driver.stand_in import find_library
from tests.runtime.scaled_sum import make_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that holds `scaled_sum` for sm_100a; never written by a test."""
    for module in ("cutlass", "tvm_ffi"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs the extra `kernels`: {module} is not installed")
    if find_c_compiler() is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("kernels") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        patch.delenv(artifact.FOLDERS_VARIABLE, raising=False)
        find_entry(make_source())
    return folder


@pytest.fixture
def cache(compiled_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the compiled cache, in use; nothing is loaded and no artifact is in use."""
    folder = tmp_path / "cache"
    shutil.copytree(compiled_cache, folder)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    monkeypatch.delenv(artifact.FOLDERS_VARIABLE, raising=False)
    monkeypatch.setattr(artifact, "_added", [])
    monkeypatch.setattr(artifact, "_read", {})
    forget_loaded()
    yield folder
    forget_loaded()


@pytest.fixture
def entry(cache: Path) -> KernelEntry:
    """Return the compiled kernel in the cache."""
    return find_entry(make_source())


@pytest.fixture
def built_stand_in() -> None:
    """Skip where the virtual GPU is not built."""
    try:
        find_library()
    except MissingDependencyError as error:
        pytest.skip(f"needs a C++ compiler at install: {error}")


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a program in a process of its own and returns its output."""

    def run(program: str, check: bool = True, **environment: str) -> str:
        finished = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        assert not check or finished.returncode == 0, finished.stderr
        return finished.stdout if check else finished.stdout + finished.stderr

    return run
