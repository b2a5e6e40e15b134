"""What ptxas makes of the kernel, for each target: no spills, wide loads."""

import pytest

from halfbyte.checks.cubin import read_cubin
from halfbyte.checks.sass import SassInstruction, disassemble
from halfbyte.kernels.quantize_act_lora.config import QuantizeRequest, choose_config
from halfbyte.kernels.quantize_act_lora.source import make_source
from halfbyte.runtime.cute_compiler import CompiledKernel, compile_source
from halfbyte.virtual.driver.availability import find_absent_packages

TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Skip where CuTe DSL is not installed."""
    missing = find_absent_packages()
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")


def compile_request(mode: str, target: str, m: int, rank: int) -> CompiledKernel:
    request = QuantizeRequest(mode, "bfloat16", m, 3840, rank, target, "bfloat16")
    return compile_source(make_source(choose_config(request)))


def list_sass(compiled: CompiledKernel) -> list[SassInstruction]:
    """Return the instructions of all kernels of a cubin."""
    return [one for kernel in disassemble(compiled.cubin) for one in kernel.instructions]


def assert_no_spills(compiled: CompiledKernel) -> None:
    kernels = read_cubin(compiled.cubin)
    assert kernels
    assert not any(kernel.frame_bytes for kernel in kernels)
    assert [str(one) for one in list_sass(compiled) if one.family in ("LDL", "STL")] == []


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled_and_x_is_loaded_in_16_bytes(target: str) -> None:
    compiled = compile_request("nvfp4_dynamic", target, m=4352, rank=128)
    assert_no_spills(compiled)
    sass = list_sass(compiled)
    copies = [one for one in sass if one.family == "LDGSTS"]
    assert copies
    assert all(one.matches("LDGSTS.128") for one in copies)
    # The first pass reads x itself, whole pieces at once.
    assert any(one.matches("LDG.128") for one in sass)
    assert any(one.family == "HMMA" for one in sass)
    has_conversion = any("E2M1" in one.opcode for one in sass)
    assert has_conversion == (target != "sm_90a")


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 32, 128, 256])
@pytest.mark.parametrize("m", [1, 32, 64, 4352])
@pytest.mark.parametrize("mode", ["nvfp4_nunchaku", "mxfp4", "int4", "uint4_shifted"])
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled_anywhere(target: str, mode: str, m: int, rank: int) -> None:
    assert_no_spills(compile_request(mode, target, m, rank))
