"""Files of a family made for tests, and what every family must do with its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfbyte.checkpoints.family import (
    Family,
    Layer,
    Parts,
    is_same_linear,
    is_same_tensor,
    read_layer,
    write_layer,
)
from halfbyte.checkpoints.registry import Recognised, recognise
from halfbyte.checkpoints.tensor_source import MetaSource, SafetensorsSource, TensorSource
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_writer import write_bytes_atomically, write_safetensors
from halfbyte.reference.decode import Float64Array, dequantize, read_floats


@dataclass(frozen=True)
class FamilyFile:
    """What goes into a file: tensors, metadata, and configurations beside it."""

    tensors: Parts
    metadata: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write a checkpoint directory and return it."""
        folder.mkdir(parents=True, exist_ok=True)
        write_safetensors(folder / "model.safetensors", self.tensors, self.metadata)
        for name, data in self.files.items():
            write_bytes_atomically(folder / name, data)
        return folder


def name_parts(layer: str, parts: Mapping[str, torch.Tensor]) -> Parts:
    return {f"{layer}.{part}": tensor for part, tensor in parts.items()}


def read_all(path: Path, family: str | None = None) -> tuple[Recognised, dict[str, Layer]]:
    with SafetensorsSource(path) as source:
        found = recognise(source, family)
        return found, {
            name: read_layer(found.family, source, plan) for name, plan in found.layers.items()
        }


def assert_round_trip(path: Path, family: str) -> dict[str, Layer]:
    """Read a file and write its layers again: every tensor of a layer has its own bytes.

    The same on tensors without values must promise the same names, shapes and dtypes.
    """
    with SafetensorsSource(path) as source:
        found = recognise(source)
        assert found.family.name == family
        layers = {}
        for name, plan in found.layers.items():
            layer = read_layer(found.family, source, plan)
            assert_writes_back(found.family, source, plan.tensors, layer)
            planned = read_layer(found.family, MetaSource(source), plan)
            promised = write_layer(found.family, planned)
            written = write_layer(found.family, layer)
            assert _shapes(promised) == _shapes(written)
            layers[name] = layer
        return layers


def assert_writes_back(
    family: Family, source: TensorSource, names: Mapping[str, str], layer: Layer
) -> None:
    written = write_layer(family, layer)
    assert set(written) == set(names)
    for part, tensor in written.items():
        assert is_same_tensor(tensor, source.read(names[part])), part
        assert family.tensor_name(layer.name, part) == names[part]


def assert_survives(family: Family, linear: QuantizedLinear, facts: Any = None) -> None:
    """A record that a family can hold comes back as it was, or within one float32 rounding."""
    assert family.find_obstacle(linear) is None
    again = family.decode(family.encode(linear, facts or {}), facts or {})
    if is_same_linear(again, linear):
        return
    np.testing.assert_array_equal(dequantize(again.weight), dequantize(linear.weight))
    for value, wanted in (
        (low_rank_product(again), low_rank_product(linear)),
        (_floats(again.smooth), _floats(linear.smooth)),
        (_floats(again.bias), _floats(linear.bias)),
        (_floats(again.channel_scale), _floats(linear.channel_scale)),
    ):
        np.testing.assert_allclose(value, wanted, rtol=3 * 2.0**-24)


def low_rank_product(linear: QuantizedLinear) -> Float64Array:
    if linear.lora_down is None or linear.lora_up is None:
        return np.zeros((0, 0))
    return read_floats(linear.lora_up) @ read_floats(linear.lora_down)


def _floats(part: torch.Tensor | None) -> Float64Array:
    return np.zeros(0) if part is None else read_floats(part)


def _shapes(parts: Parts) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()}
