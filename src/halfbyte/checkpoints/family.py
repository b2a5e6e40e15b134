"""A family: one convention of storing quantized linears, read into and written from the record.

What differs between families (nibble order, reciprocal scales, swizzles, smoothing that multiplies,
which x the low-rank branch sees, permuted vectors) is undone by `decode` and made again by
`encode`, pure functions on the tensors of one layer; nothing else in the package knows of it.

Rules of an implementation:

- What a layer's tensors *mean* follows from names, dtypes, shapes, metadata and configuration, put
  into `LayerPlan.facts`; it never follows from values. `decode` and `encode` run on tensors without
  values (device "meta") when a conversion is planned, so they never branch on one.
- Values are checked by `find_bad_value` and on the decoded record (`check_linear_values`).
- Parts that `encode` cannot reproduce bit for bit (a reciprocal, a product that was rounded, a
  vector that inference does not read) are named in `origin_parts`. They are kept beside the record
  as its `LayerOrigin` and written back as long as they still decode to that record.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.halfbyte_layer import check_linear_values
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

Parts = dict[str, torch.Tensor]
Facts = Mapping[str, str]


@dataclass(frozen=True)
class LayerPlan:
    """One quantized layer of a file, found by names and headers.

    Attributes:
        name: of the layer, e.g. "model.layers.0.mlp.up_proj".
        tensors: the family's part name -> name of the tensor in the file.
        facts: what else decides how the parts are read: dtypes, flags of the configuration.
    """

    name: str
    tensors: Mapping[str, str]
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """What a family says of a file.

    Attributes:
        layers: the layers that it can read, by name; empty: none.
        is_certain: whether something names the family (a configuration, metadata, a key that no
            other family has), so that no other reading is possible.
        evidence: what that is, or why others are possible, in words for an error message.
    """

    layers: Mapping[str, LayerPlan]
    is_certain: bool
    evidence: str


NO_CLAIM = Claim({}, False, "")


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer on its way from one family to another."""

    name: str
    linear: QuantizedLinear
    origin: LayerOrigin | None = None


