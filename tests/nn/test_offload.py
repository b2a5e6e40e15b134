"""Offloaded weights: the same bits from what was placed, the state as before, and the way back."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import halfbyte.virtual
from halfbyte.errors import FormatError, UsageError
from halfbyte.nn import W4A4Linear, offload_weights
from halfbyte.nn.low_rank_stack import LowRankDelta, remove_delta, stack_delta
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.random_linears import LinearShape, make_input, make_linear

MISSING = [*find_missing_parts(), *find_absent_packages()]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
M, N, K = 20, 40, 200


@pytest.fixture
def h200() -> Iterator[halfbyte.virtual.cuda]:
    """Return a session in which "cuda" is a virtual H200."""
    with halfbyte.virtual.cuda("h200") as gpu:
        yield gpu


def make_module(mode: str = "fp8", **shape: bool) -> W4A4Linear:
    linear = make_linear(LinearShape(N, K, rank=20, dtype=torch.bfloat16, **shape))
    return W4A4Linear.from_record(linear, mode=mode)


def make_x() -> torch.Tensor:
    return make_input(M, K, torch.bfloat16).cuda()


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("parts", [True, False], ids=["scaled", "bare"])
def test_a_layer_runs_as_before(parts: bool) -> None:
    module, x = make_module(parts=parts).cuda(), make_x()
    state = {name: part.cpu() for name, part in module.state_dict().items()}
    wanted, placed, plan = module(x).cpu(), module.placed_bytes, module.plan_call(M)
    model = nn.Sequential(module)
    assert offload_weights(model) == N * 104 + N * 13  # codes and scales of K = 208
    assert module.weight_data.device.type == module.weight_scales.device.type == "cpu"
    assert torch.equal(module(x).cpu(), wanted)
    assert module.plan_call(M) == plan
    assert module.placed_bytes == placed
    assert offload_weights(model) == 0
    after = module.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[name].cpu(), part) for name, part in state.items())
    module.to("cuda")
    assert module.weight_data.is_cuda
    assert torch.equal(module(x).cpu(), wanted)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("mode", ["fp8", "bf16"])
def test_adapters_come_and_go(mode: str) -> None:
    module, x = make_module(mode).cuda(), make_x()
    wanted = module(x).cpu()
    draw = torch.Generator().manual_seed(1)
    down, up = torch.randn((8, K), generator=draw), torch.randn((N, 8), generator=draw)
    delta = LowRankDelta(down.bfloat16().cuda(), up.bfloat16().cuda())
    stack_delta(module, "style", delta)
    with_delta = module(x).cpu()
    remove_delta(module, "style")
    module(x)
    offload_weights(module)
    stack_delta(module, "style", delta)
    assert torch.equal(module(x).cpu(), with_delta)
    remove_delta(module, "style")
    assert torch.equal(module(x).cpu(), wanted)


@pytest.mark.usefixtures("h200")
def test_compiled_modules_run_offloaded() -> None:
    torch._dynamo.reset()
    module, x = make_module().cuda(), make_x()
    wanted = module(x).cpu()
    offload_weights(module)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x).cpu(), wanted)


@pytest.mark.usefixtures("h200")
def test_what_was_not_placed_needs_the_weights_back() -> None:
    module, x = make_module().cuda(), make_x()
    with pytest.raises(UsageError, match="the module has not run yet: call the model once, or"):
        offload_weights(module)
    module(x)
    offload_weights(module)
    module.mode = "bf16"
    with pytest.raises(FormatError, match=r"weight_data is on cpu, offloaded, .*module.to\('cuda"):
        module(x)
    module.to("cuda")
    assert module(x).is_cuda
    module.cpu()
    with pytest.raises(FormatError, match="weight_data is on cpu, x on cuda:0"):
        module(x)


def test_only_hopper_has_a_copy_of_its_own() -> None:
    with pytest.raises(UsageError, match="0 is on cpu: weights are offloaded from Hopper GPUs"):
        offload_weights(nn.Sequential(make_module()))
    with halfbyte.virtual.cuda("b200"):
        module = make_module().cuda()
        module(make_x())
        with pytest.raises(UsageError, match="is on cuda:0: weights are offloaded from Hopper"):
            offload_weights(module)
