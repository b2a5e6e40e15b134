"""Error-optimal scales: the stated rule byte for byte, and what it is worth."""

import numpy as np
import pytest
import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_format import FORMATS, get_format
from halfbyte.formats.quantize import decode_codes, dequantize, quantize, quantize_with_counts
from tests.formats import numpy_quantizer
from tests.formats.test_quantize import assert_bytes, make_values

MX = ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2")


def relative_error(x: torch.Tensor, values: torch.Tensor) -> float:
    return float((values - x).norm() / x.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_one_level"])
def test_nvfp4_follows_the_stated_rule(implementation: str, name: str, dtype: torch.dtype) -> None:
    x = make_values(64, 192, 1).to(dtype)
    values = x.float().numpy()
    g = numpy_quantizer.global_scale(values, 256.0) if name == "nvfp4" else np.float32(1)
    t = quantize(x, name, scale_search="optimal")
    assert_bytes(t, *numpy_quantizer.search_nvfp4(values, g))
    assert t.global_scale is None or float(t.global_scale) == float(g)


@pytest.mark.parametrize("name", MX)
def test_mx_follows_the_stated_rule(implementation: str, name: str) -> None:
    x = make_values(64, 192, 2)
    t = quantize(x, name, scale_search="optimal")
    assert_bytes(t, *numpy_quantizer.search_mx(x.numpy(), name))


@pytest.mark.parametrize("name", ["int4", "uint4", "int4_block32", "uint4_block32"])
def test_integers_follow_the_stated_rule(implementation: str, name: str) -> None:
    x = make_values(64, 192, 3)
    is_signed = name.startswith("int4")
    wanted = numpy_quantizer.search_integer(
        x.numpy(), 7 if is_signed else 15, is_signed, get_format(name).block_size
    )
    t = quantize(x, name, scale_search="optimal")
    assert_bytes(t, *wanted)


def test_nvfp4_of_gaussian_values_reaches_the_best_known_error(implementation: str) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    plain = relative_error(x, dequantize(quantize(x, "nvfp4")))
    optimal = relative_error(x, dequantize(quantize(x, "nvfp4", scale_search="optimal")))
    assert plain > 0.094
    assert optimal <= 0.082  # trying all 126 scales gives 0.0813


@pytest.mark.parametrize("name", FORMATS)
def test_no_block_gets_worse(implementation: str, name: str) -> None:
    x = make_values(40, 256, 4)
    optimal = quantize(x, name, scale_search="optimal")
    plain = quantize(x, name, global_scale=optimal.global_scale)
    target = x.clamp(min=0.0) if name == "uint4" else x
    errors = [
        (dequantize(t) - target).double().square().unflatten(1, (-1, t.format.block_size)).sum(-1)
        for t in (optimal, plain)
    ]
    assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even", "rceil"])
def test_mxfp4_reaches_one_error_from_every_rounding(implementation: str, rounding: str) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    t = quantize(x, "mxfp4", scale_search="optimal", e8m0_rounding=rounding)
    best = quantize(x, "mxfp4", scale_search="optimal")
    assert relative_error(x, dequantize(t)) == pytest.approx(
        relative_error(x, dequantize(best)), rel=1e-6
    )


def test_int4_uses_code_minus_eight(implementation: str) -> None:
    x = torch.linspace(-8, 7, 16).repeat(4).reshape(1, 64)
    t = quantize(x, "int4", scale_search="optimal")
    assert decode_codes(t).tolist() == x.tolist()
    assert relative_error(x, dequantize(t)) < 0.02  # the grid of scales steps by 3 %
    assert relative_error(x, dequantize(quantize(x, "int4"))) > 0.04


def test_the_widest_block_can_be_raised(implementation: str) -> None:
    x = torch.full((1, 16), 5.0)
    x[0, 0] = 6.0
    plain = relative_error(x, dequantize(quantize(x, "nvfp4")))
    optimal = relative_error(x, dequantize(quantize(x, "nvfp4", scale_search="optimal")))
    assert optimal < plain / 2


def test_a_block_that_would_vanish_is_kept(implementation: str) -> None:
    x = torch.full((1, 16), 0.005)
    t, counts = quantize_with_counts(x, "nvfp4_one_level", scale_search="optimal")
    assert counts == BlockCounts(blocks=1, saturated=0, flushed=0, zero=0)
    assert relative_error(x, dequantize(t)) < 0.4  # the least scale, 2**-9, times 3
    x = torch.full((1, 16), 1e-5)
    t, counts = quantize_with_counts(x, "nvfp4_one_level", scale_search="optimal")
    assert counts.flushed == 1
    assert dequantize(t).eq(0.0).all()


def test_saturated_blocks_are_counted_in_the_search(implementation: str) -> None:
    x = torch.ones(1, 16)
    x[0, 0] = 5000.0
    _, counts = quantize_with_counts(x, "nvfp4_one_level", scale_search="optimal")
    assert counts.saturated == 1


def test_a_given_global_scale_is_kept_by_the_search(implementation: str) -> None:
    x = make_values(4, 64, 6)
    g = torch.tensor(0.25)
    t = quantize(x, "nvfp4", scale_search="optimal", global_scale=g)
    assert float(t.global_scale) == 0.25
    assert_bytes(t, *numpy_quantizer.search_nvfp4(x.numpy(), np.float32(0.25)))
