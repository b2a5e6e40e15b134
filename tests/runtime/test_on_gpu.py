"""The same kernels on an NVIDIA GPU, from artifacts or compiled; skipped where there is none.

Run on another machine than the compiler's with HALFBYTE_ARTIFACTS naming artifacts of
`tests.runtime.scaled_sum` (scale 2 and 3) for its GPU.
"""

import dataclasses

import pytest
import torch

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import UnsupportedHardwareError
from halfbyte.runtime.compile_kernel import compile_kernel, describe_absence
from halfbyte.runtime.run_kernel import prepare_kernel, run_kernel
from halfbyte.runtime.targets import read_device_target
from tests.runtime.scaled_sum import ScaledSumConfig, make_source

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

N = 1000
Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_gpu_source(scale: float) -> KernelSource:
    source = make_source(ScaledSumConfig(scale, read_device_target()))
    absence = describe_absence(source)
    if absence:
        pytest.skip(f"needs the compiler or an artifact: {absence}")
    return source


@pytest.fixture
def source() -> KernelSource:
    return make_gpu_source(2.0)


@pytest.fixture
def vectors() -> Vectors:
    a, b = (torch.randn(N, device="cuda") for _ in range(2))
    return a, b, torch.full((N,), float("nan"), device="cuda")


def check(vectors: Vectors, scale: float = 2.0) -> None:
    torch.cuda.synchronize()
    a, b, y = vectors
    assert torch.equal(y, scale * (a + b))


def test_numbers_are_right(source: KernelSource, vectors: Vectors) -> None:
    run_kernel(source, *vectors, N)
    check(vectors)


def test_the_first_launch_may_be_a_prepared_one_in_a_graph(vectors: Vectors) -> None:
    source = make_gpu_source(3.0)
    prepared = prepare_kernel(source, *vectors, N)
    torch.cuda.synchronize()
    assert vectors[2].isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
    torch.cuda.synchronize()
    assert vectors[2].isnan().all()
    graph.replay()
    check(vectors, 3.0)


def test_a_launch_goes_to_the_current_stream(source: KernelSource, vectors: Vectors) -> None:
    a, b, y = vectors
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        a.mul_(2)  # a launch on another stream would read `a` before this
        run_kernel(source, a, b, y, N)
    stream.synchronize()
    check(vectors)


def test_another_target_is_refused_and_leaves_no_error_behind(
    source: KernelSource, vectors: Vectors
) -> None:
    other = "sm_103a" if source.target != "sm_103a" else "sm_100a"
    with pytest.raises(UnsupportedHardwareError, match=rf"{other}.*runs {source.target}"):
        run_kernel(dataclasses.replace(source, target=other), *vectors, N)
    run_kernel(source, *vectors, N)
    check(vectors)


def test_wrong_arguments_are_refused_and_leave_no_error_behind(
    source: KernelSource, vectors: Vectors
) -> None:
    a, b, y = vectors
    with pytest.raises(ValueError, match="float32"):
        run_kernel(source, a, b, y.half(), N)
    run_kernel(source, *vectors, N)
    check(vectors)


def test_loading_needs_no_compiler(source: KernelSource) -> None:
    import sys

    kernel = compile_kernel(source)
    assert f".target {source.target}" in kernel.read_ptx()
    if describe_absence(dataclasses.replace(source, name="another")):
        assert "cutlass" not in sys.modules
