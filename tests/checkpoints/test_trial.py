"""The original model decides between readings that the file alone leaves open."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from halfbyte.checkpoints import registry
from halfbyte.checkpoints.family import Facts, Parts
from halfbyte.checkpoints.modelopt import ModelOpt
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_layer import quantize_linear_group
from tests.checkpoints.family_files import FamilyFile, name_parts

N, K = 48, 128


class HighNibbleFirst(ModelOpt):
    """The same keys, read with the other nibble order."""

    name: ClassVar[str] = "high-nibble-first"

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        codes = parts["weight"]
        return super().decode({**parts, "weight": (codes >> 4) | (codes << 4)}, facts)


class Permuted(ModelOpt):
    """The same keys, rows read in another order."""

    name: ClassVar[str] = "permuted"

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        codes = parts["weight"].roll(1, 0)
        scales = parts["weight_scale"].view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn)
        return super().decode({**parts, "weight": codes, "weight_scale": scales}, facts)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> None:
    families = (HighNibbleFirst(), Permuted(), ModelOpt())
    monkeypatch.setattr(registry, "FAMILIES", {family.name: family for family in families})


def make_files(folder: Path, *, is_other: bool = False) -> tuple[Path, Path]:
    """Return a quantized file without configuration and the model that it was made from."""
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(N, K, generator=draw) for name in ("a", "b")}
    preset = PRESETS["nvfp4_plain"]
    tensors: Parts = {}
    for name, weight in weights.items():
        (linear,), _ = quantize_linear_group([weight], [None], None, preset)
        tensors |= name_parts(name, ModelOpt().encode(linear, {}))
    quantized = FamilyFile(tensors).write(folder / "quantized")
    if is_other:
        weights = {name: torch.randn(N, K, generator=draw) for name in weights}
    originals = {f"{name}.weight": weight.bfloat16() for name, weight in weights.items()}
    return quantized, FamilyFile(originals).write(folder / "model")


def test_without_the_original_the_error_lists_candidates_and_flags(
    tmp_path: Path, readings: None
) -> None:
    quantized, _ = make_files(tmp_path)
    with SafetensorsSource(quantized) as source, pytest.raises(CheckpointError) as error:
        recognise(source)
    for word in ("high-nibble-first", "permuted", "modelopt", "--from", "--original"):
        assert word in str(error.value)


def test_the_reading_that_fits_the_original_wins(tmp_path: Path, readings: None) -> None:
    quantized, model = make_files(tmp_path)
    with SafetensorsSource(quantized) as source, SafetensorsSource(model) as original:
        found = recognise(source, None, original)
        assert found.family.name == "modelopt"
        assert found.evidence.startswith("fits the original: modelopt error 0.0")
        assert recognise(source, "permuted", original).family.name == "permuted"


def test_another_model_decides_nothing_and_the_figures_are_told(
    tmp_path: Path, readings: None
) -> None:
    quantized, model = make_files(tmp_path, is_other=True)
    with (
        SafetensorsSource(quantized) as source,
        SafetensorsSource(model) as original,
        pytest.raises(CheckpointError, match=r"decides nothing.*modelopt error 1\.4"),
    ):
        recognise(source, None, original)


def test_an_original_without_the_layers_is_refused(tmp_path: Path, readings: None) -> None:
    quantized, _ = make_files(tmp_path)
    other = FamilyFile({"c.weight": torch.zeros(4, 4)}).write(tmp_path / "other")
    with (
        SafetensorsSource(quantized) as source,
        SafetensorsSource(other) as original,
        pytest.raises(CheckpointError, match="no matrix"),
    ):
        recognise(source, None, original)
