"""The placed tensors of linears, made at their first use and kept as long as their weight.

A linear is known by its weight tensor. A placement is made again when one of the parts is another
tensor, has other memory (`part.data = ...`) or was written in place (torch's version counter tells;
where that is the low-rank branch alone, as when an adapter changes, the placed weight is kept;
`forget_placed` is for writers that it does not see: `part.data.copy_(...)`, NumPy's views, and
inference tensors, which have none).
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops.linear_parts import (
    PART_NAMES,
    LinearSpec,
    is_offloaded,
    is_present,
    make_linear,
)


class Placement(Protocol):
    """The tensors of one linear in a layout that something runs."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors, shared ones included."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of those that are the record's own."""


PlacementT = TypeVar("PlacementT", bound=Placement)


class Placer(Protocol[PlacementT]):
    """Makes the placements of one kind; a hashable record of all that decides them."""

    def place(self, linear: QuantizedLinear) -> PlacementT:
        """Return the placement of a linear."""

    def replace_low_rank(self, placed: PlacementT, linear: QuantizedLinear) -> PlacementT:
        """Return `placed` with the low-rank branch of `linear`, which is else what it was."""


@dataclass(eq=False)
class _Placements:
    """What is kept beside one weight tensor.

    Attributes:
        parts: weak references to the other parts of the linear; None for absent ones, which are
            another empty tensor on every call.
        versions: of all parts, each with its address.
        spec: what the bytes mean.
        by_placer: the placements, by what made them.
        outdated: those whose low-rank branch is another now; made current when they are used.
        refused: why there is none, by what would have made it.
    """

    parts: tuple[weakref.ref[torch.Tensor] | None, ...]
    versions: tuple[tuple[int, int], ...]
    spec: LinearSpec
    by_placer: dict[Placer[Any], Any] = field(default_factory=dict)
    outdated: dict[Placer[Any], Any] = field(default_factory=dict)
    refused: dict[Placer[Any], str] = field(default_factory=dict)

    def is_of(self, parts: Sequence[torch.Tensor], spec: LinearSpec) -> bool:
        """Return whether these are placements of `parts` as they are now."""
        if self.spec is not spec and self.spec != spec:
            return False
        if len(parts) != len(self.versions) or _read_version(parts[0]) != self.versions[0]:
            return False
        # A loop: every call asks, and generators take twice the time.
        for kept, version, part in zip(self.parts, self.versions[1:], parts[1:], strict=True):
            if kept is None:
                if part.numel():
                    return False
            elif kept() is not part or _read_version(part) != version:
                return False
        return True

    def differs_in_low_rank_alone(self, other: "_Placements") -> bool:
        """Return whether the weight of `other` and all beside its low rank are those of this."""
        kept = [index for index in range(len(PART_NAMES)) if index not in _LOW_RANK]
        pairs = [(self.parts[index - 1], other.parts[index - 1]) for index in kept if index]
        return (
            self.spec == other.spec
            and all(self.versions[index] == other.versions[index] for index in kept)
            and all((a and a()) is (b and b()) for a, b in pairs)
        )


_LOW_RANK: Final = tuple(PART_NAMES.index(name) for name in ("lora_down", "lora_up"))
_lock = threading.Lock()
_placed: Any = WeakTensorKeyDictionary()


def find_placed(
    parts: Sequence[torch.Tensor], spec: LinearSpec, placer: Placer[PlacementT]
) -> PlacementT:
    """Return the placement of a linear by `placer`, made where there is none yet.

    Making one reads values, which a CUDA graph that is being captured does not have yet: call the
    layer once before the capture.

    Args:
        parts: the tensor list of `linear_parts.list_parts`.
        spec: what they mean.
        placer: of the kernels that are to run.

    Raises UsageError where one would be made while a CUDA graph is captured, and what the placer
    raises.
    """
    placed: PlacementT
    with _lock:
        kept = _placed.get(parts[0])
        found = None if kept is None else kept.by_placer.get(placer)
        if found is not None and kept.is_of(parts, spec):
            placed = found
            return placed
        if kept is not None and placer in kept.refused and kept.is_of(parts, spec):
            raise UnsupportedHardwareError(kept.refused[placer])
        _check_not_capturing(parts)
        # `.data`: a tensor that shares the codes without keeping the key of this table alive.
        linear = make_linear([parts[0].data, *parts[1:]], spec)
        if kept is None or not kept.is_of(parts, spec):
            old = kept
            kept = _placed[parts[0]] = _make_entry(parts, spec)
            if old is not None and old.differs_in_low_rank_alone(kept):
                kept.outdated = old.outdated | old.by_placer
        if placer not in kept.outdated:
            _check_not_offloaded(parts, placer)
        placed = _make_placed(kept, placer, linear)
        return placed


def _check_not_capturing(parts: Sequence[torch.Tensor]) -> None:
    is_on_gpu = any(part.device.type == "cuda" for part in parts)
    if is_on_gpu and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a CUDA graph is being captured, and what the kernels read of this linear is not made "
            "yet or not of its present tensors: call the layer once with such an x before the "
            "capture, or describe_placement(model)"
        )


def _check_not_offloaded(parts: Sequence[torch.Tensor], placer: Placer[Any]) -> None:
    if is_offloaded(parts):
        raise FormatError(
            f"weight_data is on {parts[0].device}, offloaded, and nothing is placed for {placer}: "
            f"bring it back with module.to({str(parts[2].device)!r}), run the layer so, and "
            "offload it again"
        )


def _make_entry(parts: Sequence[torch.Tensor], spec: LinearSpec) -> _Placements:
    references = tuple(weakref.ref(part) if is_present(part) else None for part in parts[1:])
    return _Placements(references, _read_versions(parts), spec)


def _make_placed(kept: _Placements, placer: Placer[Any], linear: QuantizedLinear) -> Any:
    """Return a placement that is kept from now on; a refusal is kept too."""
    try:
        if placer in kept.outdated:
            placed = placer.replace_low_rank(kept.outdated.pop(placer), linear)
        else:
            placed = placer.place(linear)
    except UnsupportedHardwareError as error:
        kept.refused[placer] = str(error)
        raise
    kept.by_placer[placer] = placed
    return placed


def forget_placed(parts: Sequence[torch.Tensor]) -> None:
    """Drop the placements of a linear, whose tensors were written."""
    with _lock:
        _placed.pop(parts[0], None)


def rekey_placed(parts: Sequence[torch.Tensor], moved: Sequence[torch.Tensor]) -> None:
    """Let the placements of a linear be those of `moved`, the same numbers in other memory."""
    with _lock:
        kept = _placed.pop(parts[0], None)
        if kept is not None:
            entry = _make_entry(moved, kept.spec)
            entry.by_placer, entry.outdated = kept.by_placer, kept.outdated
            _placed[moved[0]] = entry


def count_placed_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Return the bytes that placements take beside the linear's own tensors."""
    with _lock:
        kept = _placed.get(parts[0])
        every = [] if kept is None else [*kept.by_placer.values(), *kept.outdated.values()]
        return sum(placed.num_bytes - placed.shared_bytes for placed in every)


def _read_versions(parts: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    others = (_read_version(part) if is_present(part) else (0, 0) for part in parts[1:])
    return _read_version(parts[0]), *others


def _read_version(part: torch.Tensor) -> tuple[int, int]:
    return (0 if part.is_inference() else part._version), part.data_ptr()
