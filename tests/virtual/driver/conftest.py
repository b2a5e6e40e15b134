"""Sessions on a core that runs nothing, so that the driver is tested alone."""

from collections.abc import Iterator

import pytest

from halfbyte.errors import MissingDependencyError
from halfbyte.virtual.driver.session import cuda
from halfbyte.virtual.driver.stand_in import find_library
from tests.virtual.driver.fake_core import FakeDevice


@pytest.fixture(autouse=True)
def built_stand_in() -> None:
    try:
        find_library()
    except MissingDependencyError as error:
        pytest.skip(f"needs a C++ compiler at install: {error}")


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice("b200")


@pytest.fixture
def session(device: FakeDevice) -> Iterator[cuda]:
    with cuda(device=device) as active:
        yield active
