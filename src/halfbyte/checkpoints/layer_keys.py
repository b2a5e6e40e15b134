"""Finding layers by the names and dtypes of their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from halfbyte.checkpoints.family import LayerPlan
from halfbyte.checkpoints.tensor_source import TensorSource


@dataclass(frozen=True)
class KeySet:
    """The parts of one layer: name -> dtype words of safetensors that each may have.

    Attributes:
        required: all must be there, with one of the dtypes.
        optional: may be there.
        foreign: must not be there: another family's mark.
    """

    required: Mapping[str, tuple[str, ...]]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    foreign: tuple[str, ...] = ()

    def match(self, dtypes: Mapping[str, str]) -> bool:
        """Return whether a layer with parts of these dtypes is one."""
        has_all = all(dtypes.get(part) in words for part, words in self.required.items())
        fits = all(
            part not in dtypes or dtypes[part] in words for part, words in self.optional.items()
        )
        return has_all and fits and not any(part in dtypes for part in self.foreign)


def find_layers(
    source: TensorSource, keys: KeySet, facts: Mapping[str, str] | None = None
) -> dict[str, LayerPlan]:
    """Return the layers of `source` that match `keys`, with every part that `keys` knows.

    A tensor of such a layer that `keys` does not know is nobody's: `registry.recognise` refuses it.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in source.specs:
        layer, _, part = name.rpartition(".")
        parts.setdefault(layer, {})[part] = name
    known = {**keys.required, **keys.optional}
    found = {}
    for layer, tensors in parts.items():
        dtypes = {part: source.specs[name].dtype.name for part, name in tensors.items()}
        if layer and keys.match(dtypes):
            taken = {part: name for part, name in tensors.items() if part in known}
            found[layer] = LayerPlan(layer, taken, dict(facts or {}))
    return found
