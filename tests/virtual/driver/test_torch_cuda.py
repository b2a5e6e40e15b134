"""torch's "cuda" device: what an unmodified program sees, and what the virtual GPU is told."""

import gc
import threading

import pytest
import torch

from halfbyte.errors import UsageError
from halfbyte.virtual.driver.session import cuda
from tests.virtual.driver.fake_core import FakeDevice

CUDA = torch.device("cuda", 0)


@pytest.mark.usefixtures("session")
def test_every_way_to_make_a_tensor_on_cuda_gives_one() -> None:
    host = torch.arange(6.0)
    made = {
        "factory": torch.empty(3, device="cuda"),
        "ordinal": torch.zeros(3, device="cuda:0"),
        "index": torch.zeros(3, device=0),
        "device": torch.ones(3, device=torch.device("cuda")),
        "tensor": torch.tensor([1, 2], device="cuda"),
        "cuda()": host.cuda(),
        "to text": host.to("cuda"),
        "to device and dtype": host.to(CUDA, torch.float16),
        "to keyword": host.to(device="cuda", non_blocking=True),
        "to other": host.to(torch.empty(1, device="cuda")),
        "as_tensor": torch.as_tensor(host, device="cuda"),
        "generator": torch.rand(3, generator=torch.Generator(device="cuda"), device="cuda"),
        "operator": host.cuda() + 1,
        "view": host.cuda().view(2, 3).t(),
        "like": torch.empty_like(host.cuda()),
        "new": host.cuda().new_zeros(4),
        "empty": torch.empty(0, device="cuda"),
        "module": torch.nn.Linear(3, 2).to("cuda").weight,
        "module cuda()": torch.nn.Linear(3, 2).cuda().bias,
    }
    assert {name: one.device for name, one in made.items()} == dict.fromkeys(made, CUDA)
    assert all(one.is_cuda and not one.is_cpu and one.get_device() == 0 for one in made.values())
    assert not host.is_cuda


@pytest.mark.usefixtures("session")
def test_host_and_device_never_share_memory() -> None:
    host = torch.zeros(64)
    there = host.cuda()
    there.fill_(1)
    back = there.cpu()
    there.fill_(2)
    assert host.tolist() == [0] * 64
    assert back.tolist() == [1] * 64
    assert not back.is_cuda
    assert there.to("cuda").data_ptr() == there.data_ptr()
    assert host.cpu().data_ptr() == host.data_ptr()


@pytest.mark.usefixtures("session")
def test_numpy_refuses_a_device_tensor_as_torch_does() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor"):
        torch.ones(2, device="cuda").numpy()
    assert torch.ones(2).numpy().tolist() == [1, 1]


def test_a_storage_is_registered_once_aligned_and_freed_with_its_last_view(
    session: cuda, device: FakeDevice
) -> None:
    tensor = torch.ones(1000, device="cuda", dtype=torch.float16)
    view = tensor[10:]
    address = tensor.data_ptr()
    assert address % 256 == 0
    assert device.memory.buffers[address].nbytes == 2000
    assert device.memory.buffers[address].name == "torch float16 [1000]"
    del tensor
    gc.collect()
    assert device.memory.freed == []
    del view
    gc.collect()
    assert device.memory.freed == [address]


def test_moving_a_result_to_aligned_memory_keeps_its_values_and_its_gradient(
    session: cuda,
) -> None:
    x = torch.randn(33, 7, device="cuda", requires_grad=True)
    y = (x * 3).t().contiguous()
    assert y.data_ptr() % 256 == 0
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.device == CUDA
    assert torch.equal(x.grad.cpu(), torch.full((33, 7), 3.0))


@pytest.mark.usefixtures("session")
def test_python_backward_functions_see_the_device() -> None:
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((gradient.device, torch.empty_like(gradient).device))
            return gradient * 2

    x = torch.ones(4, device="cuda", requires_grad=True)
    Double.apply(x).sum().backward()
    (gradient,) = torch.autograd.grad(Double.apply(x).sum(), x)
    assert seen == [(CUDA, CUDA)] * 2
    assert gradient.device == CUDA


@pytest.mark.usefixtures("session")
def test_a_custom_operator_for_cuda_runs_with_our_tensors() -> None:
    @torch.library.custom_op("halfbyte_test::add_one", mutates_args=(), device_types="cuda")
    def add_one(x: torch.Tensor) -> torch.Tensor:
        assert x.device == CUDA
        return x + torch.ones(1, device=x.device)

    result = torch.ops.halfbyte_test.add_one(torch.zeros(3, device="cuda"))
    assert result.device == CUDA
    assert result.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("session")
def test_a_thread_of_the_program_has_the_device_too() -> None:
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.empty(2, device="cuda").device))
    thread.start()
    thread.join()
    assert seen == [CUDA]


@pytest.mark.usefixtures("session")
def test_a_default_device_of_cuda_is_followed() -> None:
    with torch.device("cuda"):
        assert torch.empty(2).device == CUDA
        assert torch.empty(2, device="cpu").device.type == "cpu"
    assert torch.empty(2).device.type == "cpu"


@pytest.mark.usefixtures("session")
def test_dlpack_names_the_cuda_device_and_comes_back_as_the_same_memory() -> None:
    there = torch.arange(8, device="cuda")
    assert there.__dlpack_device__() == (2, 0)
    assert torch.ones(1).__dlpack_device__()[0] == 1
    back = torch.utils.dlpack.from_dlpack(there.__dlpack__())
    assert back.data_ptr() == there.data_ptr()
    assert back.device == CUDA


@pytest.mark.usefixtures("session")
def test_a_graph_replays_on_its_memory_and_runs_nothing_while_captured() -> None:
    x = torch.full((4,), 1.0, device="cuda")
    count = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        count.add_(1)
        count[0] = count[0] + 10
    assert count.item() == 0
    address = y.data_ptr()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value] * 4
    assert y.data_ptr() == address
    assert count.item() == 22


@pytest.mark.usefixtures("session")
def test_torch_cuda_describes_the_gpu() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (10, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 148
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_stream().cuda_stream == 0


def test_leaving_the_session_puts_torch_back(device: FakeDevice) -> None:
    before = (torch.cuda.is_available, torch.compile, torch.Generator, torch.version.cuda)
    with cuda(device=device):
        left_over = torch.ones(3, device="cuda")
        assert torch.cuda.is_available is not before[0]
    assert (torch.cuda.is_available, torch.compile, torch.Generator, torch.version.cuda) == before
    assert left_over.device.type == "cpu"
    assert device.memory.buffers == {}


@pytest.mark.usefixtures("session")
def test_sessions_do_not_nest() -> None:
    with pytest.raises(UsageError, match="a session on a virtual GPU is active"):
        cuda(device=FakeDevice()).__enter__()
    assert torch.empty(1, device="cuda").is_cuda
