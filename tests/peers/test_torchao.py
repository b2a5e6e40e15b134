"""Bytes of torchao 0.18: NVFP4 through the named mode, MX with each of its scale rules."""

import pytest
import torch

from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.packing import unpack_codes
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.formats.scale_layout import pack_scales
from tests.peers.tensors import CASES, WITH_ENDS, case_id, make_tensor

REASON = "torchao is not installed: pip install 'halfbyte[peers]'"
nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=REASON)
mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason=REASON)
mx_config = pytest.importorskip("torchao.prototype.mx_formats.config", reason=REASON)
mx_swizzle = pytest.importorskip("torchao.prototype.mx_formats.utils", reason=REASON)

pytestmark = pytest.mark.peers

MX_DTYPES = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
}


def scale_bits(t: BlockScaledTensor) -> torch.Tensor:
    return t.scales.view(torch.uint8)


def as_torchao_takes(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.float16 else x  # it takes float32 and bfloat16


@pytest.mark.parametrize("case", CASES + WITH_ENDS, ids=case_id)
def test_two_level_nvfp4_is_byte_identical(case: tuple) -> None:
    x = as_torchao_takes(make_tensor(case))
    g = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    scales, data = nvfp4_tensor.nvfp4_quantize(x, 16, g)
    t = quantize(x, "nvfp4", mode="torchao")
    assert torch.equal(t.global_scale, g)
    assert torch.equal(scale_bits(t), scales.view(torch.uint8))
    assert torch.equal(t.data, data)


@pytest.mark.parametrize("case", CASES + WITH_ENDS, ids=case_id)
def test_one_level_nvfp4_is_byte_identical(case: tuple) -> None:
    x = as_torchao_takes(make_tensor(case))
    scales, data = nvfp4_tensor.nvfp4_quantize(x, 16)
    t = quantize(x, "nvfp4_one_level", mode="torchao")
    assert torch.equal(scale_bits(t), scales.view(torch.uint8))
    assert torch.equal(t.data, data)


def test_dequantized_nvfp4_is_equal() -> None:
    x = make_tensor(CASES[0])
    g = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().max())
    theirs = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=g).dequantize(torch.float32)
    assert torch.equal(dequantize(quantize(x, "nvfp4", mode="torchao")), theirs)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("name", MX_DTYPES)
@pytest.mark.parametrize("kind", ["gaussian", "student_t", "uniform", "constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_is_byte_identical(name: str, rounding: str, kind: str, dtype: torch.dtype) -> None:
    x = make_tensor((kind, (64, 512), dtype))
    rule = mx_config.ScaleCalculationMode(rounding)
    scales, data = mx_tensor.to_mx(x, MX_DTYPES[name], 32, rule)
    t = quantize(x, name, e8m0_rounding=rounding)
    assert torch.equal(scale_bits(t), scales.view(torch.uint8))
    # Its 6-bit codes are not packed: one code a byte.
    ours = unpack_codes(t.data, 6) if "fp6" in name else t.data
    assert torch.equal(ours, data.view(torch.uint8))


def test_swizzled_scales_are_byte_identical() -> None:
    scales = torch.randint(0, 256, (100, 36), dtype=torch.uint8)
    assert torch.equal(
        pack_scales(scales, "swizzled_128x4").flatten(), mx_swizzle.to_blocked(scales)
    )
