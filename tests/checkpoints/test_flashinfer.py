from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.flashinfer import FlashInfer
from halfbyte.errors import CheckpointError
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints.family_files import (
    FamilyFile,
    assert_round_trip,
    low_rank_product,
    name_parts,
    read_all,
)
from tests.random_linears import LinearShape, make_linear

CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.concatenate([CODES, -CODES])


def make_parts(n: int, k: int, rank: int = 32) -> tuple[dict, np.ndarray]:
    """Return operands, and alpha * weight without the scale of x; scales placed one by one."""
    draw = np.random.default_rng(n)
    codes = draw.integers(0, 16, (n, k)).astype(np.uint8)
    bits = torch.from_numpy(draw.integers(0x28, 0x48, (n, k // 16)).astype(np.uint8))
    width = -(-(k // 16) // 4)
    swizzled = torch.zeros(-(-n // 128) * width * 512, dtype=torch.uint8)
    for r in range(n):
        for c in range(k // 16):
            tile = (r // 128 * width + c // 4) * 512
            swizzled[tile + r % 32 * 16 + r // 32 % 4 * 4 + c % 4] = bits[r, c]
    parts = {
        "weight_fp4": torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4),
        "weight_sf": swizzled,
        "alpha": torch.tensor([0.0021 * 0.0043]),
        "global_scale": torch.tensor([1 / 0.0043]),
        "pre_quant_scale": torch.linspace(0.5, 2, k).bfloat16(),
        "l2t_smoothed": torch.randn(k, rank).bfloat16(),
        "l1_scaled": torch.randn(n, rank).bfloat16(),
        "bias": torch.randn(n).bfloat16(),
    }
    values = bits.view(torch.float8_e4m3fn).double().numpy().repeat(16, 1)
    return parts, CODES[codes] * values


def write(folder, parts):
    return FamilyFile(name_parts("a", parts) | {"norm.weight": torch.ones(4)}).write(folder)


@pytest.mark.parametrize("shape", [(40, 96), (256, 128)])
def test_round_trip_and_meaning(tmp_path, shape):
    parts, weight = make_parts(*shape)
    linear = assert_round_trip(write(tmp_path, parts), "flashinfer")["a"].linear
    alpha, divisor = (np.float64(parts[name]) for name in ("alpha", "global_scale"))
    # alpha * (x * divisor) @ weight.T is what the kernel's product stands for
    ours = dequantize(linear.weight)
    np.testing.assert_allclose(ours, weight * alpha * divisor, rtol=2.0**-22)
    scale = np.float64(linear.activation_global_scale)
    np.testing.assert_allclose(scale, 1 / divisor, rtol=2.0**-23)
    stored = alpha * read_floats(parts["l1_scaled"]) @ read_floats(parts["l2t_smoothed"]).T
    np.testing.assert_allclose(low_rank_product(linear), stored, rtol=1e-4, atol=1e-9)
    wanted = 1 / read_floats(parts["pre_quant_scale"])
    np.testing.assert_allclose(read_floats(linear.smooth), wanted, rtol=2.0**-23)


def test_records_survive_within_bfloat16():
    linear = make_linear(LinearShape(40, 96, 20), ("nvfp4", "nvfp4_static"))
    linear = replace(linear, channel_scale=None)
    family = FlashInfer()
    assert family.find_obstacle(linear) is None
    parts = family.encode(linear, {})
    assert parts["l1_scaled"].shape == (40, 32)
    again = family.decode(parts, {})
    assert torch.equal(again.weight.data, linear.weight.data)
    assert torch.equal(
        again.weight.scales.view(torch.uint8), linear.weight.scales.view(torch.uint8)
    )
    ratio = float(again.weight.global_scale) / float(linear.weight.global_scale)
    assert ratio == pytest.approx(1, rel=2.0**-21)
    for ours, theirs in (
        (again.lora_up[:, :20], linear.lora_up),
        (again.lora_down[:20], linear.lora_down),
        (again.smooth, linear.smooth),
    ):
        np.testing.assert_allclose(read_floats(ours), read_floats(theirs), rtol=family.rounding)
    assert not again.lora_up[:, 20:].any()


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("alpha", torch.tensor([float("nan")]), "alpha"),
        ("alpha", torch.ones(2), "alpha.*one number"),
        ("global_scale", torch.tensor([-1.0]), "global_scale"),
        ("weight_sf", torch.zeros(40, dtype=torch.uint8), "sf: 40 scales"),
        ("l1_scaled", torch.zeros(40, 16).bfloat16(), "lora_up"),
        ("l2t_smoothed", torch.zeros(96, 16).bfloat16(), "multiple of 32"),
        ("zeros", torch.ones(2), "zeros"),
    ],
)
def test_bad_operands_are_named(tmp_path, part, value, words):
    parts, _ = make_parts(40, 96)
    with pytest.raises(CheckpointError, match=words):
        read_all(write(tmp_path, {**parts, part: value}))


def test_obstacles():
    shape = LinearShape(32, 64, 32, parts=False)
    find = FlashInfer().find_obstacle
    assert "nvfp4_dynamic" in find(make_linear(shape, ("nvfp4", "nvfp4_dynamic")))
    assert "int4" in find(make_linear(shape, ("int4", "int4")))
    assert "rank" in find(
        make_linear(LinearShape(32, 64, 0, parts=False), ("nvfp4", "nvfp4_static"))
    )