@dataclass(frozen=True)
class SideContent:
    """What a family's file says beside its tensors.

    Attributes:
        metadata: of the safetensors header.
        files: name -> bytes of files beside the shards (configurations).
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


class Family(ABC):
    """One convention. Instances have no state; `registry.FAMILIES` lists them.

    Attributes:
        name: what `--from` and `--to` take.
        title: for tables and messages.
        container: "safetensors", "gguf" or "torch": what the tensors lie in.
        can_write: whether files of the family are written.
        origin_parts: parts that the record does not hold bit for bit; all others, `encode` gives
            back as they were.
        lists_layers: whether the metadata of each file lists the layers in it, so that the files
            of a sharded checkpoint differ in it.
        keeps_origins: whether a file holds what its layers were converted from.
        rounding: by how much, relative to it, the family's own dtypes may change a value.
        reads_as: activation formats that its files do not tell apart -> the one its readers take.
        rank_step: ranks come in multiples of it; merged adapters are filled up with zeros.
        has_one_rank: whether all W4A4 layers of a file have the same rank.
        marks: part names that quantized layers of the family alone have -> the dtype words that
            make them so, () for any; such a tensor of no layer is what is left of a damaged one.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    container: ClassVar[str] = "safetensors"
    can_write: ClassVar[bool] = True
    origin_parts: ClassVar[tuple[str, ...]] = ()
    lists_layers: ClassVar[bool] = False
    keeps_origins: ClassVar[bool] = False
    rounding: ClassVar[float] = 0.0
    reads_as: ClassVar[Mapping[str, str]] = {}
    rank_step: ClassVar[int] = 1
    has_one_rank: ClassVar[bool] = False
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    @abstractmethod
    def claim(self, source: TensorSource) -> Claim:
        """Return the layers of `source` that look like this family's."""

    @abstractmethod
    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record of a layer's tensors; FormatError where shapes or dtypes do not fit."""

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the tensors of a record by part name; the inverse of `decode`.

        Args:
            linear: one that `find_obstacle` has no objection to.
            facts: of the layer's plan where it comes from this family, else of `make_facts`.
        """
        raise NotImplementedError(f"{self.name} is read, not written")

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return how a file of the family will read a layer that comes from elsewhere.

        Where names decide (order of rows, kind of activation), a layer must be written as its name
        will be read.

        Raises:
            CheckpointError: a layer of that name would be read as something else than `linear`.
        """
        return {}

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why the family cannot hold `linear`, with the remedy; None where it can."""
        raise NotImplementedError(f"{self.name} is read, not written")

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return metadata and configurations of a file that holds `layers`.

        Args:
            layers: as they will be written; their tensors have no values (device "meta").
            source: what they are converted from, for what else its files say; None without.
        """
        return SideContent()

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return what the record of `parts` does not hold."""
        kept = {name: parts[name] for name in self.origin_parts if name in parts}
        return LayerOrigin(self.name, kept, facts)

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the metadata entries that say how this family's tensors are read.

        They are not taken along into a file of another family.
        """
        return frozenset()

    def encode_origin(self, origin: LayerOrigin) -> Parts:
        """Return the tensors in which a file of this family keeps another family's origin."""
        return {}

    def tensor_name(self, layer: str, part: str) -> str:
        """Return the name of a layer's tensor in a file of this family."""
        return f"{layer}.{part}"

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return which stored value no sound writer of the family stores, and what is wanted.

        For values that the record does not show any more; None where all are sound.
        """
        return None


def read_layer(family: Family, source: TensorSource, plan: LayerPlan) -> Layer:
    """Return a layer of `source` with every value checked, and what its record cannot hold.

    Raises:
        CheckpointError: tensors that do not fit each other, or values that no sound quantizer
            writes; the message names file, layer and tensor.
    """
    where = f"{source.path}: {plan.name}"
    parts = {part: source.read(name) for part, name in plan.tensors.items()}
    has_values = not any(part.is_meta for part in parts.values())
    if has_values:
        problem = family.find_bad_value(parts, plan.facts)
        if problem is not None:
            raise CheckpointError(f"{where}.{problem}")
    linear = decode_parts(family, where, parts, plan.facts)
    if has_values:
        check_linear_values(where, linear)
    return Layer(plan.name, linear, family.find_origin(parts, plan.facts))


def decode_parts(family: Family, where: str, parts: Parts, facts: Facts) -> QuantizedLinear:
    """Return `family.decode(parts, facts)` with the place in its errors."""
    try:
        return family.decode(parts, facts)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    except (FormatError, RuntimeError) as error:  # the latter: torch's, of shapes
        shapes = {name: f"{part.dtype} {list(part.shape)}" for name, part in parts.items()}
        raise CheckpointError(
            f"{where}: {error}; as {family.name} it holds {quoted(shapes)}"
        ) from error


def write_layer(family: Family, layer: Layer) -> Parts:
    """Return the tensors of a layer in `family`, by part name.

    A layer that came from the family gets its own bytes back, as long as they still mean the same.
    """
    origin = layer.origin
    if origin is None or origin.family != family.name:
        facts = family.make_facts(layer.name, layer.linear)
        parts = family.encode(layer.linear, facts)
        return parts if origin is None else {**parts, **family.encode_origin(origin)}
    parts = family.encode(layer.linear, origin.facts)
    restored = {**parts, **origin.parts}
    if any(part.is_meta for part in restored.values()):
        return restored
    if is_same_linear(family.decode(restored, origin.facts), layer.linear):
        return restored
    return parts


def is_same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(view_as_bytes(left.contiguous()), view_as_bytes(right.contiguous()))


def is_same_linear(left: QuantizedLinear, right: QuantizedLinear) -> bool:
    """Return whether two records are equal, bit for bit."""
    if (left.weight.format, left.activation, left.weight.columns) != (
        right.weight.format,
        right.activation,
        right.weight.columns,
    ):
        return False
    pairs = [
        (left.weight.data, right.weight.data),
        (left.weight.scales, right.weight.scales),
        (left.weight.global_scale, right.weight.global_scale),
    ]
    names = ("activation_global_scale", "channel_scale", "smooth", "lora_down", "lora_up", "bias")
    pairs += [(getattr(left, name), getattr(right, name)) for name in names]
    return all(
        one is other if one is None or other is None else is_same_tensor(one, other)
        for one, other in pairs
    )
