"""Narrow tiles and split K: every number of CTAs, ragged shares, bits that repeat."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4_wgmma.config import SPLITS, WgmmaGemmConfig, check_legal, plan_storage
from halfbyte.reference.gemm_w4_wgmma import gemm_w4_wgmma
from tests.kernels.gemm_w4_wgmma.gemm_runs import (
    GemmShape,
    check_gemm,
    compile_gemm,
    draw_operands,
    run_gemm,
)

NARROW = WgmmaGemmConfig("fp8", "e2m1", "bfloat16", "bfloat16", 16, 3, has_bias=True, use_pdl=True)
# (mode, tokens, splits, pairs): each number of CTAs, each width, both modes, one ring and two.
TILES = (
    ("fp8", 8, 8, 1),
    ("fp8", 16, 5, 2),
    ("exact", 16, 3, 1),
    ("fp8", 32, 7, 1),
    ("exact", 48, 2, 2),
    ("fp8", 64, 4, 2),
    ("exact", 64, 6, 1),
    ("fp8", 128, 3, 1),
    ("exact", 8, 1, 2),
    ("fp8", 32, 1, 1),
    ("fp8", 64, 1, 2),
)


def make_config(mode: Any, tokens: int, splits: int, pairs: int) -> WgmmaGemmConfig:
    """Return a configuration with odd factors in odd places."""
    return replace(
        NARROW,
        mode=mode,
        tokens=tokens,
        splits=splits,
        pairs=pairs,
        ahead=splits,
        out_dtype="float16" if splits % 2 else "bfloat16",
        lora_dtype="float16" if tokens % 3 else "bfloat16",
        has_alpha=mode == "exact",
        has_bias=splits != 7,
        use_pdl=splits != 2,
    )


@pytest.mark.parametrize(("mode", "tokens", "splits", "pairs"), TILES)
def test_sums_of_parts_of_k(h200: Any, mode: str, tokens: int, splits: int, pairs: int) -> None:
    config = make_config(mode, tokens, splits, pairs)
    launch = compile_gemm(config)
    blocks = 128 * splits * pairs  # the least K
    for shape, is_integer in (
        (GemmShape(1, 8, blocks - 40, 32, 1), True),  # one block and at most one chunk a part
        (GemmShape(tokens, 257, blocks + 200, 40, 2), True),  # uneven shares, several tiles
        (GemmShape(tokens + 3, 391, 2 * blocks + 128, 136, 3), False),
    ):
        check_gemm(h200, launch, config, shape, is_integer)


def test_without_a_low_rank(h200: Any) -> None:
    config = replace(NARROW, lora_dtype=None, has_bias=False, splits=4)
    check_gemm(h200, compile_gemm(config), config, GemmShape(5, 130, 900), False)


def test_more_chunks_than_blocks(h200: Any) -> None:
    config = replace(NARROW, splits=3)
    check_gemm(h200, compile_gemm(config), config, GemmShape(9, 128, 384, 256), False)


def test_the_order_of_sums_is_that_of_ranks(h200: Any) -> None:
    """The bits of y depend on nothing but the numbers: not on the grid, not on who is faster."""
    config = replace(NARROW, splits=5, tokens=32, pairs=2)
    launch = compile_gemm(config)
    shape = GemmShape(40, 520, 1800, 96, 1)
    operands = draw_operands(config, shape)
    first = run_gemm(h200, launch, config, shape, operands)
    again = run_gemm(h200, launch, config, replace(shape, max_clusters=9), operands)
    assert torch.equal(first, again)


def test_nan_of_a_token_stays_with_it(h200: Any) -> None:
    config = replace(NARROW, splits=2)
    shape = GemmShape(6, 140, 300, 32)
    operands = draw_operands(config, shape)
    assert operands.token_scale is not None
    operands.token_scale[3] = float("nan")
    y = run_gemm(h200, compile_gemm(config), config, shape, operands).double()
    assert bool(torch.isnan(y[3]).all())
    others = [0, 1, 2, 4, 5]
    wanted = torch.from_numpy(gemm_w4_wgmma(operands)[others, :140])
    assert bool(((y[others] - wanted).norm() / wanted.norm()) < 4e-3)


@pytest.mark.parametrize("splits", SPLITS)
def test_shared_memory_of_split_k(splits: int) -> None:
    for tokens, pairs in ((8, 1), (16, 2), (64, 2), (128, 1)):
        config = replace(NARROW, tokens=tokens, splits=splits, pairs=pairs)
        storage = plan_storage(config)
        assert (storage.exchange_bytes > 0) == (splits * pairs > 1)
        assert storage.exchange_bytes >= (pairs * 128 * tokens * 4 if splits * pairs > 1 else 0)
        assert storage.used_bytes <= storage.capacity_bytes


def test_what_split_k_cannot_do_is_named() -> None:
    with pytest.raises(FormatError, match="shares activations or splits K"):
        check_legal(replace(NARROW, splits=2, cluster=2, tokens=64))
    with pytest.raises(FormatError, match="at most 128"):
        check_legal(replace(NARROW, splits=2, tokens=256))
    with pytest.raises(FormatError, match="two pairs split K"):
        check_legal(replace(NARROW, cluster=2, pairs=2))
    with pytest.raises(FormatError, match="at most 64"):
        check_legal(replace(NARROW, tokens=128, pairs=2))
    with pytest.raises(FormatError, match="1 or 2 pairs"):
        check_legal(replace(NARROW, pairs=3))
    with pytest.raises(FormatError, match="splits 9"):
        check_legal(replace(NARROW, splits=9))
