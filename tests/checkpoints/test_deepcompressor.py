import numpy as np
import pytest
import torch

from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.checkpoints.deepcompressor import DumpSource, is_dump_folder
from halfbyte.checkpoints.family import read_layer
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import MetaSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import read_halfbyte_file
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import low_rank_product

N, K, R = 16, 128, 4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = "transformer_blocks.0."
LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.2.linear", "norm1.linear")


def make_dump(kind: str) -> dict[str, dict]:
    """Return what the four files hold, and under "exact" the weights before bfloat16."""
    draw = torch.Generator().manual_seed(0)
    dump: dict[str, dict] = {name: {} for name in ("model", "scale", "smooth", "branch", "exact")}
    size = 16 if kind == "nvfp4" else 64
    for local in LAYERS:
        name = BLOCK + local
        if kind == "nvfp4":
            bits = torch.randint(0x28, 0x48, (N, K // size), generator=draw).to(torch.uint8)
            scale = bits.view(torch.float8_e4m3fn).float()
            signs = torch.randint(0, 2, (N, K), generator=draw) * 2.0 - 1
            codes = E2M1[torch.randint(0, 8, (N, K), generator=draw)] * signs
            dump["scale"][f"{name}.weight.scale.0"] = torch.tensor([0.0021]).bfloat16()
            dump["scale"][f"{name}.weight.scale.1"] = scale.reshape(N, 1, -1, 1).bfloat16()
            scale = scale * float(torch.tensor(0.0021).bfloat16())
        else:
            scale = (torch.rand(N, K // size, generator=draw) + 0.1).bfloat16().float()
            codes = torch.randint(-8, 8, (N, K), generator=draw).float()
            dump["scale"][f"{name}.weight.scale.0"] = scale.reshape(N, 1, -1, 1).bfloat16()
        weight = codes * scale.repeat_interleave(size, 1)
        dump["exact"][name] = weight.double().numpy()
        dump["model"][f"{name}.weight"] = weight.bfloat16()
        dump["model"][f"{name}.bias"] = torch.randn(N, generator=draw).bfloat16()
    for local, rows in (("attn.to_q", 3 * N), ("attn.to_out.0", N), ("ff.net.2.linear", N)):
        name = BLOCK + local
        dump["smooth"][name] = (torch.rand(K, generator=draw) + 0.5).bfloat16()
        a, b = (torch.randn(*s, generator=draw).bfloat16() for s in ((R, K), (rows, R)))
        dump["branch"][name] = {"a.weight": a, "b.weight": b}
    if kind == "int4":
        dump["model"][f"{BLOCK}ff.net.2.shift"] = torch.tensor([0.171875]).bfloat16()
    dump["model"]["proj_out.weight"] = torch.ones(3)
    return dump


def write(folder, dump):
    folder.mkdir(exist_ok=True)
    for name in ("model", "scale", "smooth", "branch"):
        torch.save(dump[name], folder / f"{name}.pt")
    return folder


def read_linears(folder) -> dict:
    with DumpSource(folder) as source:
        found = recognise(source)
        assert found.family.name == "deepcompressor"
        layers = {n: read_layer(found.family, source, plan) for n, plan in found.layers.items()}
        for name, plan in found.layers.items():
            planned = read_layer(found.family, MetaSource(source), plan).linear
            assert planned.weight.shape == layers[name].linear.weight.shape
        return {name.removeprefix(BLOCK): layer.linear for name, layer in layers.items()}


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_codes_and_branches(tmp_path, kind):
    dump = make_dump(kind)
    assert is_dump_folder(write(tmp_path, dump))
    linears = read_linears(tmp_path)
    assert set(linears) == set(LAYERS)
    for local, linear in linears.items():
        wanted = dump["exact"][BLOCK + local]
        np.testing.assert_allclose(dequantize(linear.weight), wanted, rtol=2.0**-22)
    smooth = read_floats(dump["smooth"][BLOCK + "attn.to_q"])
    branch = dump["branch"][BLOCK + "attn.to_q"]
    a, b = read_floats(branch["a.weight"]), read_floats(branch["b.weight"])
    for place, local in enumerate(("attn.to_q", "attn.to_k", "attn.to_v")):
        wanted = b[place * N : (place + 1) * N] @ (a / smooth)
        np.testing.assert_allclose(low_rank_product(linears[local]), wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(read_floats(linears[local].smooth), smooth)
    assert linears["norm1.linear"].activation is None
    wanted = "int4" if kind == "int4" else "nvfp4_nunchaku"
    assert linears["attn.to_q"].activation.name == wanted


@pytest.mark.parametrize("kind", ["int4", "nvfp4"])
def test_a_dump_is_converted_with_proof(tmp_path, kind):
    folder = write(tmp_path / "dump", make_dump(kind))
    target = tmp_path / "x.safetensors"
    convert_checkpoint(ConvertRequest(folder, target, "halfbyte", verify=True))
    linears = read_halfbyte_file(target).linears
    assert set(linears) == {BLOCK + local for local in LAYERS}


def test_fused_smoothing_is_not_applied_again(tmp_path):
    dump = make_dump("int4")
    assert read_linears(write(tmp_path / "fused", dump))["attn.to_out.0"].smooth is None
    dump["smooth"]["proj.fuse_when_possible"] = False
    assert read_linears(write(tmp_path / "apart", dump))["attn.to_out.0"].smooth is not None


def test_shift_moves_the_bias_by_what_the_branch_sees(tmp_path):
    dump = make_dump("int4")
    linear = read_linears(write(tmp_path, dump))["ff.net.2.linear"]
    assert linear.activation.name == "uint4_shifted"
    bias = read_floats(dump["model"][f"{BLOCK}ff.net.2.linear.bias"])
    wanted = bias + low_rank_product(linear) @ np.full(K, 0.171875)
    np.testing.assert_allclose(read_floats(linear.bias), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "name", "value", "words"),
    [
        ("model", "attn.to_q.weight", torch.full((N, K), 0.37).bfloat16(), "off the grid"),
        ("scale", "attn.to_q.weight.scale.0", torch.ones(3), "blocks"),
        ("scale", "attn.to_q.weight.zero", torch.ones(3), "zero points"),
        ("branch", "other.a.weight", torch.ones(3), "belongs to no layer"),
        ("model", "ff.net.2.shift", torch.ones(1), "shift"),
    ],
)
def test_dumps_that_do_not_fit_are_named(tmp_path, file, name, value, words):
    dump = make_dump("int4")
    dump[file][BLOCK + name] = value
    with pytest.raises(CheckpointError, match=words):
        read_linears(write(tmp_path, dump))
