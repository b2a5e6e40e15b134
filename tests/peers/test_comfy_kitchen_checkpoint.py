"""A ComfyUI layer written by comfy-kitchen itself is read and written back, byte for byte."""

import json

import numpy as np
import pytest
import torch

from halfbyte.reference.decode import dequantize
from tests.checkpoints.family_files import FamilyFile, assert_round_trip

kitchen = pytest.importorskip(
    "comfy_kitchen.tensor", reason="comfy-kitchen is not installed: pip install 'halfbyte[peers]'"
)

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("shape", [(256, 128), (144, 80)])
def test_state_dict_of_comfy_kitchen(tmp_path, shape) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    layout = kitchen.TensorCoreNVFP4Layout
    qdata, params = layout.quantize(weight)
    tensors = {
        f"a.weight{suffix}": part
        for suffix, part in layout.state_dict_tensors(qdata, params).items()
    }
    mark = json.dumps({"format": "nvfp4"}).encode()
    tensors["a.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
    path = FamilyFile(tensors).write(tmp_path)
    linear = assert_round_trip(path, "comfyui")["a"].linear
    theirs = kitchen.QuantizedTensor(qdata, "TensorCoreNVFP4Layout", params).dequantize()
    wanted = dequantize(linear.weight)
    np.testing.assert_allclose(theirs.double().numpy(), wanted, rtol=2.0**-22)  # in float32
