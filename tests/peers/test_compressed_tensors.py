"""Bytes of compressed-tensors 0.20: NVFP4 through the named mode, and MXFP4.

Its scales come from float32 minima and maxima here; fed bfloat16 ones it rounds amax / 6 to
bfloat16 first, which no other tool does and no mode imitates.
"""

import pytest
import torch

from halfbyte.formats.quantize import quantize
from tests.peers.tensors import CASES, WITH_ENDS, case_id, make_tensor

REASON = "compressed-tensors is not installed: pip install 'halfbyte[peers]'"
quantization = pytest.importorskip("compressed_tensors.quantization", reason=REASON)
qparams = pytest.importorskip("compressed_tensors.quantization.utils.helpers", reason=REASON)
packing = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers", reason=REASON)
mx_scales = pytest.importorskip("compressed_tensors.compressors.mx_utils", reason=REASON)

pytestmark = pytest.mark.peers


def make_scales(
    x: torch.Tensor, args: object, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    blocks = x.float().reshape(x.shape[0], -1, args.group_size)
    scales, _ = qparams.calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale
    )
    return scales.float()


@pytest.mark.parametrize("case", CASES + WITH_ENDS, ids=case_id)
def test_nvfp4_is_byte_identical(case: tuple) -> None:
    x = make_tensor(case)
    args = quantization.QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )
    divisor = qparams.generate_gparam(x.float().min(), x.float().max())
    scales = make_scales(x, args, divisor)
    data = packing.quantize_and_pack_fp4(x, scales, global_scale=divisor)
    t = quantize(x, "nvfp4", mode="compressed-tensors")
    assert torch.equal(t.global_scale, 1.0 / divisor.reshape(()))
    bits = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(t.scales.view(torch.uint8), bits)
    assert torch.equal(t.data, data)


@pytest.mark.parametrize("kind", ["gaussian", "student_t", "uniform", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_byte_identical_with_even_rounding(kind: str, dtype: torch.dtype) -> None:
    x = make_tensor((kind, (64, 512), dtype))
    args = quantization.QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    scales = make_scales(x, args)
    data = packing.quantize_and_pack_fp4(x, scales, group_size=32)
    t = quantize(x, "mxfp4", e8m0_rounding="even")
    bits = mx_scales.compress_mx_scale(scales, torch.uint8)
    assert torch.equal(t.scales.view(torch.uint8), bits)
    assert torch.equal(t.data, data)
