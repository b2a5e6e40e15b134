"""Sizes of one, ranks above K, strided operands, NaN and infinity: only what they touch changes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.kernels.gemm_w4a4.config import EpilogueConfig, GemmConfig, LowRankConfig, TileConfig
from halfbyte.kernels.gemm_w4a4.source import list_arguments, make_source
from tests.kernels.gemm_w4a4.gemm_runs import (
    OutputBuffer,
    check_cases,
    compile_gemm,
    run_gemm,
)
from tests.kernels.gemm_w4a4.grid import GridCase
from tests.kernels.gemm_w4a4.operands import (
    DTYPES,
    GemmOperands,
    GemmShape,
    decode_all_blocks,
    decode_blocks,
    list_scale_offsets,
    make_operands,
    make_truth,
    measure_relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LARGEST = GemmConfig(
    "sm_100a",
    "nvfp4",
    "float16",
    TileConfig(256, 256, 2),
    LowRankConfig("float16"),
    EpilogueConfig(has_column_scale=True, has_bias=True),
)
SHAPE = GemmShape(140, 300, 100)
RANK = 40
MARKED_ROW = 5
# The NaN of each scale type.
NAN_SCALES = {"nvfp4": 0x7F, "mxfp4": 0xFF}


@pytest.mark.parametrize("placement", ["tail", "spread", "own_ring"])
def test_tiny_sizes_and_odd_ranks(b200: Any, placement: Any) -> None:
    config = replace(LARGEST, low_rank=LowRankConfig("float16", 64, placement))
    sizes = [
        ((1, 1, 1), 1),
        ((1, 1, 1), 256),
        ((1, 1, 32), 256),
        ((2, 3, 31), 7),
        ((1, 300, 1), 1),
        ((300, 1, 1), 130),
        ((129, 1, 257), 5),
        ((1, 129, 255), 9),
    ]
    cases = [
        GridCase(rank, GemmShape(*size), number % 2 == 0)
        for number, (size, rank) in enumerate(sizes)
    ]
    check_cases(b200, config, cases)


@pytest.mark.parametrize("group", [1, 3, 100])
def test_every_raster_visits_each_tile_once(b200: Any, group: int) -> None:
    config = replace(LARGEST, tile=TileConfig(128, 128, 1), raster_group=group)
    shape = GemmShape(128 * 7 - 3, 128 * 5 - 2, 64, max_clusters=4)
    check_cases(b200, config, [GridCase(64, shape, is_integer=True)])


def put_inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values on the GPU inside of NaN: shifted, and with wider rows."""
    step = 16 // tensor.element_size()
    shape = [size + 2 * step for size in tensor.shape]
    surrounding = torch.full(shape, 0x7F if tensor.dtype == torch.uint8 else float("nan"))
    inside = tuple(slice(step, step + size) for size in tensor.shape)
    surrounding = surrounding.to(tensor.dtype)
    surrounding[inside] = tensor
    return surrounding.cuda()[inside]


def launch_with(launch: Any, operands: GemmOperands, given: dict[str, torch.Tensor]) -> None:
    """Launch with the tensors in `given` in place of those of `operands`."""
    tensors = {name: tensor.cuda() for name, tensor in operands.tensors.items()} | given
    launch(tuple(tensors[name] for name in list_arguments(operands.config)), 64)


def test_operands_inside_of_larger_tensors(b200: Any, compile_source: Any) -> None:
    operands = make_operands(LARGEST, SHAPE, RANK)
    output = OutputBuffer(SHAPE.m, SHAPE.n, torch.float16)
    given = {name: put_inside(tensor) for name, tensor in operands.tensors.items()}
    launch_with(compile_source(make_source(LARGEST)), operands, given | {"y": output.y})
    truth = make_truth(operands)
    assert measure_relative_error(output.read(), truth.wanted) <= 2 * truth.torch_error


