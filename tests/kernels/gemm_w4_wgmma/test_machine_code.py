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
    family = "QGMMA" if config.mode == "fp8" else "HGMMA"
    products = [one for one in sass if one.family == family and f"x{config.tokens}x" in str(one)]
    # A pair of steps in the loop and one behind it, four products each; two of low rank.
    assert len(products) >= 18
    report = check_wgmma_operands(kernel)
    require_clean(report)
    assert report.num_examined >= len(products)
    # Serialised products have a fence and a wait each (ptxas C7510): one of 4 is the design.
    fences = [one for one in sass if one.opcode == "WARPGROUP.ARRIVE"]
    waits = [one for one in sass if one.opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(fences) <= len(products) / 4 + 1
    assert len(waits) <= len(products) / 4 + 3
