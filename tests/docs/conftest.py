"""One virtual B200 for all pages of a module."""

from collections.abc import Iterator
from typing import Any

import pytest

import halfbyte.virtual
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts


@pytest.fixture(scope="module")
def b200() -> Iterator[Any]:
    """Return the session in which "cuda" is a virtual B200."""
    missing = [*find_missing_parts(), *find_absent_packages()]
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")
    with halfbyte.virtual.cuda("b200") as gpu:
        yield gpu
