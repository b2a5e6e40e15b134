"""Bytes of nvidia-modelopt 0.47 for NVFP4, through the named mode."""

import pytest
import torch

from halfbyte.formats.quantize import dequantize, quantize
from tests.peers.tensors import CASES, WITH_ENDS, case_id, make_tensor

nvfp4_tensor = pytest.importorskip(
    "modelopt.torch.quantization.qtensor.nvfp4_tensor",
    reason="nvidia-modelopt is not installed: pip install 'halfbyte[peers]'",
)

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("case", CASES + WITH_ENDS, ids=case_id)
def test_nvfp4_is_byte_identical(case: tuple) -> None:
    x = make_tensor(case)
    theirs, scales, g = nvfp4_tensor.NVFP4QTensor.quantize(x.clone(), 16)
    t = quantize(x, "nvfp4", mode="modelopt")
    assert torch.equal(t.global_scale, g.reshape(()))
    assert torch.equal(t.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(t.data, theirs._quantized_data)


def test_dequantized_nvfp4_is_equal() -> None:
    x = make_tensor(CASES[0])
    theirs, scales, g = nvfp4_tensor.NVFP4QTensor.quantize(x.clone(), 16)
    values = theirs.dequantize(torch.float32, scale=scales, double_scale=g, block_sizes={-1: 16})
    assert torch.equal(dequantize(quantize(x, "nvfp4", mode="modelopt")), values)
