"""Runs a test on each implementation of the block quantizer that is present."""

import pytest

from halfbyte.native import library


@pytest.fixture(params=["torch", "compiled"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the implementation that `quantize` uses during the test."""
    if request.param == "torch":
        monkeypatch.setenv("HALFBYTE_NATIVE", "0")
    else:
        monkeypatch.delenv("HALFBYTE_NATIVE", raising=False)
        if library() is None:
            pytest.skip("the compiled library is not built: install g++ and reinstall halfbyte")
    return request.param
