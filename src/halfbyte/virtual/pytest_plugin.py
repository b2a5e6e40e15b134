"""A pytest fixture for tests of GPU programs: `pytest -p halfbyte.virtual.pytest_plugin`.

    def test_my_kernel(virtual_gpu):
        run_my_kernel()
        assert len(virtual_gpu.log) == 1

The option `--virtual-gpu b300` and the marker `@pytest.mark.virtual_gpu("h200")` choose the GPU.
"""

from collections.abc import Iterator

import pytest

from halfbyte.virtual.driver.session import cuda


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--virtual-gpu`."""
    parser.addoption(
        "--virtual-gpu", default="b200", help="the GPU of the fixture virtual_gpu: b200, b300, ..."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that chooses the GPU of one test."""
    config.addinivalue_line("markers", "virtual_gpu(name): the GPU of the fixture virtual_gpu")


@pytest.fixture
def virtual_gpu(request: pytest.FixtureRequest) -> Iterator[cuda]:
    """Return a session in which "cuda" is a virtual GPU; findings fail the test, notes do not."""
    marker = request.node.get_closest_marker("virtual_gpu")
    name = marker.args[0] if marker is not None else request.config.getoption("--virtual-gpu")
    with cuda(name) as session:
        yield session
    all_found = [finding for record in session.log for finding in record.findings]
    found = [str(one) for one in all_found if not one.is_note]
    assert not found, "the virtual GPU reports:\n" + "\n".join(found)
