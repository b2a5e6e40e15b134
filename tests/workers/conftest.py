"""One Ray for all tests of this folder; `RayWorkers` uses the Ray that it finds running."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Three worker processes."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=3,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=2**27,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The process that the workers are compared with has as many threads as they."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
