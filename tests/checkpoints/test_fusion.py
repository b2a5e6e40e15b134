"""Linears fused and split again: what they mean stays, against float64 from the bytes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.checkpoints.family import is_same_linear
from halfbyte.checkpoints.fusion import fuse_linears, split_linear_rows
from halfbyte.errors import FormatError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array, dequantize, read_floats
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_linear, pair_id

K = 96
ROWS = (48, 16, 32)


def make_parts(pair: tuple[str, str | None], parts: bool = True) -> list[QuantizedLinear]:
    """Return three linears that see x alike and differ in all else, global scale included."""
    made = [
        make_linear(LinearShape(n, K, rank, parts), pair, seed)
        for seed, (n, rank) in enumerate(zip(ROWS, (16, 0, 24), strict=True))
    ]
    first = made[0]
    rescaled = []
    for index, linear in enumerate(made):
        weight = linear.weight
        if weight.global_scale is not None:
            weight = replace(weight, global_scale=weight.global_scale * (1.0 + 0.77 * index))
        rescaled.append(replace(linear, weight=weight, smooth=first.smooth))
    return rescaled


def read_product(linear: QuantizedLinear) -> Float64Array:
    """Return the 4-bit weight with its channel scale, [N, K] float64."""
    weight = dequantize(linear.weight)
    if linear.channel_scale is not None:
        weight = weight * read_floats(linear.channel_scale)[:, None]
    return weight


def read_low_rank(linear: QuantizedLinear) -> Float64Array:
    if linear.lora_down is None or linear.lora_up is None:
        return np.zeros((linear.out_features, linear.in_features))
    return read_floats(linear.lora_up) @ read_floats(linear.lora_down)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_a_fused_linear_means_what_its_parts_mean(pair: tuple[str, str | None]) -> None:
    parts = make_parts(pair)
    fused = fuse_linears(parts)
    assert fused.weight.shape == (sum(ROWS), K)
    assert fused.rank == 16 + 24
    product = np.concatenate([read_product(part) for part in parts])
    # One float32 rounding: global scale times the part's own channel scale.
    np.testing.assert_allclose(read_product(fused), product, rtol=2.0**-23)
    np.testing.assert_array_equal(
        read_low_rank(fused), np.concatenate([read_low_rank(part) for part in parts])
    )
    bias = torch.cat([part.bias for part in parts if part.bias is not None])
    assert fused.bias is not None
    assert torch.equal(fused.bias, bias)


def test_different_global_scales_alone_are_folded_exactly() -> None:
    parts = make_parts(("nvfp4", "nvfp4_one_level"), parts=False)
    fused = fuse_linears(parts)
    assert fused.channel_scale is not None
    assert fused.weight.global_scale is not None
    assert float(torch.frexp(fused.weight.global_scale).mantissa) == 0.5  # a power of two
    product = np.concatenate([read_product(part) for part in parts])
    np.testing.assert_array_equal(read_product(fused), product)


def test_equal_global_scales_need_no_channel_scale() -> None:
    parts = [replace(make_parts(("nvfp4", None), parts=False)[i], bias=None) for i in range(3)]
    scale = parts[0].weight.global_scale
    parts = [replace(part, weight=replace(part.weight, global_scale=scale)) for part in parts]
    fused = fuse_linears(parts)
    assert fused.channel_scale is None
    assert fused.weight.global_scale is scale


def test_a_shared_lora_down_is_kept_once() -> None:
    shape = LinearShape(32, K, 16)
    first = make_linear(shape, seed=0)
    second = replace(make_linear(shape, seed=1), smooth=first.smooth, lora_down=first.lora_down)
    assert fuse_linears([first, second]).rank == 16


def test_parts_without_a_bias_get_zeros_and_mixed_dtypes_the_wider_one() -> None:
    first, second, third = make_parts(("int4", "int4"))
    assert first.bias is not None
    assert third.lora_down is not None
    assert third.lora_up is not None
    halves = replace(
        third,
        lora_down=third.lora_down.half(),
        lora_up=third.lora_up.half(),
        bias=None,
    )
    fused = fuse_linears([replace(first, bias=first.bias.bfloat16()), second, halves])
    assert fused.bias is not None
    assert fused.bias.dtype == torch.float32
    assert not fused.bias[-ROWS[2] :].any()
    assert fused.lora_down is not None
    assert fused.lora_down.dtype == torch.float32


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_splitting_gives_the_parts_back(pair: tuple[str, str | None]) -> None:
    parts = make_parts(pair, parts=False)
    for part, again in zip(parts, split_linear_rows(fuse_linears(parts), ROWS), strict=True):
        np.testing.assert_array_equal(read_product(again), read_product(part))
        assert again.rank == part.rank
        assert torch.equal(again.weight.data, part.weight.data)
        rows = replace(part, weight=again.weight, channel_scale=again.channel_scale)
        assert is_same_linear(again, rows)


def test_one_linear_is_its_own_fusion() -> None:
    linear = make_linear(LinearShape(32, K))
    assert fuse_linears([linear]) is linear


def test_tensors_without_values_are_fused_too() -> None:
    def to_meta(linear: QuantizedLinear) -> QuantizedLinear:
        weight = linear.weight
        scale = weight.global_scale
        return QuantizedLinear(
            BlockScaledTensor(
                weight.format,
                weight.data.to("meta"),
                weight.scales.to("meta"),
                None if scale is None else scale.to("meta"),
                weight.columns,
            ),
            linear.activation,
            lora_down=None if linear.lora_down is None else linear.lora_down.to("meta"),
            lora_up=None if linear.lora_up is None else linear.lora_up.to("meta"),
        )

    parts = [to_meta(part) for part in make_parts(("nvfp4", "nvfp4_one_level"))]
    fused = fuse_linears(parts)
    assert fused.weight.shape == (sum(ROWS), K)
    assert fused.rank == 40
    assert [part.out_features for part in split_linear_rows(fused, ROWS)] == list(ROWS)


def scale_smooth(linear: QuantizedLinear) -> QuantizedLinear:
    assert linear.smooth is not None
    return replace(linear, smooth=linear.smooth * 1.001)


def scale_input(linear: QuantizedLinear) -> QuantizedLinear:
    return replace(linear, activation_global_scale=torch.tensor(0.5))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (scale_smooth, "smooth is up to"),
        (lambda linear: replace(linear, smooth=None), "absent"),
        (scale_input, "activation_global_scale is 0.00"),
        (lambda _: make_linear(LinearShape(16, K), ("int4", "int4")), "nvfp4 and int4"),
        (lambda _: make_linear(LinearShape(16, 64), ("nvfp4", "nvfp4_static")), "96 and 64"),
        (lambda _: make_linear(LinearShape(16, K), ("nvfp4", None)), "nvfp4_static and none"),
    ],
)
def test_linears_that_see_x_differently_are_refused(
    change: Callable[[QuantizedLinear], QuantizedLinear], word: str
) -> None:
    parts = make_parts(("nvfp4", "nvfp4_static"))
    with pytest.raises(FormatError, match=word) as caught:
        fuse_linears([parts[0], parts[2], change(parts[1])])
    assert "linears 0 and 2" in str(caught.value)


@pytest.mark.parametrize("sizes", [(48, 48), (96, 0), (50, 50), ()])
def test_sizes_that_do_not_add_up_are_refused(sizes: tuple[int, ...]) -> None:
    linear = make_linear(LinearShape(96, K))
    if sum(sizes) == 96 and 0 not in sizes:
        assert len(split_linear_rows(linear, sizes)) == 2
        return
    with pytest.raises(FormatError, match="add up to 96"):
        split_linear_rows(linear, sizes)
