"""The epilogue's second output: y as 4-bit codes and block scales, bit by bit the reference's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfbyte.checks.cubin import read_cubin
from halfbyte.checks.sass import disassemble
from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.config import (
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
    check_legal,
    plan_storage,
)
from halfbyte.kernels.gemm_w4a4.source import list_arguments, make_source
from tests.checks.compiled_gemm import compile_parts
from tests.kernels.conftest import CompileSource
from tests.kernels.gemm_w4a4.operands import GemmOperands, GemmShape, make_operands
from tests.kernels.gemm_w4a4.quantized_runs import (
    QuantizedRun,
    assert_same_bytes,
    find_scales,
    quantize_by_reference,
    run_quantized,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUANTIZING = GemmConfig(
    "sm_100a",
    "nvfp4",
    "float16",
    TileConfig(256, 256, 2),
    LowRankConfig("float16", 32),
    EpilogueConfig(has_column_scale=True, has_bias=True, output="both", has_next_smooth=True),
)
# Each tile with another next layer; the second tile's rounds to bfloat16 and has no smooth.
CONFIGS = {
    "stored": QUANTIZING,
    "unrounded": replace(
        QUANTIZING,
        tile=TileConfig(256, 128, 2),
        out_dtype="bfloat16",
        epilogue=replace(
            QUANTIZING.epilogue,
            next_activation="nvfp4_nunchaku",
            has_next_smooth=False,
            has_bias=False,
        ),
    ),
    "static": replace(
        QUANTIZING,
        tile=TileConfig(128, 128, 1),
        scheduler="clc",
        low_rank=None,
        out_dtype="bfloat16",
        epilogue=replace(QUANTIZING.epilogue, next_activation="nvfp4_static", has_alpha=True),
    ),
}
RANK = 8
K = 160
# (M, N): one row; row, block and word of scales begun; whole tiles and more. 3 clusters at most, so
# that a CTA has several tiles.
SHAPES = [(1, 16), (130, 40), (3, 200), (257, 264), (300, 523)]


def make_case(config: GemmConfig, m: int, n: int, seed: int = 0) -> GemmOperands:
    """Return operands whose y has blocks that flush, blocks that saturate, and negative zeros.

    Blocks of columns differ by powers of two; every seventh column of the weight is zero, and
    column_scale is negative there.
    """
    operands = make_operands(config, GemmShape(m, n, K, max_clusters=3), RANK, seed=seed)
    draw = np.random.default_rng(seed)
    tensors = operands.tensors
    sizes = np.repeat(draw.choice([2.0**-15, 2.0**-6, 1.0, 2.0**6], n // 16 + 1), 16)[:n]
    tensors["column_scale"] *= torch.from_numpy(sizes).float()
    tensors["column_scale"][3::7] = -1.0
    tensors["weight_codes"][3::7] = 0
    if "lora_up" in tensors:
        tensors["lora_up"][3::7] = 0
    if config.epilogue.has_next_smooth:
        tensors["next_smooth"] = torch.from_numpy(draw.uniform(0.05, 20.0, n)).float()
    if config.epilogue.has_next_global_scale:
        tensors["next_global_scale"] = torch.tensor([0.0021])
    return operands


def run_and_check(gpu: Any, compile_source: CompileSource, operands: GemmOperands) -> QuantizedRun:
    """Run a configuration that writes y too, and compare the bytes with the reference's for it."""
    run = run_quantized(gpu, compile_source(make_source(operands.config)), operands)
    assert run.y is not None
    assert_same_bytes(run, quantize_by_reference(run.y, operands))
    return run


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_are_the_references_for_the_same_y(
    b200: Any, compile_source: CompileSource, name: str, shape: tuple[int, int]
) -> None:
    run_and_check(b200, compile_source, make_case(CONFIGS[name], *shape))


def test_case_has_what_it_claims(b200: Any, compile_source: CompileSource) -> None:
    run = run_and_check(b200, compile_source, make_case(CONFIGS["unrounded"], 257, 264))
    assert run.y is not None
    scales = np.stack([find_scales(run, 264, row) for row in range(257)])
    assert (scales == 0).any()  # flushed: no block of this y is zero
    assert (scales == 0x7E).any()  # saturated at 448
    assert ((run.codes & 0xF) == 8).any()  # negative zero


def test_codes_do_not_depend_on_whether_y_is_written(
    b200: Any, compile_source: CompileSource
) -> None:
    both = make_case(QUANTIZING, 257, 264)
    config = replace(QUANTIZING, epilogue=replace(QUANTIZING.epilogue, output="nvfp4"))
    alone = run_quantized(b200, compile_source(make_source(config)), replace(both, config=config))
    assert alone.y is None
    assert_same_bytes(alone, run_and_check(b200, compile_source, both))


def test_activation_comes_before_quantization_and_nothing_is_spilled(
    b200: Any, tmp_path: Path
) -> None:
    config = replace(QUANTIZING, epilogue=replace(QUANTIZING.epilogue, activation="silu"))
    launch, _, image = compile_parts(config, tmp_path)
    operands = make_case(config, 130, 72)
    run = run_quantized(b200, launch, operands)
    assert run.y is not None
    assert_same_bytes(run, quantize_by_reference(run.y, operands))
    assert float(run.y[:, :16].float().min()) >= -0.28  # silu's least value is -0.2785
    assert read_cubin(image)[0].frame_bytes == 0
    families = {one.family for one in disassemble(image)[0].instructions}
    assert not families & {"LDL", "STL"}


