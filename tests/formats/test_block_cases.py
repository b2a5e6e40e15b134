"""Small blocks from public reports on quantizers; the numbers are derived by hand."""

import math

import pytest
import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.modes import MODES
from halfbyte.formats.packing import unpack_nibbles
from halfbyte.formats.quantize import (
    dequantize,
    quantize,
    quantize_activation,
    quantize_with_counts,
)

pytestmark = pytest.mark.usefixtures("implementation")


def scale_bytes(t: BlockScaledTensor) -> list[int]:
    return t.scales.view(torch.uint8).flatten().tolist()


def codes(t: BlockScaledTensor) -> list[int]:
    return unpack_nibbles(t.data).flatten().tolist()


@pytest.mark.parametrize("search", ["absmax", "optimal"])
def test_a_zero_block_has_a_finite_scale_and_dequantizes_to_exact_zero(search: str) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 0.5
    t, counts = quantize_with_counts(x, "nvfp4", scale_search=search)
    assert scale_bytes(t)[1] == 0x00
    assert codes(t)[16:] == [0] * 16
    assert dequantize(t)[0, 16:].tolist() == [0.0] * 16
    assert counts.zero == 1
    assert counts.flushed == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_zero_block_is_finite_and_exact_in_every_mode(mode: str) -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 0.5
    t = quantize(x, "nvfp4", mode=mode)
    assert t.scales.float().isfinite().all()
    assert dequantize(t)[0, 16:].tolist() == [0.0] * 16


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_zero_tensor_takes_global_scale_one(mode: str, value: float) -> None:
    t = quantize(torch.full((2, 32), value), "nvfp4", mode=mode)
    assert float(t.global_scale) == 1.0
    assert dequantize(t).eq(0.0).all()


def test_a_zero_tensor_is_stored_as_zero_bytes_with_unit_integer_scales() -> None:
    for value in (0.0, -0.0):
        t = quantize(torch.full((2, 64), value), "nvfp4")
        assert set(scale_bytes(t)) == set(codes(t)) == {0}
    t = quantize(torch.zeros(1, 64), "int4")
    assert t.scales.tolist() == [[1.0]]
    assert set(codes(t)) == {0}


@pytest.mark.parametrize("name", ["nvfp4_nunchaku", "nvfp4_one_level", "nvfp4_dynamic"])
def test_a_zero_block_of_an_activation_contributes_zero(name: str) -> None:
    z = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    z[1, 16:32] = 0.0
    t, counts = quantize_activation(z, get_activation_format(name))
    assert scale_bytes(t)[3 + 1] == 0x00
    values = dequantize(t)
    assert values.isfinite().all()
    assert values[1, 16:32].tolist() == [0.0] * 16
    assert counts.zero == 1


def test_one_level_flushes_a_small_block_and_two_level_keeps_it() -> None:
    x = torch.full((1, 16), 0.005)
    one, counts = quantize_with_counts(x, "nvfp4_one_level")
    assert scale_bytes(one) == [0x00]
    assert codes(one) == [0] * 16
    assert counts.flushed == 1
    two, counts = quantize_with_counts(x, "nvfp4")
    assert scale_bytes(two) == [0x7E]
    assert dequantize(two).tolist() == x.tolist()
    assert counts.flushed == 0


def test_one_level_flushes_below_six_times_half_the_least_scale() -> None:
    edge = 6 * 2.0**-10
    x = torch.tensor([[edge] * 16, [math.nextafter(edge, 1.0)] * 16], dtype=torch.float64)
    x = x.to(torch.float32)
    x[1] = x[1].nextafter(torch.tensor(1.0))
    _, counts = quantize_with_counts(x, "nvfp4_one_level")
    assert counts.flushed == 1  # the tie goes to zero, the next number does not


def test_one_level_saturates_and_two_level_does_not() -> None:
    x = torch.ones(1, 16)
    x[0, 0] = 5000.0
    one, counts = quantize_with_counts(x, "nvfp4_one_level")
    assert dequantize(one).tolist() == [[2688.0] + [0.0] * 15]
    assert counts.saturated == 1
    two, counts = quantize_with_counts(x, "nvfp4")
    assert dequantize(two)[0, 0].item() == pytest.approx(5000.0, rel=2**-22)
    assert dequantize(two)[0, 1:].tolist() == [0.0] * 15
    assert counts.saturated == 0


@pytest.mark.parametrize("mode", MODES)
def test_ties_go_to_the_even_code_in_every_mode(mode: str) -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([[*ties, 6.0, *(-tie for tie in ties), -6.0]])
    t = quantize(x, "nvfp4_one_level", mode=mode)
    assert scale_bytes(t) == [0x38]
    assert codes(t) == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]


@pytest.mark.parametrize(
    ("mode", "minus_zero"), [("halfbyte", 8), ("nunchaku", 8), ("torchao", 8), ("modelopt", 0)]
)
def test_minus_zero_keeps_its_sign_unless_the_mode_says_otherwise(
    mode: str, minus_zero: int
) -> None:
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6.0, -0.0, -0.2])
    t = quantize(x, "nvfp4_one_level", mode=mode)
    assert codes(t)[:3] == [7, minus_zero, 8]
    assert dequantize(t)[0, 1:3].eq(0.0).all()


def test_e4m3_payload_under_the_ends_of_e8m0() -> None:
    data = torch.full((2, 32), 0x38, dtype=torch.uint8)
    scales = torch.tensor([[0], [255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = dequantize(BlockScaledTensor(get_format("mxfp8_e4m3"), data, scales, None, 32))
    assert values[0].tolist() == [2.0**-127] * 32
    assert values[1].isnan().all()


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 3.4e38])
@pytest.mark.parametrize("search", ["absmax", "optimal"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
def test_the_ends_of_float32_stay_finite(name: str, search: str, scale: float) -> None:
    x = torch.linspace(-1, 1, 64).reshape(1, 64) * scale
    values = dequantize(quantize(x, name, scale_search=search)).double()
    assert values.isfinite().all()
    error = (values - x.double()).norm() / x.double().norm()
    assert error < 0.2


def test_a_subnormal_tensor_is_finite_in_every_mode() -> None:
    x = torch.full((1, 16), 1e-44)
    for mode in MODES:
        t = quantize(x, "nvfp4", mode=mode)
        assert 0.0 < float(t.global_scale) < float("inf")
        assert dequantize(t).isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [2.0**-149, 1e-40, 2.0**-126, 1e-30, 1e38])
def test_extreme_blocks_beside_zeros_are_finite_in_every_mode(mode: str, size: float) -> None:
    x = torch.zeros(2, 32)
    x[0, 1] = size
    x[1, 17] = 1e-12
    for name in ("nvfp4", "nvfp4_one_level"):
        values = dequantize(quantize(x, name, mode=mode))
        assert values.isfinite().all()
        assert values[1, :16].eq(0.0).all()
        assert values[0, 2:16].eq(0.0).all()
