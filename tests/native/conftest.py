"""Fixtures: the compiled library at each instruction set this machine has, and the torch path."""

from collections.abc import Callable, Iterator

import pytest
import torch

from halfbyte.native import NativeLibrary, library
from halfbyte.native.library import LEVELS, available_levels


@pytest.fixture
def use_torch_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setenv("HALFBYTE_NATIVE", "0")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cap the library at one instruction set; skip where it is not built or the CPU lacks it."""
    monkeypatch.delenv("HALFBYTE_NATIVE", raising=False)
    loaded = library()
    if loaded is None:
        pytest.skip("the compiled library is not built: reinstall halfbyte with a C++ compiler")
    if request.param not in available_levels(loaded):
        pytest.skip(f"this CPU or build has no {request.param}")
    monkeypatch.setenv("HALFBYTE_NATIVE_ISA", request.param)
    return str(request.param)


@pytest.fixture
def loaded(level: str) -> NativeLibrary:
    found = library()
    assert found is not None
    assert found.isa == level
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
