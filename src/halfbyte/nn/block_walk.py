"""Runs a model block by block on calibration inputs, holding one block's inputs at a time.

A block is an entry of the model's list of layers. Where each block's output is the next block's
first input, as in a decoder, a block runs on the inputs kept from the block before; any other
model is replayed from its own inputs up to the block at hand, which is slower and always right.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from halfbyte.errors import FormatError

Calibration = torch.Tensor | Sequence[Any] | None


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one forward call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _StopForwardError(Exception):
    """Ends a forward call early; what was wanted has been seen."""


def make_calls(calibration: torch.Tensor | Sequence[Any]) -> list[Call]:
    """Return one call of the model for each calibration batch.

    Args:
        calibration: one tensor (the model's only argument), or a sequence of batches, each a
            tensor, a tuple of positional arguments or a mapping of keyword arguments.

    Raises:
        FormatError: an empty calibration, or a batch of another type.
    """
    if isinstance(calibration, torch.Tensor):
        return [Call((calibration,), {})]
    if isinstance(calibration, str) or not isinstance(calibration, Sequence):
        raise FormatError(
            f"calibration: {type(calibration).__name__}, wanted a tensor or a sequence of batches; "
            "put a single batch, or what a loader yields, in a list"
        )
    calls = []
    for index, batch in enumerate(calibration):
        if isinstance(batch, torch.Tensor):
            calls.append(Call((batch,), {}))
        elif isinstance(batch, tuple):
            calls.append(Call(batch, {}))
        elif isinstance(batch, Mapping):
            calls.append(Call((), dict(batch)))
        else:
            raise FormatError(
                f"calibration batch {index}: {type(batch).__name__}, wanted a tensor, a tuple of "
                "arguments or a mapping of keyword arguments"
            )
    if not calls:
        raise FormatError("calibration holds no batch; pass None to quantize without data")
    return calls


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return names and modules of the model's layers: the ModuleList with the most linears.

    A model without such a list is one block with the name "".
    """
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            count = sum(isinstance(child, nn.Linear) for child in module.modules())
            if count and (best is None or count > best[0]):
                best = (count, name, module)
    if best is None:
        return [("", model)]
    prefix = f"{best[1]}." if best[1] else ""  # the model itself may be the list
    return [(f"{prefix}{index}", block) for index, block in enumerate(best[2])]


class BlockWalk:
    """Hands out the inputs of the linears of one block after the other.

    Attributes:
        is_chained: whether blocks run on kept inputs; else the model is replayed.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], calls: list[Call]) -> None:
        """Look at how the model calls its blocks, and keep the inputs of the first.

        Args:
            model: in eval mode; runs under no_grad.
            blocks: in the order in which they are to be visited.
            calls: the calibration.
        """
        self._model = model
        self._blocks = blocks
        self._calls = calls
        self._index = 0
        self.is_chained = len(blocks) > 1 and _is_chain(model, blocks, calls[0])
        self._inputs: list[Call] = []
        if self.is_chained:
            self._inputs = [_capture_call(model, blocks[0], call) for call in calls]

    def observe(
        self, hooks: Callable[[], list[Any]], is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Run the block at hand on its inputs with hooks in place.

        Args:
            hooks: registers forward hooks and returns their handles; one may raise `stop`.
            is_enough: asked after each batch; True leaves the others out.
        """
        handles = hooks()
        try:
            for run in self._runs():
                with stopping():
                    run()
                if is_enough():
                    break
        finally:
            for handle in handles:
                handle.remove()

    def advance(self) -> None:
        """Go to the next block; the kept inputs become the outputs of this one."""
        if self.is_chained and self._index + 1 < len(self._blocks):
            block = self._blocks[self._index]
            for index, call in enumerate(self._inputs):  # one by one: old inputs are let go
                output = block(*call.args, **call.kwargs)
                first = output[0] if isinstance(output, tuple) else output
                self._inputs[index] = Call((first, *call.args[1:]), call.kwargs)
        self._index += 1

    def _runs(self) -> Iterator[Callable[[], Any]]:
        block = self._blocks[self._index]
        if self.is_chained:
            for call in self._inputs:
                yield partial(block, *call.args, **call.kwargs)
            return
        for call in self._calls:
            yield partial(self._replay, block, call)

    def _replay(self, block: nn.Module, call: Call) -> None:
        # A block that stands in the list more than once runs more than once.
        is_repeated = sum(other is block for other in self._blocks) > 1
        handle = None if is_repeated else block.register_forward_hook(lambda *_: stop())
        try:
            self._model(*call.args, **call.kwargs)
        finally:
            if handle is not None:
                handle.remove()


def stop() -> None:
    """End the forward call that is being observed."""
    raise _StopForwardError


@contextmanager
def stopping() -> Iterator[None]:
    """Let a forward call be ended by `stop`."""
    with suppress(_StopForwardError):
        yield


def _capture_call(model: nn.Module, block: nn.Module, call: Call) -> Call:
    """Return the arguments with which the model calls `block`."""
    captured: list[Call] = []

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        captured.append(Call(args, dict(kwargs)))
        raise _StopForwardError

    handle = block.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        with stopping():
            model(*call.args, **call.kwargs)
    finally:
        handle.remove()
    if not captured:
        raise FormatError("the model does not call its first block on the calibration input")
    return captured[0]


def _is_chain(model: nn.Module, blocks: Sequence[nn.Module], call: Call) -> bool:
    """Return whether each block's output is the next one's first input, all else being equal.

    False too where a block may not be run twice on the same arguments: it writes into one of
    them, or gets an object that may keep a state (a cache).
    """
    watch = _ChainWatch(blocks)
    handles = [block.register_forward_pre_hook(watch.enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(watch.leave, with_kwargs=True) for block in blocks]
    try:
        with stopping():
            model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return watch.is_chain and watch.num_left == len(blocks)


class _ChainWatch:
    """Compares the calls of the blocks as they come; holds one block's output at a time."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        """Wait for the first of `blocks`."""
        self.is_chain = True
        self.num_left = 0
        self._blocks = blocks
        self._rest: Call | None = None  # what the first block got beside its first input
        self._output: Any = None
        self._marks: list[int | None] = []

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See the arguments of a block; end the forward call where there is no chain."""
        rest = Call(args[1:], dict(kwargs))
        if self._rest is None:
            is_next = bool(args) and _is_plain((rest.args, rest.kwargs))
            self._rest = rest
        else:
            is_next = bool(args) and args[0] is self._output and _is_same_call(rest, self._rest)
        if not is_next or block is not self._blocks[self.num_left]:
            self.is_chain = False
            stop()
        self._marks = [read_version(value) for value in (*args, *kwargs.values())]

    def leave(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """See the output of a block; end the forward call after the last."""
        if self._marks != [read_version(value) for value in (*args, *kwargs.values())]:
            self.is_chain = False
        self._output = output[0] if isinstance(output, tuple) else output
        self.num_left += 1
        if not self.is_chain or self.num_left == len(self._blocks):
            stop()


def read_version(value: Any) -> int | None:
    """Return how often a tensor was written to in place; None where torch does not count."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version


def _is_plain(value: Any) -> bool:
    """Return whether a value holds nothing but tensors and constants."""
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, Mapping):
        return type(value) is dict and all(_is_plain(item) for item in value.values())
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype)


def _is_same_call(left: Call, right: Call) -> bool:
    if left.kwargs.keys() != right.kwargs.keys():
        return False
    values = (tuple(call.kwargs[key] for key in right.kwargs) for call in (left, right))
    return _is_same(left.args, right.args) and _is_same(*values)


def _is_same(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Return whether two argument lists hold the same objects, tuples looked into."""
    if len(left) != len(right):
        return False
    for one, other in zip(left, right, strict=True):
        if isinstance(one, tuple) and isinstance(other, tuple):
            if not _is_same(one, other):
                return False
        elif one is not other:
            return False
    return True
