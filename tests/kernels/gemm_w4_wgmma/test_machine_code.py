"""What ptxas makes of the Hopper GEMM: products from registers, nothing serialised or spilled."""

import pytest

from halfbyte.checks.cubin import read_cubin
from halfbyte.checks.finding import require_clean
from halfbyte.checks.sass import disassemble
from halfbyte.checks.wgmma_operands import check_wgmma_operands
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig
from halfbyte.kernels.gemm_w4_wgmma.source import make_source
from halfbyte.runtime.cute_compiler import compile_source
from halfbyte.virtual.driver.availability import find_absent_packages

CONFIGS = (
    WgmmaGemmConfig("fp8", "e2m1", "bfloat16", "bfloat16", 256, 4, 2, has_bias=True),
    WgmmaGemmConfig("fp8", "int4", "float16", "float16", 256, 4, has_alpha=True),
    WgmmaGemmConfig("fp8", "e2m1", "bfloat16", "bfloat16", 16, 6, use_pdl=True),
    WgmmaGemmConfig("exact", "e2m1", "bfloat16", "bfloat16", 256, 5, 2, has_bias=True),
    WgmmaGemmConfig("exact", "e2m1", "float16", "float16", 64, 6),
    WgmmaGemmConfig("fp8", "e2m1", "float16", "bfloat16", 200, 5),
)


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skip where CuTe DSL is not installed."""
    missing = find_absent_packages()
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.mode}-{one.tokens}")
def test_products_are_asynchronous_and_nothing_is_spilled(config: WgmmaGemmConfig) -> None:
    compiled = compile_source(make_source(config))
    assert not any(kernel.frame_bytes for kernel in read_cubin(compiled.cubin))
    (kernel,) = disassemble(compiled.cubin)
    sass = kernel.instructions
    assert [str(one) for one in sass if one.family in ("LDL", "STL")] == []
    products = [one for one in sass if one.family in ("QGMMA", "HGMMA")]
    # A pair of steps in the loop and one behind it, four products each; an odd last step where it
    # may be. Low rank: a pair of chunks in the loop and one behind it, two products each.
    main, low_rank = (20 if config.mode == "fp8" else 16), 8
    assert len(products) == main + low_rank
    # Serialised products (ptxas C7510) have a fence and a wait each; here a group has.
    groups = main // 4 + low_rank // 2
    assert sum("gsb0" in one.operands for one in products) == groups
    assert sum(one.opcode == "WARPGROUP.ARRIVE" for one in sass) == groups
    waits = [one for one in sass if one.opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) <= groups + 2
    report = check_wgmma_operands(kernel)
    require_clean(report)
    assert report.num_examined == len(products)
