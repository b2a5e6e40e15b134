"""Bytes of comfy-kitchen's eager NVFP4: the default mode, high nibble first, swizzled scales."""

import pytest
import torch

from halfbyte.formats.packing import pack_nibbles, unpack_nibbles
from halfbyte.formats.quantize import quantize
from halfbyte.formats.scale_layout import pack_scales
from tests.peers.tensors import CASES, WITH_ENDS, case_id, make_tensor

eager = pytest.importorskip(
    "comfy_kitchen.backends.eager.quantization",
    reason="comfy-kitchen is not installed: pip install 'halfbyte[peers]'",
)

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("case", CASES + WITH_ENDS, ids=case_id)
def test_nvfp4_is_byte_identical(case: tuple) -> None:
    x = make_tensor(case)
    t = quantize(x, "nvfp4")
    data, scales = eager.quantize_nvfp4(x, t.global_scale)
    assert torch.equal(pack_nibbles(unpack_nibbles(t.data), "high_first"), data)
    swizzled = pack_scales(t.scales.view(torch.uint8), "swizzled_128x4")
    assert torch.equal(swizzled.flatten(), scales.view(torch.uint8).flatten())
