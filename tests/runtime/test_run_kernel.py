"""Kernels on the virtual GPU: from CPU tensors, in a session, prepared, in CUDA graphs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.runtime.compile_kernel import compile_kernel
from halfbyte.runtime.run_kernel import (
    collect_sources,
    prepare_kernel,
    record_launches,
    run_kernel,
)
from halfbyte.runtime.virtual_device import (
    LentTensors,
    check_findings,
    find_backend_gpu,
    find_runtime,
    run_on_virtual_gpu,
)
from halfbyte.virtual.driver.session import cuda
from halfbyte.virtual.memory import ALIGNMENT
from halfbyte.virtual.report import KernelFault
from tests.runtime.scaled_sum import ScaledSumConfig, make_source

pytestmark = pytest.mark.usefixtures("built_stand_in", "cache")
N = 300
SOURCE = make_source()


@pytest.fixture
def session() -> Iterator[cuda]:
    with cuda("b200") as active:
        yield active


def make_vectors(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(N, generator=generator) for _ in range(2))
    return a.to(device), b.to(device), torch.full((N,), float("nan")).to(device)


def check(y: torch.Tensor, scale: float = 1.0) -> None:
    a, b, _ = make_vectors("cpu")
    assert torch.equal(y.cpu(), scale * (a + b))


def test_cpu_tensors_run_on_a_virtual_gpu_and_torch_stays_as_it_is() -> None:
    function, is_available = torch.empty, torch.cuda.is_available()
    a, b, y = make_vectors("cpu")
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)
    assert torch.empty is function
    assert torch.cuda.is_available() == is_available
    assert y.device.type == "cpu"


@pytest.mark.parametrize(
    ("gpu", "target"), [("b300", "sm_103a"), ("h200", "sm_90a"), ("rtx5090", "sm_120a")]
)
def test_each_virtual_gpu_runs_its_target(gpu: str, target: str) -> None:
    a, b, y = make_vectors("cpu")
    run_kernel(make_source(ScaledSumConfig(2.0, target)), a, b, y, N, virtual_gpu=gpu)
    check(y, 2.0)


def test_two_configurations_do_not_mix() -> None:
    a, b, y = make_vectors("cpu")
    run_kernel(make_source(ScaledSumConfig(2.0)), a, b, y, N, virtual_gpu="b200")
    check(y, 2.0)
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)


def test_views_share_their_memory_on_the_device() -> None:
    a, b, _ = make_vectors("cpu")
    both = torch.full((2 * N + 4,), float("nan"))
    both[:N] = a
    (record,) = run_on_virtual_gpu("b200", SOURCE, both[:N], b, both[N + 4 :], N)
    assert record.findings == ()
    check(both[N + 4 :])
    assert torch.equal(both[:N], a)
    assert both[N : N + 4].isnan().all()


def test_memory_that_is_only_read_is_not_written(tmp_path: Path) -> None:
    a, b, y = make_vectors("cpu")
    (tmp_path / "weights").write_bytes(bytes(64) + a.numpy().tobytes())
    mapped = np.memmap(tmp_path / "weights", np.float32, mode="r")[16:]  # a write ends the process
    assert mapped.ctypes.data % ALIGNMENT != 0  # it must be copied
    with pytest.warns(UserWarning, match="not writable"):
        a = torch.from_numpy(mapped)
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)


def test_a_fault_is_raised_and_the_device_works_after_it() -> None:
    a, b, y = make_vectors("cpu")
    with pytest.raises(KernelFault, match="out-of-bounds"):
        run_kernel(SOURCE, a, b, y, 100 * N, virtual_gpu="b200")
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)


def test_lent_memory_is_taken_back() -> None:
    a, b, y = make_vectors("cpu")
    runtime = find_runtime(find_backend_gpu("virtual-b200") or pytest.fail("no GPU"))
    before = len(runtime.device.memory.buffers)
    with LentTensors(runtime, (a, (b, None, 3.5), a)) as lent:
        assert len(runtime.device.memory.buffers) == before + 2
        assert lent.arguments[1][1:] == (None, 3.5)
    assert len(runtime.device.memory.buffers) == before
    with pytest.raises(TypeError), LentTensors(runtime, (a, y)):
        raise TypeError("on the way")
    assert len(runtime.device.memory.buffers) == before
    assert len(runtime.log) == 0


def test_findings_are_raised_and_notes_are_not() -> None:
    from halfbyte.virtual.driver.launches import LaunchRecord, LaunchRequest
    from halfbyte.virtual.report import Finding

    request = LaunchRequest("k", (1, 1, 1), (1, 1, 1), None, 0, (), ())

    def make_record(kind: str) -> LaunchRecord:
        finding = Finding(kind, "what happened", None, (0, 0, 0), 0, 0, 0)
        return LaunchRecord(0, request, 1, 1, 0.0, (finding,))

    check_findings([make_record("exit-with-store-in-flight")])
    with pytest.raises(Exception, match="k: over-arrival: what happened"):
        check_findings([make_record("exit-with-store-in-flight"), make_record("over-arrival")])


def test_backends_name_virtual_gpus() -> None:
    gpu = find_backend_gpu("virtual-b300")
    assert gpu is not None
    assert gpu.target == "sm_103a"
    assert find_backend_gpu("cpu") is None
    with pytest.raises(UsageError, match="b200"):
        find_backend_gpu("virtual-b100")


def test_a_source_for_another_target_is_refused_with_both() -> None:
    with pytest.raises(UnsupportedHardwareError, match=r"sm_100a.*B300 runs sm_103a"):
        run_kernel(SOURCE, *make_vectors("cpu"), N, virtual_gpu="b300")


def test_cpu_tensors_without_a_virtual_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match=r"\[300\] is on cpu.*virtual-b200"):
        run_kernel(SOURCE, *make_vectors("cpu"), N)
    with pytest.raises(UsageError, match=r"\[300\] is on cpu"):
        prepare_kernel(SOURCE, *make_vectors("cpu"), N)


# In a session of the user's.


def test_cuda_tensors_run_in_the_session(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    run_kernel(SOURCE, a, b, y, N)
    check(y)
    assert len(session.log) == 1


def test_the_backend_uses_the_session_s_gpu_and_no_other(session: cuda) -> None:
    a, b, y = make_vectors("cpu")
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)
    assert len(session.log) == 1
    other = make_source(ScaledSumConfig(2.0, "sm_103a"))
    with pytest.raises(UsageError, match=r"virtual-b300 inside a session on the virtual b200"):
        run_kernel(other, a, b, y, N, virtual_gpu="b300")


def test_another_target_is_refused_before_the_launch(session: cuda) -> None:
    other = make_source(ScaledSumConfig(2.0, "sm_103a"))
    with pytest.raises(UnsupportedHardwareError, match=r"sm_103a, and NVIDIA B200.*runs sm_100a"):
        run_kernel(other, *make_vectors("cuda"), N)
    assert len(session.log) == 0


def test_every_session_gets_the_kernel_anew() -> None:
    for _ in range(3):
        with cuda("b200") as active:
            a, b, y = make_vectors("cuda")
            run_kernel(SOURCE, a, b, y, N)
            check(y)
            assert len(active.log) == 1
        a, b, y = make_vectors("cpu")  # and between them there is the one kept
        run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
        check(y)


def test_recorded_launches_repeat_what_ran_and_nothing_else_is_recorded(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    run_kernel(SOURCE, a, b, y, N)
    with record_launches() as launches:
        run_kernel(SOURCE, a, b, y, N)
    run_kernel(SOURCE, a, b, y, N)
    assert len(launches) == 1
    assert len(session.log) == 3
    assert launches[0].arguments[2] is y
    y.fill_(float("nan"))
    launches[0].launch()
    check(y)


def test_collected_sources_are_not_run() -> None:
    a, b, y = make_vectors("cpu")
    with collect_sources() as sources:
        run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    assert sources == [SOURCE]
    assert y.isnan().all()
    run_kernel(SOURCE, a, b, y, N, virtual_gpu="b200")
    check(y)


def test_a_prepared_launch_runs_when_told_and_not_before(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    prepared = prepare_kernel(SOURCE, a, b, y, N)
    assert len(session.log) == 0
    assert y.cpu().isnan().all()
    prepared.launch()
    check(y)
    y.fill_(float("nan"))
    prepared.launch()
    check(y)
    assert len(session.log) == 2


def test_prepare_refuses_wrong_arguments_at_once(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    with pytest.raises(ValueError, match="float32"):
        prepare_kernel(SOURCE, a, b, y.half(), N)
    run_kernel(SOURCE, a, b, y, N)  # launches are not left out from then on
    check(y)


def test_a_prepared_launch_is_captured_in_a_cuda_graph(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    prepared = prepare_kernel(SOURCE, a, b, y, N)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared.launch()
        prepared.launch()
    assert len(session.log) == 0
    graph.replay()
    check(y)
    a.mul_(2)
    b.mul_(2)
    graph.replay()
    check(y, 2.0)
    assert len(session.log) == 4


def test_a_prepared_launch_keeps_its_arguments(session: cuda) -> None:
    a, b, y = make_vectors("cuda")
    prepared = prepare_kernel(SOURCE, a.clone(), b.clone(), y, N)
    prepared.launch()
    check(y)


def test_a_fault_in_a_session_is_the_fault_itself(session: cuda) -> None:
    with pytest.raises(KernelFault, match="out-of-bounds"):
        run_kernel(SOURCE, *make_vectors("cuda"), 100 * N)


def test_kernel_and_ptx_are_told(session: cuda) -> None:
    kernel = compile_kernel(SOURCE)
    assert kernel is compile_kernel(make_source())
    assert "scaled_sum for sm_100a" in repr(kernel)
    assert ".target sm_100a" in kernel.read_ptx()
