"""The proof that a converted checkpoint means what its source means, layer by layer.

Both files are read anew, each by its own family's rules, and every layer is compared as float64:
dequantised weight, product of the low-rank factors, smoothing, bias, scale of the activations.
Each is equal, or within the roundings to float32 that a reciprocal costs (`difference.ROUNDING`),
or those to the target family's own dtypes (`Family.rounding`). Activations are the target's where
its files do not tell two kinds apart (`Family.reads_as`).
Tensors that belong to no layer are compared byte by byte. What the source's family means by its
bytes is not proved here: a model of the source's origin (`--original`) tells that.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from halfbyte.checkpoints.difference import ROUNDING, describe_shape, find_deviation
from halfbyte.checkpoints.family import Family, is_same_linear, read_layer
from halfbyte.checkpoints.layer_changes import LayerReader
from halfbyte.checkpoints.registry import Recognised
from halfbyte.checkpoints.tensor_source import TensorSource, iter_tensor_bytes
from halfbyte.errors import CheckpointError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

Opened = tuple[TensorSource, Recognised]
Readable = tuple[TensorSource, LayerReader]


@dataclass(frozen=True)
class LayerProof:
    """What was found of one layer.

    Attributes:
        result: "identical" records, equal "values", or "rounded" within the bound.
        deviation: the largest relative deviation of a value.
        component: where it is; "" where there is none.
    """

    result: Literal["identical", "values", "rounded"]
    deviation: float
    component: str


@dataclass(frozen=True)
class Verification:
    """The proofs of a whole file.

    Attributes:
        layers: by name.
        copies: tensors that were compared byte by byte.
        bound: of a "rounded" layer's deviation.
    """

    layers: Mapping[str, LayerProof]
    copies: int
    bound: float = ROUNDING

    def describe(self) -> dict[str, Any]:
        """Return the sums for a report."""
        proofs = self.layers.values()
        return {
            "identical": sum(proof.result == "identical" for proof in proofs),
            "equal_values": sum(proof.result == "values" for proof in proofs),
            "rounded": sum(proof.result == "rounded" for proof in proofs),
            "worst_deviation": max((proof.deviation for proof in proofs), default=0.0),
            "bound": self.bound,
            "copied_tensors": self.copies,
        }


def verify_conversion(
    source: Readable, target: Opened, advance: Callable[[str, int], None]
) -> Verification:
    """Return the proofs of all layers and copied tensors of two open checkpoints.

    Args:
        source: what was converted, and how it is read, with what was merged into it.
        target: what it became, and how that is read.
        advance: called with the name at hand and the source's bytes of it.

    Raises:
        CheckpointError: a layer whose values differ, or a copy whose bytes do; the message names
            it.
    """
    reader, found = source[0], source[1].found
    proofs = {}
    for name, plan in found.layers.items():
        advance(name, sum(reader.specs[tensor].num_bytes for tensor in plan.tensors.values()))
        proofs[name] = prove_layer(source, target, name)
    for name in found.passthrough:
        advance(name, reader.specs[name].num_bytes)
        if not is_same_content(reader, target[0], name):
            raise CheckpointError(
                f"{reader.path}: tensor {quoted(name)} has other bytes in the output; "
                "the disk or memory is at fault"
            )
    return Verification(proofs, len(found.passthrough), get_bound(target[1].family))


def prove_layer(source: Readable, target: Opened, name: str) -> LayerProof:
    """Return what was found of layer `name`; CheckpointError where its values differ."""
    reader, found = target
    left = read_activation_as(found.family, source[1].read(source[0], name).linear)
    right = read_layer(found.family, reader, found.layers[name]).linear
    where = f"{source[0].path}: layer {quoted(name)}"
    shapes = describe_shape(left), describe_shape(right)
    if shapes[0] != shapes[1]:
        raise CheckpointError(f"{where} is {shapes[0]}, its conversion {shapes[1]}; not converted")
    if is_same_linear(left, right):
        return LayerProof("identical", 0.0, "")
    deviations = find_deviation(left, right)
    component = max(deviations, key=lambda key: deviations[key])
    worst, bound = deviations[component], get_bound(target[1].family)
    if not worst <= bound:
        raise CheckpointError(
            f"{where}: {component} of its conversion deviates by {worst:.3g}, allowed is "
            f"{bound:.3g} (roundings to what {target[1].family.name} stores); not converted"
        )
    return LayerProof("rounded" if worst else "values", worst, component if worst else "")


def get_bound(target: Family) -> float:
    """Return the largest relative deviation of a value that writing `target` may cost."""
    return max(ROUNDING, target.rounding)


def read_activation_as(target: Family, linear: QuantizedLinear) -> QuantizedLinear:
    """Return `linear` with the activation format that readers of `target` give it."""
    activation = linear.activation
    if activation is None or activation.name not in target.reads_as:
        return linear
    return replace(linear, activation=get_activation_format(target.reads_as[activation.name]))


def is_same_content(left: TensorSource, right: TensorSource, name: str) -> bool:
    """Return whether tensor `name` has one dtype, shape and content in both."""
    one, other = left.specs[name], right.specs.get(name)
    if other is None or (one.dtype.name, one.shape) != (other.dtype.name, other.shape):
        return False
    pairs = zip(iter_tensor_bytes(left, name), iter_tensor_bytes(right, name), strict=False)
    return all(piece.equal(counterpart) for piece, counterpart in pairs)
