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
    return [(f"{best[1]}.{index}", block) for index, block in enumerate(best[2])]


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

    def observe(self, hooks: Callable[[], list[Any]], only_first: bool = False) -> None:
        """Run the block at hand on its inputs with hooks in place.

        Args:
            hooks: registers forward hooks and returns their handles; one may raise `stop`.
            only_first: run one batch alone.
        """
        handles = hooks()
        try:
            for run in self._runs():
                with stopping():
                    run()
                if only_first:
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
        def stop(*_: Any) -> None:
            raise _StopForwardError

        is_last = self._index + 1 == len(self._blocks)
        handle = None if is_last else block.register_forward_hook(stop)
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
    """Return whether each block's output is the next one's first input, all else being equal."""
    called: list[tuple[nn.Module, Call]] = []
    outputs: list[Any] = []

    def see_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called.append((module, Call(args, dict(kwargs))))

    def see_output(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)
        if len(outputs) == len(blocks):
            raise _StopForwardError

    handles = [block.register_forward_pre_hook(see_input, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(see_output) for block in blocks]
    try:
        with stopping():
            model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    if [id(module) for module, _ in called] != [id(block) for block in blocks]:
        return False
    first = called[0][1]
    for (_, seen), output in zip(called[1:], outputs, strict=False):
        if not seen.args or seen.args[0] is not output:
            return False
        if not _is_same(seen.args[1:], first.args[1:]) or seen.kwargs.keys() != first.kwargs.keys():
            return False
        if not _is_same(tuple(seen.kwargs.values()), tuple(first.kwargs.values())):
            return False
    return True


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
