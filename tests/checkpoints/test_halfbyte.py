import torch

from halfbyte.checkpoints.family import is_same_linear, is_same_tensor, write_layer
from halfbyte.checkpoints.halfbyte import Halfbyte
from halfbyte.checkpoints.modelopt import ModelOpt
from halfbyte.formats.halfbyte_file import HalfbyteFile, write_halfbyte_file
from tests.checkpoints.family_files import FamilyFile, assert_round_trip, name_parts, read_all
from tests.checkpoints.test_modelopt import make_file, make_parts
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_linear


def test_round_trip_of_every_format_pair(tmp_path):
    linears = {
        f"layer{index}": make_linear(LinearShape(24, 72, index % 3 * 4), pair)
        for index, pair in enumerate(FORMAT_PAIRS)
    }
    write_halfbyte_file(tmp_path / "model.safetensors", linears, {"norm": torch.ones(3)})
    layers = assert_round_trip(tmp_path / "model.safetensors", "halfbyte")
    assert all(is_same_linear(layers[name].linear, linear) for name, linear in linears.items())
    assert all(layer.origin is None for layer in layers.values())


def test_another_family_s_bytes_come_back_through_our_file(tmp_path):
    _, layers = read_all(make_file().write(tmp_path / "in"))
    write_halfbyte_file(
        tmp_path / "ours.safetensors",
        {name: layer.linear for name, layer in layers.items()},
        origins={name: layer.origin for name, layer in layers.items()},
    )
    found, again = read_all(tmp_path / "ours.safetensors")
    assert found.passthrough == ()
    written = write_layer(ModelOpt(), again["a.up"])
    stored = make_parts()
    assert set(written) == set(stored)
    assert all(is_same_tensor(written[part], stored[part]) for part in stored)
    assert_round_trip(tmp_path / "ours.safetensors", "halfbyte")


def test_converted_file_is_whole_by_the_family_s_own_side_content(tmp_path):
    _, layers = read_all(make_file().write(tmp_path / "in"))
    family = Halfbyte()
    tensors = {}
    for name, layer in layers.items():
        tensors |= name_parts(name, write_layer(family, layer))
    side = family.make_side_content(layers, None)
    path = FamilyFile(tensors, side.metadata).write(tmp_path / "out")
    with HalfbyteFile(path) as file:
        assert set(file.layers) == set(layers)
        origin = file.read_origin("a.down")
    assert origin.family == "modelopt"
    assert "pre_quant_scale" in origin.parts


def test_a_changed_layer_is_not_written_with_its_old_origin(tmp_path):
    _, layers = read_all(make_file().write(tmp_path / "in"))
    layer = layers["a.up"]
    layer.linear.smooth.mul_(2)
    written = write_layer(ModelOpt(), layer)
    wanted = layer.linear.smooth.reciprocal()
    assert is_same_tensor(written["pre_quant_scale"], wanted)
