"""What two checkpoints of any families have in common and what not, layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halfbyte.checkpoints.difference import (
    ROUNDING,
    Difference,
    describe_shape,
    measure_layer,
)
from halfbyte.checkpoints.family import read_layer
from halfbyte.checkpoints.open_source import OpenSources
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.verify import Opened, is_same_content
from halfbyte.errors import CheckpointError

State = Literal["equal", "rounded", "differs"]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints.

    Attributes:
        path: of the file or directory.
        family: how to read it; None to decide by the file.
    """

    path: Path
    family: str | None = None


@dataclass(frozen=True)
class LayerComparison:
    """One layer that both have.

    Attributes:
        name: of the layer.
        state: "equal" values, "rounded" within `difference.ROUNDING`, or "differs".
        left, right: format and sizes.
        differences: of each component; {} where the sizes differ.
    """

    name: str
    state: State
    left: dict[str, Any]
    right: dict[str, Any]
    differences: dict[str, Difference]


@dataclass(frozen=True)
class FileComparison:
    """Two checkpoints.

    Attributes:
        families: of both.
        layers: what both have, in name order.
        only_left, only_right: quantized layers that only one has.
        tensors_equal: other tensors with one name, dtype, shape and content.
        tensors_differ: names of those whose dtype, shape or content differs.
        tensors_only_left, tensors_only_right: names of those that only one has.
    """

    families: tuple[str, str]
    layers: tuple[LayerComparison, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    tensors_equal: int
    tensors_differ: tuple[str, ...]
    tensors_only_left: tuple[str, ...]
    tensors_only_right: tuple[str, ...]

    def is_equal(self, *, is_exact: bool = False) -> bool:
        """Return whether nothing differs; roundings count where `is_exact`."""
        allowed = ("equal",) if is_exact else ("equal", "rounded")
        differing = [*self.only_left, *self.only_right, *self.tensors_differ]
        differing += [*self.tensors_only_left, *self.tensors_only_right]
        return not differing and all(layer.state in allowed for layer in self.layers)


def compare_files(
    left: Side,
    right: Side,
    original: Path | None = None,
    advance: Callable[[str], None] = lambda name: None,
) -> FileComparison:
    """Return what two checkpoints have in common, read one layer at a time.

    Args:
        left, right: where they are.
        original: the unquantized model, which decides between possible families by trial.
        advance: called with the layer at hand.

    Raises:
        CheckpointError: one that cannot be read; the message names it.
    """
    with OpenSources() as sources:
        model = None if original is None else sources.open(original)
        opened: list[Opened] = []
        for side in (left, right):
            source = sources.open(side.path)
            opened.append((source, recognise(source, side.family, model)))
        return _compare(opened[0], opened[1], advance)


def _compare(left: Opened, right: Opened, advance: Callable[[str], None]) -> FileComparison:
    (one, found), (other, found_other) = left, right
    shared = [name for name in sorted(found.layers) if name in found_other.layers]
    layers = []
    for name in shared:
        advance(name)
        layers.append(_compare_layer(left, right, name))
    rest, other_rest = set(found.passthrough), set(found_other.passthrough)
    both = sorted(rest & other_rest)
    differing = tuple(name for name in both if not is_same_content(one, other, name))
    return FileComparison(
        families=(found.family.name, found_other.family.name),
        layers=tuple(layers),
        only_left=tuple(sorted(set(found.layers) - set(found_other.layers))),
        only_right=tuple(sorted(set(found_other.layers) - set(found.layers))),
        tensors_equal=len(both) - len(differing),
        tensors_differ=differing,
        tensors_only_left=tuple(sorted(rest - other_rest)),
        tensors_only_right=tuple(sorted(other_rest - rest)),
    )


def _compare_layer(left: Opened, right: Opened, name: str) -> LayerComparison:
    linears = []
    for source, found in (left, right):
        try:
            linears.append(read_layer(found.family, source, found.layers[name]).linear)
        except CheckpointError as error:
            raise CheckpointError(f"cannot be compared: {error}") from error
    shapes = [{**describe_shape(linear), "rank": linear.rank} for linear in linears]
    sizes = [(linear.out_features, linear.in_features) for linear in linears]
    if sizes[0] != sizes[1]:
        return LayerComparison(name, "differs", shapes[0], shapes[1], {})
    differences = measure_layer(*linears)
    is_alike = describe_shape(linears[0]) == describe_shape(linears[1])
    worst = max(one.deviation for one in differences.values())
    state: State = "equal" if worst == 0 else "rounded" if worst <= ROUNDING else "differs"
    state = state if is_alike else "differs"
    return LayerComparison(name, state, shapes[0], shapes[1], differences)
