"""Fixtures for all tests."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples on every run, so that a red run is about the change at hand; `make test-long`
# looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Give torch one thread: for many small operations, on machines that are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
