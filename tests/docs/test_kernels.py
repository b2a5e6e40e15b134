"""The figures of docs/kernels/gemm_w4a4.md are those of the code."""

import re
from dataclasses import replace

import pytest

from halfbyte.kernels.gemm_w4a4.choose import (
    GemmRequest,
    choose_config,
    choose_low_rank,
    estimate_cycles,
)
from halfbyte.kernels.gemm_w4a4.config import (
    LARGE_TILES,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
    plan_storage,
)
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "kernels" / "gemm_w4a4.md").read_text(encoding="utf-8")
EPILOGUE = EpilogueConfig(has_column_scale=True, has_bias=True)
GEMM = GemmConfig(
    "sm_100a", "nvfp4", "float16", TileConfig(256, 256, 2), LowRankConfig("float16"), EPILOGUE
)


def read_rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first row begins with `heading`, without the line of dashes."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def with_commas(value: float) -> str:
    return f"{round(value):,}"


@pytest.mark.parametrize("tile", LARGE_TILES, ids=str)
def test_the_budget_table_is_the_plan(tile: TileConfig) -> None:
    header, *rows = read_rows("NVFP4")
    column = header.index(str(tile))
    table = {row[0]: row[column] for row in rows}
    storage = plan_storage(replace(GEMM, tile=tile))
    own_ring = replace(GEMM, tile=tile, low_rank=LowRankConfig("float16", placement="own_ring"))
    a, b, sfa, sfb = (size for _, size in storage.operand_bytes)
    expected = {
        "A, bytes a slot": a,
        "B": b,
        "scales of A": sfa,
        "scales of B": sfb,
        "a low-rank chunk, in the same slot": sum(size for _, size in storage.low_rank_bytes),
        "slot": storage.slot_bytes,
        "slots": storage.num_stages,
        "output staging": storage.output_bytes,
        "factors of a tile": storage.vector_bytes,
        "barriers": storage.barrier_bytes,
        f"used of {with_commas(storage.capacity_bytes)}": storage.used_bytes,
        "slots with the low-rank branch in a ring of its own": plan_storage(own_ring).num_stages,
        "tensor memory: accumulators": storage.accumulator_columns,
        "columns that both share": storage.overlap_columns,
        "scales": storage.scale_columns,
    }
    assert {name: table[name] for name in expected} == {
        name: with_commas(value) for name, value in expected.items()
    }


def test_the_slots_with_mxfp4_are_the_plan() -> None:
    plans = [plan_storage(replace(GEMM, tile=tile, block_format="mxfp4")) for tile in LARGE_TILES]
    slots = [plan.num_stages for plan in plans]
    text = f"{slots[0]}, {slots[1]}, {slots[2]} and {slots[3]} slots"
    assert text in PAGE
    assert f"accumulators share {plans[0].overlap_columns}." in PAGE.replace("\n", " ")


def test_the_predicted_cycles_are_those_of_the_rule() -> None:
    header, *rows = read_rows("M x K x N, R")
    for name, *cells in rows:
        m, k, n, rank = map(int, re.findall(r"\d+", name))
        request = GemmRequest(m, n, k, rank, "nvfp4", "float16", "float16", EPILOGUE)
        low_rank = choose_low_rank(request)
        cycles = [
            estimate_cycles(request, replace(GEMM, tile=tile, low_rank=low_rank))
            for tile in LARGE_TILES
        ]
        chosen = str(choose_config(request, "sm_100a").tile)
        assert header[1:5] == [str(tile) for tile in LARGE_TILES]
        assert cells == [*map(with_commas, cycles), chosen], name


def test_the_few_token_rows_are_those_of_the_rule() -> None:
    _, *rows = read_rows("tokens, K x N, R")
    for name, tile, cycles in rows:
        m, k, n, rank = map(int, re.findall(r"\d+", name))
        request = GemmRequest(m, n, k, rank, "nvfp4", "float16", "float16", EPILOGUE)
        config = choose_config(request, "sm_100a")
        assert (tile, cycles) == (str(config.tile), with_commas(estimate_cycles(request, config)))
