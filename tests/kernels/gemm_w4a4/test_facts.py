"""What the compiler made of each shipped tile: machine code, registers, ring, tensor memory.

tests/checks proves the four facts of the scaled MMA on the large tiles, in launches, and that the
checks find known bugs; here are the machine code of all tiles and both targets, and the figures.
"""

from dataclasses import replace
from typing import Any

import pytest
from tools.make_tile_table import FEW_TOKENS, LARGEST, PAGE, TILES, compile_tile, make_page

from halfbyte.checks.accumulator_fences import check_accumulator_fences
from halfbyte.checks.finding import require_clean
from halfbyte.checks.kernel_text import read_kernel
from halfbyte.checks.sass import disassemble
from halfbyte.checks.sass_facts import SassExpectation, check_sass_facts
from halfbyte.checks.scaled_mma_facts import ScaledMmaExpectation, check_scaled_mma_facts
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_K,
    BLOCK_SIZES,
    LARGE_TILES,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
    plan_storage,
)
from tests.checks.compiled_gemm import compile_parts
from tests.kernels.gemm_w4a4.gemm_runs import run_gemm
from tests.kernels.gemm_w4a4.operands import GemmShape, make_operands

MMA_K = 64  # codes of one scaled MMA (PTX ISA, tcgen05.mma kinds)
VARIANTS = {
    "gelu": replace(LARGEST, epilogue=EpilogueConfig(True, True, True, "gelu")),
    "silu": replace(LARGEST, epilogue=EpilogueConfig(activation="silu")),
    "clc": replace(LARGEST, scheduler="clc", low_rank=LowRankConfig("float16", 64, "spread")),
    "sm_103a": replace(LARGEST, target="sm_103a"),
    "sm_103a, mxfp4": replace(LARGEST, target="sm_103a", block_format="mxfp4"),
    "rank 24, bf16": replace(LARGEST, out_dtype="bfloat16", low_rank=LowRankConfig("bfloat16", 32)),
    "own ring": replace(
        LARGEST, tile=TileConfig(128, 256, 1), low_rank=LowRankConfig("float16", 64, "own_ring")
    ),
}


# How nvdisasm names four scales to a K of 64; MXFP4 has two, and no modifier.
QUARTER_BLOCKS = {"sm_100a": "4X", "sm_103a": "BLOCK16"}


def check_machine_code(config: GemmConfig) -> None:
    """Assert MMAs, one TMA instruction per operand of a slot, and no local memory."""
    tile = compile_tile(config)
    pair = ".2CTA" if config.tile.num_ctas == 2 else ""
    required = (f"UTCOMMA{pair}", f"UTCHMMA{pair}")
    expected = SassExpectation(required, loads_per_stage=(4, 2))
    require_clean(check_sass_facts(tile.sass, expected, tile.cubin))
    scaled = [one for one in tile.sass.instructions if one.family == "UTCOMMA"]
    assert len(scaled) == BLOCK_K // MMA_K
    modifiers = {frozenset(one.opcode.split(".")[1:]) - {"2CTA"} for one in scaled}
    is_nvfp4 = config.block_format == "nvfp4"
    assert modifiers == {frozenset({QUARTER_BLOCKS[config.target]} if is_nvfp4 else ())}


@pytest.mark.parametrize("block_format", BLOCK_SIZES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_machine_code_of_each_tile(tile: TileConfig, block_format: str) -> None:
    check_machine_code(replace(LARGEST, tile=tile, block_format=block_format))


@pytest.mark.parametrize("name", VARIANTS)
def test_machine_code_of_variants(name: str) -> None:
    check_machine_code(VARIANTS[name])


@pytest.mark.parametrize(("tile", "slots"), [(LARGE_TILES[0], 5), (LARGE_TILES[1], 7)], ids=str)
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_the_low_rank_branch_costs_no_slot(tile: TileConfig, slots: int, target: str) -> None:
    config = replace(LARGEST, target=target, tile=tile)
    assert plan_storage(config).num_stages >= slots
    without = replace(config, low_rank=None)
    assert plan_storage(without).num_stages == plan_storage(config).num_stages


@pytest.mark.parametrize("tile", FEW_TOKENS[::2], ids=str)
def test_the_four_facts_of_tiles_for_few_tokens(b200: Any, tile: TileConfig, tmp_path: Any) -> None:
    config = replace(LARGEST, tile=tile)
    launch, ptx, image = compile_parts(config, tmp_path)
    run_gemm(b200, launch, make_operands(config, GemmShape(tile.n, 264, 288), 64))
    kernel, parameters = read_kernel(ptx), list(b200.log)[-1].request.parameters
    wanted = ScaledMmaExpectation("e4m3", "mxf4nvf4", 16, (tile.m, tile.n, MMA_K))
    facts = check_scaled_mma_facts(kernel, wanted, parameters)
    require_clean(facts, check_accumulator_fences(kernel, disassemble(image)[0]))
    assert facts.num_examined == BLOCK_K // MMA_K


def test_the_page_of_tiles_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(), "run tools/make_tile_table.py"
