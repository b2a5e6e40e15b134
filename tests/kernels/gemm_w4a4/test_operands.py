"""The tests' own tools: bytes decode as the formats say, and poison is seen when it is gone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.formats.scale_layout import unpack_scales
from halfbyte.kernels.gemm_w4a4.config import GemmConfig, LowRankConfig, TileConfig
from tests.kernels.gemm_w4a4.gemm_runs import OutputBuffer
from tests.kernels.gemm_w4a4.operands import (
    GemmShape,
    decode_all_blocks,
    list_scale_offsets,
    make_operands,
    make_truth,
)

CONFIG = GemmConfig(
    "sm_100a", "nvfp4", "bfloat16", TileConfig(128, 128, 1), LowRankConfig("float16")
)
SHAPE = GemmShape(150, 270, 333)


@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
def test_scales_lie_where_the_formats_put_them(block_format: str) -> None:
    config = replace(CONFIG, block_format=block_format)
    blocks = -(-SHAPE.k // config.block_size)
    sf = make_operands(config, SHAPE, 40).tensors["act_sf"]
    here = sf[torch.from_numpy(list_scale_offsets(np.arange(SHAPE.m), blocks))]
    assert torch.equal(unpack_scales(sf, "swizzled_128x4", SHAPE.m, blocks), here)
    assert int((sf != 0).sum()) == int((here != 0).sum())  # padding is zero


@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
def test_integer_data_is_integer_and_small(block_format: str) -> None:
    operands = make_operands(replace(CONFIG, block_format=block_format), SHAPE, 40, is_integer=True)
    for name in ("act", "weight"):
        values = decode_all_blocks(operands, name)
        assert set(np.unique(values)) == {0, 1, 2, 3, 4, 6, -1, -2, -3, -4, -6}
    wanted = make_truth(operands).wanted
    assert np.array_equal(wanted, np.float32(wanted))


def test_random_data_has_every_code() -> None:
    codes = make_operands(CONFIG, SHAPE, 40).tensors["act_codes"]
    assert set(torch.cat([codes & 15, codes >> 4]).flatten().tolist()) == set(range(16))
    assert not codes[:, SHAPE.k // 2 + 1 :].any()  # padding of K
    assert not (codes[:, SHAPE.k // 2] >> 4).any()


@pytest.mark.parametrize("place", [(0, 3), (-1, 3), (1, 270), (2, -1)])
def test_a_write_around_y_is_seen(b200: Any, place: tuple[int, int]) -> None:
    output = OutputBuffer(SHAPE.m, SHAPE.n, torch.float16)
    output.y.zero_()
    assert not output.read().any()
    output._buffer[place] = 0.0
    with pytest.raises(AssertionError, match="written outside of y"):
        output.read()
