"""INT4 on integer tensor cores: exact sums of groups, their scales, low rank, split K."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig, check_legal
from halfbyte.kernels.gemm_w4_wgmma.placement import place_linear
from halfbyte.reference import w4a4_linear
from halfbyte.reference.gemm_w4_wgmma import gemm_w4_wgmma
from tests.kernels.gemm_w4_wgmma.gemm_runs import (
    DTYPES,
    GemmShape,
    compile_gemm,
    measure_error,
    measure_torch,
    run_gemm,
)
from tests.kernels.gemm_w4_wgmma.operands import make_operands
from tests.random_linears import LinearShape, make_input, make_linear

PLAIN = WgmmaGemmConfig("exact", "int4", "bfloat16", "bfloat16", 32, 3, has_bias=True)
# (mode, activation, tokens, splits, cluster)
RUNS = (
    ("exact", "int4", 8, 1, 1),
    ("exact", "uint4_shifted", 64, 3, 1),
    ("exact", "int4", 128, 1, 2),
    ("exact", "int4", 96, 1, 1),
    ("int8", "int4", 16, 5, 1),
    ("int8", "uint4_shifted", 128, 1, 1),
    ("int8", "int4", 48, 1, 2),
)
SHAPES = (
    GemmShape(1, 8, 600, 32, 1),
    GemmShape(70, 257, 700, 40, 2),
    GemmShape(131, 391, 1153, 136, 3),
)


def make_config(mode: Any, tokens: int, splits: int, cluster: int) -> WgmmaGemmConfig:
    """Return a configuration with both output types, with and without PDL."""
    return dataclasses.replace(
        PLAIN,
        mode=mode,
        tokens=tokens,
        splits=splits,
        cluster=cluster,
        out_dtype="float16" if tokens % 32 else "bfloat16",
        use_pdl=splits > 1,
    )


@pytest.mark.parametrize(("mode", "activation", "tokens", "splits", "cluster"), RUNS)
def test_groups_are_scaled_before_they_are_added(
    h200: Any, mode: str, activation: str, tokens: int, splits: int, cluster: int
) -> None:
    config = make_config(mode, tokens, splits, cluster)
    launch = compile_gemm(config)
    for shape in SHAPES:
        linear_shape = LinearShape(shape.n, shape.k, shape.rank, dtype=torch.bfloat16)
        linear = make_linear(linear_shape, ("int4", activation), seed=shape.m)
        x = make_input(shape.m, shape.k, torch.bfloat16)
        operands = make_operands(x, place_linear(linear, torch.bfloat16, mode), linear)
        y = run_gemm(h200, launch, config, shape, operands)
        truth = gemm_w4_wgmma(operands)[:, : shape.n]
        bound = 2 * measure_torch(operands, y, truth)
        assert measure_error(y, truth) <= bound, shape


def test_the_exact_mode_is_the_layer(h200: Any) -> None:
    config = make_config("exact", 32, 1, 1)
    linear = make_linear(LinearShape(140, 300, 16, dtype=torch.bfloat16), ("int4", "int4"))
    x = make_input(33, 300, torch.bfloat16)
    operands = make_operands(x, place_linear(linear, torch.bfloat16, "exact"), linear)
    y = run_gemm(h200, compile_gemm(config), config, GemmShape(33, 140, 300, 16), operands)
    assert measure_error(y, w4a4_linear(x, linear)) < 2.0**-7


def make_ones(scales: torch.Tensor | None) -> torch.Tensor | None:
    """Return ones in the place of scales."""
    return None if scales is None else torch.ones_like(scales)


@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_integers_give_exact_bits(h200: Any, mode: str) -> None:
    """Extreme codes and activations: a sum of 64 columns at its largest, scales of powers of two.

    An operand byte is 16 times its code: -8 becomes -128, and the sums reach 2^20.
    """
    config = dataclasses.replace(make_config(mode, 16, 1, 1), lora_dtype=None, has_bias=False)
    linear = make_linear(LinearShape(128, 256, 0, parts=False), ("int4", "int4"))
    weight = linear.weight
    data = weight.data.clone()
    data[::2] = 0x88  # -8 throughout
    scales = torch.full_like(weight.scales, 0.5)
    linear = dataclasses.replace(
        linear, weight=dataclasses.replace(weight, data=data, scales=scales)
    )
    x = torch.ones(20, 256, dtype=torch.bfloat16)
    operands = make_operands(x, place_linear(linear, torch.bfloat16, mode), linear)
    act = torch.full_like(operands.act, -128 if mode == "int8" else 7)
    act[:, ::3] = 3
    operands = dataclasses.replace(
        operands,
        act=act,
        token_scale=make_ones(operands.token_scale),
        act_group_scale=make_ones(operands.act_group_scale),
    )
    y = run_gemm(h200, compile_gemm(config), config, GemmShape(20, 128, 256), operands)
    truth = torch.from_numpy(gemm_w4_wgmma(operands)).to(DTYPES[config.out_dtype])
    assert torch.equal(y, truth)
    assert np.abs(gemm_w4_wgmma(operands)).max() > 1000


def test_what_integer_products_cannot_do_is_named() -> None:
    with pytest.raises(FormatError, match="at most 128"):
        check_legal(dataclasses.replace(PLAIN, tokens=192))
