"""Walking a model block by block: which inputs a block gets, and what is held meanwhile."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import FormatError
from halfbyte.nn.block_walk import BlockWalk, Call, find_blocks, make_calls, stop
from tests.nn.small_models import Decoder, ShiftedDecoder, count_hooks, make_model, make_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def walk_inputs(model: nn.Module, calls: list[Call]) -> tuple[bool, list[list[torch.Tensor]]]:
    """Return whether the walk is chained, and the first argument of each block in each call."""
    blocks = [block for _, block in find_blocks(model)]
    seen: list[list[torch.Tensor]] = []
    with torch.no_grad():
        walk = BlockWalk(model, blocks, calls)
        for block in blocks:
            inputs: list[torch.Tensor] = []

            def see(_: nn.Module, args: tuple[Any, ...], inputs: list[Any] = inputs) -> None:
                inputs.append(args[0].clone())

            walk.observe(lambda block=block, see=see: [block.register_forward_pre_hook(see)])
            seen.append(inputs)
            walk.advance()
    return walk.is_chained, seen


def capture_inputs(model: nn.Module, calls: list[Call]) -> list[list[torch.Tensor]]:
    """Return what the model itself hands to each block."""
    blocks = [block for _, block in find_blocks(model)]
    seen: list[list[torch.Tensor]] = [[] for _ in blocks]
    handles = [
        block.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].clone()))
        for block, kept in zip(blocks, seen, strict=True)
    ]
    with torch.no_grad():
        for call in calls:
            model(*call.args, **call.kwargs)
    for handle in handles:
        handle.remove()
    return seen


def assert_walk_is_right(model: nn.Module, calls: list[Call], *, is_chained: bool) -> None:
    model.eval()
    found, seen = walk_inputs(model, calls)
    assert found == is_chained
    for ours, wanted in zip(seen, capture_inputs(model, calls), strict=True):
        assert len(ours) == len(wanted)
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert count_hooks(model) == 0


def test_chained_blocks_run_on_kept_inputs() -> None:
    assert_walk_is_right(make_model(), make_calls(make_tokens()), is_chained=True)


def test_block_with_an_argument_of_its_own_is_replayed() -> None:
    model = make_model(ShiftedDecoder, is_zero=False)
    assert_walk_is_right(model, make_calls(make_tokens()), is_chained=False)


def test_keyword_arguments_and_several_kinds_of_batches() -> None:
    tokens = make_tokens()
    calls = make_calls([{"tokens": tokens[0], "scale": 2.0}, (tokens[1],), tokens[2]])
    assert [len(call.args) for call in calls] == [0, 1, 1]
    assert_walk_is_right(make_model(), calls, is_chained=True)


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.linear(x))


class CachedBlock(nn.Module):
    """Gets an object that remembers every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, cache: "Cache") -> torch.Tensor:
        cache.seen.append(x)
        y: torch.Tensor = self.linear(x) + len(cache.seen)
        return y


class Cache:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Stack(nn.Module):
    def __init__(self, make_block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for layer in self.layers:
            x = layer(x)
        return x


class CachedStack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return x


class BackwardStack(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "make_block"),
    [
        (Stack, InPlaceBlock),
        (CachedStack, CachedBlock),
        (BackwardStack, lambda: nn.Linear(64, 64)),
    ],
    ids=["writes into its input", "keeps a cache", "other order"],
)
def test_blocks_that_may_not_run_twice_on_one_input_are_replayed(
    kind: type[Stack], make_block: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    calls = make_calls([torch.randn(5, 64), torch.randn(2, 64)])
    assert_walk_is_right(kind(make_block), calls, is_chained=False)


def test_blocks_that_return_tuples_are_chained_by_their_first_item() -> None:
    class TupleBlock(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), None

    class TupleStack(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)[0]
            return x

    model = TupleStack(lambda: TupleBlock(64, 64))
    assert_walk_is_right(model, make_calls(torch.randn(5, 64)), is_chained=True)


def test_block_that_stands_in_the_list_twice_is_seen_in_both_places() -> None:
    block = nn.Linear(64, 64)
    model = Stack(lambda: block, 2).eval()
    calls = make_calls([torch.randn(5, 64)])
    found, seen = walk_inputs(model, calls)
    assert not found
    assert len(seen[0]) == 2
    assert not torch.equal(seen[0][0], seen[0][1])


def test_model_that_never_calls_its_blocks_is_replayed_and_sees_nothing() -> None:
    class Lazy(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    found, seen = walk_inputs(Lazy(lambda: nn.Linear(64, 64)).eval(), make_calls(torch.ones(1, 64)))
    assert not found
    assert seen == [[], [], []]


def test_an_error_in_the_model_leaves_no_hook_behind() -> None:
    model = make_model(ShiftedDecoder).eval()
    calls = make_calls(make_tokens())
    blocks = [block for _, block in find_blocks(model)]
    walk = BlockWalk(model, blocks, calls)

    def see(*_: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        walk.observe(lambda: [blocks[0].register_forward_pre_hook(see)])
    assert count_hooks(model) == 0


def test_stop_ends_the_call_and_is_enough_ends_the_batches() -> None:
    model = make_model().eval()
    blocks = [block for _, block in find_blocks(model)]
    walk = BlockWalk(model, blocks, make_calls(make_tokens(5)))
    ran: list[str] = []

    def hooks() -> list[Any]:
        attention = blocks[0].attention
        return [
            attention.register_forward_pre_hook(lambda *_: (ran.append("in"), stop())[0]),
            attention.register_forward_hook(lambda *_: ran.append("out")),
        ]

    walk.observe(hooks, lambda: len(ran) == 2)
    assert ran == ["in", "in"]


@pytest.mark.parametrize("kind", [Decoder, ShiftedDecoder])
@pytest.mark.parametrize("batches", [1, 4])
def test_inputs_of_one_block_alone_are_held(kind: type[nn.Module], batches: int) -> None:
    model = make_model(kind, num_layers=8).eval()
    blocks = [block for _, block in find_blocks(model)]
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def see(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal most
        if not any(ref() is args[0] for ref in alive):
            alive.append(weakref.ref(args[0]))
        most = max(most, sum(ref() is not None for ref in alive))

    handles = [block.register_forward_pre_hook(see) for block in blocks]
    with torch.no_grad():
        walk = BlockWalk(model, blocks, make_calls(make_tokens(batches)))
        for _ in blocks:
            walk.observe(lambda: [])
            walk.advance()
    for handle in handles:
        handle.remove()
    # Kept inputs of all batches, and one tensor on its way; not 8 blocks' worth.
    assert most <= batches + 2


def test_layers_are_the_list_with_the_most_linears() -> None:
    model = make_model()
    model.adapters = nn.ModuleList([nn.Linear(64, 64)])
    assert [name for name, _ in find_blocks(model)] == ["layers.0", "layers.1", "layers.2"]
    assert [name for name, _ in find_blocks(nn.Sequential(nn.Linear(2, 2)))] == [""]
    bare = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert [name for name, _ in find_blocks(bare)] == ["0", "1"]


@pytest.mark.parametrize("calibration", [[], (), iter([]), {"x": 1}, "text", 3], ids=repr)
def test_calibration_of_the_wrong_type_or_empty_is_refused(calibration: Any) -> None:
    with pytest.raises(FormatError, match="calibration"):
        make_calls(calibration)


def test_batch_of_the_wrong_type_is_named_by_its_place() -> None:
    with pytest.raises(FormatError, match="calibration batch 1: int, wanted a tensor"):
        make_calls([torch.ones(1), 3])