@pytest.mark.parametrize("side", ["act", "weight"])
@pytest.mark.parametrize("block_format", ["nvfp4", "mxfp4"])
def test_a_nan_scale_ends_in_its_row_or_column(
    b200: Any, compile_source: Any, block_format: str, side: str
) -> None:
    config = replace(LARGEST, block_format=block_format)
    operands = make_operands(config, SHAPE, RANK)
    blocks = -(-SHAPE.k // config.block_size)
    place = list_scale_offsets(np.array([MARKED_ROW]), blocks)[0, 1]
    operands.tensors[f"{side}_sf"][int(place)] = NAN_SCALES[block_format]
    y = run_gemm(b200, compile_source(make_source(config)), operands)
    wanted = torch.zeros(y.shape, dtype=torch.bool)
    wanted[MARKED_ROW if side == "act" else (slice(None), MARKED_ROW)] = True
    assert torch.equal(y.isnan(), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["lora_act", "lora_up", "column_scale", "bias"])
def test_nan_and_infinity_end_in_their_row_or_column(
    b200: Any, compile_source: Any, name: str, value: float
) -> None:
    operands = make_operands(LARGEST, SHAPE, RANK)
    operands.tensors[name][MARKED_ROW] = value
    y = run_gemm(b200, compile_source(make_source(LARGEST)), operands).double()
    wanted = torch.from_numpy(make_truth(operands).wanted)
    assert not wanted.isfinite().all()
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    assert torch.equal(y[y.isinf()], wanted[y.isinf()])


def test_what_is_too_large_for_float16_becomes_infinity(b200: Any, compile_source: Any) -> None:
    operands = make_operands(LARGEST, GemmShape(40, 40, 100), RANK)
    operands.tensors["column_scale"] *= 300
    y = run_gemm(b200, compile_source(make_source(LARGEST)), operands)
    wanted = torch.from_numpy(make_truth(operands).wanted).half()
    assert 0 < int(wanted.isinf().sum()) < wanted.numel()
    assert torch.equal(y.isinf(), wanted.isinf())


def make_bad_output(what: str) -> torch.Tensor:
    """Return a y [4, 16] that the kernel cannot write."""
    if what == "strides":
        return torch.empty(4, 17, dtype=torch.float16).cuda()[:, :16]
    if what == "Misaligned":
        return torch.empty(80, dtype=torch.float16).cuda()[1:65].view(4, 16)
    return torch.empty(4, 16, dtype=torch.bfloat16).cuda()


@pytest.mark.parametrize("what", ["strides", "Misaligned", "Mismatched"])
def test_a_tensor_that_does_not_fit_is_refused_before_the_launch(
    b200: Any, compile_source: Any, what: str
) -> None:
    operands = make_operands(LARGEST, GemmShape(4, 16, 64), RANK)
    before = len(b200.log)
    with pytest.raises(ValueError, match=what):
        launch_with(compile_source(make_source(LARGEST)), operands, {"y": make_bad_output(what)})
    assert len(b200.log) == before


@pytest.mark.long
def test_rows_of_y_two_gigabytes_apart(b200: Any, compile_source: Any) -> None:
    stride = 2**30
    operands = make_operands(LARGEST, GemmShape(3, 16, 64), RANK)
    memory = torch.empty(2 * stride + 16, dtype=torch.float16, device="cuda")
    y = memory.as_strided((3, 16), (stride, 1))
    launch_with(compile_source(make_source(LARGEST)), operands, {"y": y})
    truth = make_truth(operands)
    assert measure_relative_error(y.cpu(), truth.wanted) <= 2 * truth.torch_error


@pytest.mark.long
def test_more_tile_rows_than_sixteen_bits_count(b200: Any) -> None:
    tile = TileConfig(128, 128, 1)
    config = replace(LARGEST, tile=tile, low_rank=None, epilogue=EpilogueConfig())
    shape = GemmShape(128 * 65537 - 5, 8, 32, max_clusters=148)
    operands = make_operands(config, shape, 0, is_integer=True)
    y = run_gemm(b200, compile_gemm(config), operands)
    weight = decode_all_blocks(operands, "weight")
    for start in range(0, shape.m, 1 << 20):
        rows = np.arange(start, min(start + (1 << 20), shape.m))
        wanted = torch.from_numpy(decode_blocks(operands, "act", rows) @ weight.T)
        assert torch.equal(y[start : start + len(rows)], wanted.to(DTYPES[config.out_dtype]))
