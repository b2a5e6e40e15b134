"""The GEMM compiled and launched once: its PTX, machine code and the bytes of its parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.checks.cubin import CubinKernel, read_cubin
from halfbyte.checks.kernel_text import KernelText, read_kernel
from halfbyte.checks.sass import SassKernel, disassemble
from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from halfbyte.kernels.gemm_w4a4.source import make_source
from halfbyte.virtual.driver.launches import LaunchRequest
from tests.kernels.gemm_w4a4.gemm_runs import run_gemm
from tests.kernels.gemm_w4a4.operands import GemmShape, make_operands


@dataclass(frozen=True)
class CompiledGemm:
    """What the checks read of one configuration."""

    config: GemmConfig
    kernel: KernelText
    request: LaunchRequest
    sass: SassKernel
    cubin: CubinKernel


def compile_gemm(gpu: Any, config: GemmConfig, folder: Path, runs: bool = True) -> CompiledGemm:
    """Return the GEMM of a configuration, launched on a small product."""
    launch, ptx, image = compile_parts(config, folder)
    kernel = read_kernel(ptx)
    num_before = len(gpu.log)
    if runs:
        operands = make_operands(config, GemmShape(130, 264, 288), 64, True)
        run_gemm(gpu, launch, operands)
    request = gpu.log.records[num_before].request
    return CompiledGemm(config, kernel, request, disassemble(image)[0], read_cubin(image)[0])


def compile_parts(config: GemmConfig, folder: Path) -> tuple[Any, str, bytes]:
    """Return (what to call, PTX, cubin) of a configuration, compiled for the open session."""
    from cutlass import cute
    from cutlass.base_dsl import compiler

    host, arguments = make_source(config).make()
    options = (
        compiler.EnableTVMFFI(True),
        compiler.KeepPTX(True),
        compiler.KeepCUBIN(True),
        compiler.DumpDir(str(folder)),
    )
    launch = cute.compile[options](host, *arguments)
    (ptx,) = folder.glob("*.ptx")
    (cubin,) = folder.glob("*.cubin")
    return launch, ptx.read_text(), cubin.read_bytes()
