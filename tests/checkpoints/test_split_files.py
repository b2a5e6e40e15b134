"""The two files of nunchaku's older releases."""

import json

import pytest
import torch

from halfbyte.checkpoints.family import read_layer
from halfbyte.checkpoints.nunchaku import Nunchaku
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.split_files import SPLIT_FILES, SplitFilesSource, is_split_folder
from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_writer import write_safetensors
from tests.checkpoints.family_files import assert_writes_back, name_parts
from tests.random_linears import LinearShape, make_linear

LAYER = "transformer_blocks.0.qkv_proj"


@pytest.fixture
def folder(tmp_path):
    parts = Nunchaku().encode(make_linear(LinearShape(128, 128)), {"keys": "lora"})
    write_safetensors(tmp_path / SPLIT_FILES[0], name_parts(LAYER, parts), {})
    write_safetensors(tmp_path / SPLIT_FILES[1], {"x_embedder.weight": torch.ones(4, 4)}, {})
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    return tmp_path


def test_both_files_are_one_checkpoint_of_nunchaku(folder):
    assert is_split_folder(folder)
    with SplitFilesSource(folder) as source:
        found = recognise(source)
        assert found.family.name == "nunchaku"
        assert found.passthrough == ("x_embedder.weight",)
        assert torch.equal(source.read("x_embedder.weight"), torch.ones(4, 4))
        pieces = list(source.iter_bytes("x_embedder.weight"))
        assert torch.equal(torch.cat(pieces).view(torch.float32), torch.ones(16))
        layer = read_layer(found.family, source, found.layers[LAYER])
        assert_writes_back(found.family, source, found.layers[LAYER].tensors, layer)
        side = found.family.make_side_content({LAYER: layer}, source)
    assert json.loads(side.metadata["config"])["_class_name"] == "FluxTransformer2DModel"
    assert json.loads(side.metadata["quantization_config"])["rank"] == 16


def test_missing_file_is_named(folder):
    (folder / SPLIT_FILES[1]).unlink()
    assert is_split_folder(folder)
    with pytest.raises(CheckpointError, match=r"got no unquantized_layers\.safetensors"):
        SplitFilesSource(folder)


def test_tensor_in_both_files_is_named(folder):
    write_safetensors(folder / SPLIT_FILES[1], {f"{LAYER}.bias": torch.ones(4)}, {})
    with pytest.raises(CheckpointError, match=r"qkv_proj\.bias.*is in transformer_blocks"):
        SplitFilesSource(folder)


def test_tensor_that_is_in_neither_file_is_named(folder):
    with SplitFilesSource(folder) as source, pytest.raises(CheckpointError, match="no tensor"):
        source.read("nothing")