@pytest.mark.parametrize("name", ["stored", "static"])
def test_nan_row_has_nan_scales_and_no_codes(
    b200: Any, compile_source: CompileSource, name: str
) -> None:
    operands = make_case(CONFIGS[name], 130, 200)
    whole = run_and_check(b200, compile_source, operands)
    operands.tensors["act_sf"][5 * 16] = 0x7F  # row 5, first block of K: an E4M3 NaN
    run = run_and_check(b200, compile_source, operands)
    assert (find_scales(run, 200, 5) == 0x7F).all()
    assert not run.codes[5].any()
    others = np.arange(130) != 5
    np.testing.assert_array_equal(run.codes[others], whole.codes[others])


def test_infinite_column_spoils_its_block_alone(b200: Any, compile_source: CompileSource) -> None:
    operands = make_case(QUANTIZING, 130, 72)
    whole = run_and_check(b200, compile_source, operands)
    operands.tensors["bias"][20] = float("inf")
    run = run_and_check(b200, compile_source, operands)
    for row in (0, 129):
        scales = find_scales(run, 72, row)
        assert scales[1] == 0x7F
        np.testing.assert_array_equal(
            scales[[0, 2, 3, 4]], find_scales(whole, 72, row)[[0, 2, 3, 4]]
        )
    assert not run.codes[:, 8:16].any()


@pytest.mark.parametrize("name", ["stored", "static"])
def test_zero_row_has_zero_bytes(b200: Any, compile_source: CompileSource, name: str) -> None:
    operands = make_case(CONFIGS[name], 130, 200)
    operands.tensors["act_codes"][129] = 0
    operands.tensors["bias"].zero_()
    if "lora_act" in operands.tensors:
        operands.tensors["lora_act"][129] = 0
    run = run_and_check(b200, compile_source, operands)
    assert not run.codes[129].any()
    assert not find_scales(run, 200, 129).any()


@pytest.mark.parametrize("extreme", [2.0**-100, 2.0**40, 3.0e38])
def test_absurd_smooth_divides_exactly_too(
    b200: Any, compile_source: CompileSource, extreme: float
) -> None:
    operands = make_case(QUANTIZING, 130, 72)
    operands.tensors["next_smooth"][7:30:3] = extreme
    run_and_check(b200, compile_source, operands)


@pytest.mark.parametrize("scale", [1e-30, 3.7e-5, 1e6, 1e30])
def test_static_scale_of_any_size(b200: Any, compile_source: CompileSource, scale: float) -> None:
    operands = make_case(CONFIGS["static"], 130, 72)
    operands.tensors["next_global_scale"].fill_(scale)
    run_and_check(b200, compile_source, operands)


@pytest.mark.parametrize("size", [2.0**-126, 2.0**-100, 2.0**100])
def test_bfloat16_of_any_size(b200: Any, compile_source: CompileSource, size: float) -> None:
    operands = make_case(CONFIGS["static"], 130, 72)
    operands.tensors["column_scale"][:40] *= size
    operands.tensors["bias"][:40] *= size
    operands.tensors["next_global_scale"].fill_(min(max(size, 1e-37), 1e30))
    run_and_check(b200, compile_source, operands)


def count_instructions(gpu: Any, compile_source: CompileSource, operands: GemmOperands) -> int:
    run_and_check(gpu, compile_source, operands)
    return int(gpu.log.records[-1].instructions)


def test_only_absurd_blocks_are_divided_twice(b200: Any, compile_source: CompileSource) -> None:
    operands = make_case(QUANTIZING, 130, 72)
    usual = count_instructions(b200, compile_source, operands)
    operands.tensors["next_smooth"][7] = 2.0**40
    absurd = count_instructions(b200, compile_source, operands)
    # Five warps have rows; each divides 64 columns twice again, one instruction a division.
    assert absurd - usual > 5 * 64 * 2


def test_staging_is_planned_for_what_is_written() -> None:
    assert plan_storage(QUANTIZING).num_output_slots == 2
    assert plan_storage(QUANTIZING).output_slot_bytes == 32 * 64 * 2
    assert plan_storage(QUANTIZING).vector_bytes == 4 * 256 * 4  # smooth and its reciprocals too
    alone = replace(QUANTIZING, epilogue=replace(QUANTIZING.epilogue, output="nvfp4"))
    assert plan_storage(alone).output_bytes == 0


def test_arguments_follow_the_epilogue() -> None:
    assert list_arguments(CONFIGS["static"])[-4:] == (
        "y",
        "next_codes",
        "next_sf",
        "next_global_scale",
    )
    alone = replace(QUANTIZING, epilogue=replace(QUANTIZING.epilogue, output="nvfp4"))
    assert list_arguments(alone)[-3:] == ("next_smooth", "next_codes", "next_sf")


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"next_activation": "nvfp4_dynamic"}, "nvfp4_dynamic.*run quantize_act_lora"),
        ({"next_activation": "mxfp4"}, "next_activation 'mxfp4': wanted one of"),
        ({"output": "codes"}, "output 'codes': wanted one of"),
        ({"output": "dense"}, "next_smooth divides what is quantized"),
    ],
)
def test_what_cannot_be_quantized_is_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        check_legal(replace(QUANTIZING, epilogue=replace(QUANTIZING.epilogue, **choices)))


def test_swapped_tile_cannot_quantize() -> None:
    with pytest.raises(FormatError, match="swapped tile"):
        check_legal(replace(QUANTIZING, tile=TileConfig(128, 32, 1, swap=True)))
