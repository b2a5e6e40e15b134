"""The shipped tiles of the GEMM pass every check; with a known bug put in they fail by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checks.accumulate_flag import check_accumulate_flag
from halfbyte.checks.accumulator_fences import check_accumulator_fences
from halfbyte.checks.barrier_start import check_barrier_start
from halfbyte.checks.finding import Severity, require_clean
from halfbyte.checks.kernel_text import read_kernel
from halfbyte.checks.launch_budget import check_launch_budget, measure_launch
from halfbyte.checks.sass_facts import SassExpectation, check_sass_facts
from halfbyte.checks.scaled_mma_facts import (
    ScaledMmaExpectation,
    check_scaled_mma_facts,
    list_scaled_mma_facts,
)
from halfbyte.checks.target_suffix import check_target_suffix
from halfbyte.checks.tensor_memory_budget import check_tensor_memory
from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4a4.config import GemmConfig, LowRankConfig, TileConfig, plan_storage
from tests.checks.compiled_gemm import compile_parts
from tests.checks.conftest import CompileGemm

LOW_RANK = LowRankConfig("float16")
LARGE = GemmConfig("sm_100a", "nvfp4", "float16", TileConfig(256, 256, 2), LOW_RANK)
SHIPPED = {
    "256x256": LARGE,
    "256x128": replace(LARGE, tile=TileConfig(256, 128, 2)),
    "128x256": replace(LARGE, tile=TileConfig(128, 256, 1)),
    "128x128": replace(LARGE, tile=TileConfig(128, 128, 1)),
    "mxfp4-spread-clc": replace(
        LARGE,
        block_format="mxfp4",
        low_rank=replace(LOW_RANK, placement="spread"),
        scheduler="clc",
    ),
    "128x32-swap-split2": replace(LARGE, tile=TileConfig(128, 32, 1, swap=True, num_splits=2)),
    "own-ring": replace(
        LARGE, tile=TileConfig(128, 128, 1), low_rank=replace(LOW_RANK, placement="own_ring")
    ),
}


def expect_mma(config: GemmConfig) -> ScaledMmaExpectation:
    shape = (config.tile.m, config.tile.n, 64)
    if config.block_format == "nvfp4":
        return ScaledMmaExpectation("e4m3", "mxf4nvf4", 16, shape)
    return ScaledMmaExpectation("e8m0", "mxf4nvf4", 32, shape)


def expect_sass(config: GemmConfig) -> SassExpectation:
    pair = ".2CTA" if config.tile.num_ctas == 2 else ""
    block = ".4X" if config.block_format == "nvfp4" else ""
    return SassExpectation((f"UTCOMMA{pair}{block}", f"UTCHMMA{pair}"), loads_per_stage=(4, 2))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_tile_passes_every_check(name: str, compile_once: CompileGemm) -> None:
    config = SHIPPED[name]
    gemm = compile_once(config)
    parameters = gemm.request.parameters
    facts = check_scaled_mma_facts(gemm.kernel, expect_mma(config), parameters)
    sass = check_sass_facts(gemm.sass, expect_sass(config), gemm.cubin)
    flags = check_accumulate_flag(gemm.kernel)
    starts = check_barrier_start(gemm.kernel)
    fences = check_accumulator_fences(gemm.kernel, gemm.sass)
    columns = check_tensor_memory(gemm.kernel)
    suffix = check_target_suffix(gemm.kernel)
    require_clean(facts, sass, flags, starts, fences, columns, suffix)
    assert facts.num_examined == 4  # K = 256 of a block, 64 an instruction
    assert flags.num_examined > facts.num_examined
    assert starts.num_examined >= 4
    assert columns.num_examined > 0


@pytest.mark.parametrize("name", SHIPPED)
def test_the_budget_is_that_of_the_compiled_kernel(name: str, compile_once: CompileGemm) -> None:
    config = SHIPPED[name]
    gemm = compile_once(config)
    storage = plan_storage(config)
    request = gemm.request
    measured = measure_launch(gemm.kernel, request.parameters, request.dynamic_shared)
    # Barriers take a part of their page.
    assert 0 <= storage.used_bytes - measured.used_bytes <= storage.barrier_bytes
    assert measured.tensor_columns == 512
    slots = [operand.slot_bytes for operand in measured.operands]
    planned = [size for _, size in (*storage.operand_bytes, *storage.low_rank_bytes)]
    assert slots == planned
    require_clean(check_launch_budget(measured, gemm.kernel))


def test_the_facts_of_a_tile_name_lines_and_bytes(compile_once: CompileGemm) -> None:
    gemm = compile_once(LARGE)
    report = check_scaled_mma_facts(gemm.kernel, expect_mma(LARGE), gemm.request.parameters)
    assert list_scaled_mma_facts(gemm.kernel, gemm.request.parameters) == report.evidence
    facts = {item.fact: item.shown_by for item in report.evidence}
    assert "PTX line" in facts["scales are E4M3 (bit 23 = 0)"]
    form = "MMA kind::mxf4nvf4, blocks of 16, 256x256x64, 2 CTAs, A e2m1, B e2m1"
    assert "tcgen05.mma.cta_group::2.kind::mxf4nvf4" in facts[form]
    by_tma = [fact for fact in facts if fact.startswith("A by TMA: b4x16")]
    assert len(by_tma) == 1
    assert "box [256x128] = 16384 bytes, swizzle 128" in by_tma[0]
    assert "bytes 0-63" in facts[by_tma[0]]
    assert any(fact.startswith("scales of B by TMA: u16") for fact in facts)
    assert any("to columns 480-483 by 32x128b.warpx4" in fact for fact in facts)


def test_e8m0_scales_in_an_nvfp4_kernel_fail_by_bit_23(
    b200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutlass import Float8E8M0FNU

    from halfbyte.device.scaled_product import SCALE_TYPES

    monkeypatch.setitem(SCALE_TYPES, "nvfp4", (Float8E8M0FNU, 16))
    _, ptx, _ = compile_parts(LARGE, tmp_path)
    report = check_scaled_mma_facts(read_kernel(ptx), expect_mma(LARGE))
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert [finding.rule for finding in errors] == ["scaled-mma/scale-dtype"]
    assert "instruction descriptor bit 23 is 1, scales are read as E8M0" in errors[0].message


def test_a_flag_frozen_by_tracing_is_found_in_the_gemm(
    b200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import tcgen05

    from halfbyte.kernels.gemm_w4a4 import sm100

    def multiply_frozen(mma: Any, accumulator: Any, a: Any, b: Any, accumulate: Any) -> None:
        mma.set(tcgen05.Field.ACCUMULATE, False)  # decided while tracing: for every block
        cute.gemm(mma, accumulator, list(a), list(b), accumulator)

    monkeypatch.setattr(sm100, "multiply_scaled", multiply_frozen)
    _, ptx, _ = compile_parts(replace(LARGE, low_rank=None), tmp_path)
    report = check_accumulate_flag(read_kernel(ptx))
    assert "accumulate-flag/always-false" in {finding.rule for finding in report.findings}


def test_a_producer_that_starts_at_parity_0_is_found_in_the_gemm(
    b200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.device.ring_position import RingPosition

    monkeypatch.setattr(RingPosition, "producer", staticmethod(RingPosition.consumer))
    _, ptx, _ = compile_parts(LARGE, tmp_path)
    report = check_barrier_start(read_kernel(ptx))
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert {finding.rule for finding in errors} == {"barrier-start/producer-parity"}
    assert "A producer starts at parity 1" in errors[0].message


def test_a_low_rank_budget_twice_too_large_stops_the_compilation(
    b200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.kernels.gemm_w4a4 import config as gemm_config

    measured = gemm_config.list_low_rank_bytes

    def double(config: GemmConfig) -> tuple[tuple[str, int], ...]:
        return tuple((name, 2 * size) for name, size in measured(config))

    monkeypatch.setattr(gemm_config, "list_low_rank_bytes", double)
    with pytest.raises(FormatError, match="lora_a: declared 32768 bytes, its layout takes 16384"):
        compile_parts(LARGE, tmp_path)
