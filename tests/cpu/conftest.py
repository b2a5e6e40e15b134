"""Runs a test on each path of the CPU backend that this machine has."""

import pytest

from halfbyte.native import library
from halfbyte.native.library import LEVELS, available_levels


@pytest.fixture(params=["torch", *LEVELS])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path in use: "torch", or the compiled loops at one instruction set."""
    name = str(request.param)
    if name == "torch":
        monkeypatch.setenv("HALFBYTE_NATIVE", "0")
        return name
    monkeypatch.delenv("HALFBYTE_NATIVE", raising=False)
    loaded = library()
    if loaded is None:
        pytest.skip("the compiled library is not built: reinstall halfbyte with a C++ compiler")
    if name not in available_levels(loaded):
        pytest.skip(f"this CPU or build has no {name}")
    monkeypatch.setenv("HALFBYTE_NATIVE_ISA", name)
    return name
