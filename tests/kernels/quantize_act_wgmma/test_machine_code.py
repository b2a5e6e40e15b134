"""What ptxas makes of the kernel: products from shared memory, one after the other."""

import pytest

from halfbyte.checks.sass import disassemble
from halfbyte.kernels.quantize_act_wgmma.config import WgmmaQuantizeRequest, choose_config
from halfbyte.kernels.quantize_act_wgmma.source import make_source
from halfbyte.runtime.cute_compiler import compile_source
from halfbyte.virtual.driver.availability import find_absent_packages


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skip where CuTe DSL is not installed."""
    missing = find_absent_packages()
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")


@pytest.mark.parametrize("mode", ["fp8", "nvfp4_nunchaku"])
def test_products_of_a_block_are_one_group(mode: str) -> None:
    config = choose_config(WgmmaQuantizeRequest(mode, "bfloat16", 4352, 3840, 128))
    compiled = compile_source(make_source(config))
    sass = [one for kernel in disassemble(compiled.cubin) for one in kernel.instructions]
    products = [index for index, one in enumerate(sass) if one.family == "HGMMA"]
    assert len(products) == 4  # a block of 64 columns, one loop for all blocks
    between = sass[products[0] : products[-1]]
    assert not any(one.family in ("LDL", "STL", "WARPGROUP") for one in between)
    assert any(one.matches("LDG.128") for one in sass)
    assert any(one.matches("STG.128") for one in sass)
