"""Tensors written by torchao itself, in its safetensors form and by torch.save, and back."""

import json

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import is_same_tensor, read_layer
from halfbyte.checkpoints.registry import recognise
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.checkpoints.torch_archive import TorchArchiveSource
from halfbyte.checkpoints.torchao import TorchAO
from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import FamilyFile, assert_round_trip
from tests.random_linears import LinearShape, make_linear

REASON = "torchao is not installed: pip install 'halfbyte[peers]'"
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=REASON)
mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=REASON)
support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support", reason=REASON)

pytestmark = pytest.mark.peers


def make_weight(case: str):
    weight = torch.randn(72, 96, generator=torch.Generator().manual_seed(0))
    if case.startswith("mx"):
        return mx.MXTensor.to_mx(
            weight, torch.float4_e2m1fn_x2, 32, is_swizzled_scales="swizzled" in case
        )
    scale = None if case == "one level" else nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    kwargs = nvfp4.QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    return nvfp4.NVFP4Tensor.to_nvfp4(
        weight,
        per_tensor_scale=scale,
        act_per_tensor_scale=torch.tensor(0.01) if case == "static" else None,
        is_swizzled_scales=case in ("swizzled", "static"),
        act_quant_kwargs=kwargs if case in ("swizzled", "static") else None,
    )


CASES = ["one level", "two levels", "swizzled", "static", "mx", "mx swizzled"]


@pytest.mark.parametrize("case", CASES)
def test_both_forms_read_alike_and_write_back(tmp_path, case) -> None:
    weight = make_weight(case)
    state = {"l.weight": weight, "l.bias": torch.ones(72), "norm.weight": torch.ones(4)}
    tensors, metadata = support.flatten_tensor_state_dict(state)
    path = FamilyFile(tensors, metadata).write(tmp_path / "st")
    layers = assert_round_trip(path, "torchao")
    wanted = weight.dequantize(torch.float32).double().numpy()
    np.testing.assert_allclose(dequantize(layers["l"].linear.weight), wanted, rtol=2.0**-22)

    with SafetensorsSource(path) as source:
        side = TorchAO().make_side_content(layers, source)
    assert {**side.metadata, "tensor_names": ""} == {**metadata, "tensor_names": ""}

    torch.save(state, tmp_path / "x.pt")
    with TorchArchiveSource(tmp_path / "x.pt") as archive, SafetensorsSource(path) as source:
        found = recognise(archive)
        assert found.family.name == "torchao"
        plan = recognise(source).layers["l"]
        other = read_layer(found.family, archive, found.layers["l"])
        for part, name in plan.tensors.items():
            theirs, ours = source.read(name), archive.read(found.layers["l"].tensors[part])
            assert is_same_tensor(theirs, ours)
        assert json.loads(found.layers["l"].facts["json"]) == json.loads(plan.facts["json"])
        assert other.linear.weight.shape == (72, 96)


@pytest.mark.parametrize(
    "pair", [("nvfp4", "nvfp4_dynamic"), ("nvfp4_one_level", None), ("mxfp4", "mxfp4")]
)
def test_torchao_reads_what_we_write(pair) -> None:
    family = TorchAO()
    linear = make_linear(LinearShape(40, 96, 0, parts=False), pair)
    facts = family.make_facts("l", linear)
    parts = family.encode(linear, facts)
    tensors = {family.tensor_name("l", part): value for part, value in parts.items()}
    metadata = {"l.weight": facts["json"], "tensor_names": json.dumps(["l.weight"])}
    state, left = support.unflatten_tensor_state_dict(tensors, metadata)
    assert not left
    theirs = state["l.weight"].dequantize(torch.float32).double().numpy()
    np.testing.assert_allclose(theirs, dequantize(linear.weight), rtol=2.0**-22)
