"""An eager call of a layer leaves the dispatcher out, and only where nobody would see the op."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte.errors import UsageError
from halfbyte.nn.w4a4_linear import W4A4Linear
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

OP_NAME = "halfbyte::w4a4_linear"
_module_of_op: Any = importlib.import_module("halfbyte.ops.w4a4_linear")


class SeenOps(TorchDispatchMode):
    """Writes down the names of the ops that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def make_module(pair: tuple[str, str | None] = FORMAT_PAIRS[0]) -> W4A4Linear:
    return W4A4Linear(make_linear(LinearShape(n=24, k=100), pair))


@pytest.fixture
def refused_op(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """Let the op itself raise; return what it raises."""

    class OpCalledError(Exception):
        pass

    def refuse(*_: Any) -> None:
        raise OpCalledError

    monkeypatch.setattr(_module_of_op, "w4a4_linear", refuse)
    return OpCalledError


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_direct_call_equals_the_op(pair: tuple[str, str | None]) -> None:
    module, x = make_module(pair), make_input(5, 100, torch.bfloat16)
    arguments = module.list_running_parts(), module.spec.encode()
    assert torch.equal(module(x), torch.ops.halfbyte.w4a4_linear(x, *arguments))


def test_eager_call_of_plain_tensors_is_direct(refused_op: type[Exception]) -> None:
    module, x = make_module(), make_input(5, 100)
    assert module(x).shape == (5, 24)
    with torch.no_grad():  # nothing is recorded there, whatever asks for it
        assert module(x.requires_grad_()).shape == (5, 24)
    with pytest.raises(refused_op):
        module(x)


def test_part_that_asks_for_a_gradient_goes_through_the_op(refused_op: type[Exception]) -> None:
    module, x = make_module(), make_input(5, 100)
    assert module.bias is not None
    module.bias.requires_grad_()
    with pytest.raises(refused_op):
        module(x)


def test_subclass_and_transform_go_through_the_op(refused_op: type[Exception]) -> None:
    class Marked(torch.Tensor):
        pass

    module, x = make_module(), make_input(5, 100)
    with pytest.raises(refused_op):
        module(x.as_subclass(Marked))
    with pytest.raises(refused_op):
        torch.func.vmap(module)(x.reshape(5, 1, 100))
    with pytest.raises(refused_op), torch.device("cpu"):
        module(x)


def test_backward_is_refused_by_name() -> None:
    y = make_module()(make_input(5, 100).requires_grad_())
    with pytest.raises(UsageError, match="has no backward pass"):
        y.sum().backward()


def test_modes_and_profiler_see_the_op() -> None:
    module, x = make_module(), make_input(5, 100)
    with SeenOps() as seen:
        module(x)
    assert seen.names.count(OP_NAME) == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(x)
    assert OP_NAME in {event.key for event in profile.key_averages()}


def test_a_torch_without_these_names_dispatches_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_get_tracing_state")
    assert any(watcher() for watcher in _module_of_op._list_watchers())
