"""torch's CUDA device as the measuring code sees it, on a virtual GPU: order and counts alone."""

from collections.abc import Iterator

import pytest
import torch

from halfbyte.bench.speed.gpu_facts import describe_run
from halfbyte.bench.speed.own_cases import record_own
from halfbyte.bench.speed.own_linear import OWN_MODES
from halfbyte.bench.speed.plan import SpeedRequest, open_bench
from halfbyte.bench.speed.problem import make_problem
from halfbyte.bench.speed.settings import LinearShape
from halfbyte.bench.speed.timing_device import CudaTimingDevice
from halfbyte.bench.speed.trial import measure_error
from halfbyte.errors import UnsupportedHardwareError
from halfbyte.virtual.driver.session import cuda

SHAPE = LinearShape(5, 256, 256, 16)


@pytest.fixture
def h200() -> Iterator[cuda]:
    with cuda("h200") as session:
        yield session


def test_a_graph_of_recorded_launches_computes_the_linear_and_is_replayed_as_told(
    h200: cuda,
) -> None:
    problem = make_problem(SHAPE, torch.bfloat16, torch.device("cuda"), 1)
    own = record_own(problem, OWN_MODES["fp8"])
    device = CudaTimingDevice()
    graph = device.capture(own.quantize)
    before, looks = len(h200.log), []
    times_ms = device.time_replays(graph, 2, 3, lambda: looks.append(1))
    assert len(times_ms) == 3
    assert len(h200.log) - before == 5 * len(own.quantize)
    device.synchronize()
    expected = own.expect()
    assert measure_error(expected) <= expected.limit


def test_the_size_of_l2_and_the_gpu_s_name_come_from_the_device(h200: cuda) -> None:
    assert CudaTimingDevice().l2_bytes == 50 * 2**20
    facts = describe_run("halfbyte bench", 7)
    assert (facts["gpu"], facts["SMs"], facts["seed"]) == ("NVIDIA H200", "132", "7")


def test_times_of_a_virtual_gpu_are_refused(h200: cuda) -> None:
    with pytest.raises(UnsupportedHardwareError, match="virtual GPU"):
        open_bench(SpeedRequest(), 1, lambda line: None)
