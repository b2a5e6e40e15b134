"""A GEMM against waits that fail, latencies that vary, and warps that take turns the other way."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

import halfbyte.virtual
from halfbyte.arch import find_gpu
from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from halfbyte.virtual.device import Device, LaunchOptions
from tests.kernels.gemm_w4a4.gemm_runs import Launch, check_gemm, compile_gemm, run_gemm
from tests.kernels.gemm_w4a4.operands import GemmOperands, GemmShape, make_operands

RANK = 64


@contextmanager
def open_small_gpu(num_sms: int) -> Iterator[Any]:
    """Open the session of a B200 with few SMs: each cluster comes by many tiles."""
    device = Device(replace(find_gpu("b200"), num_sms=num_sms))
    with halfbyte.virtual.cuda(device=device) as gpu:
        yield gpu


@dataclass(frozen=True)
class Contest:
    """A compiled GEMM with operands and the bits of a run without any obstacle."""

    gpu: Any
    launch: Launch
    operands: GemmOperands
    bits: torch.Tensor

    def repeat(self, shape: GemmShape) -> "Contest":
        """Return a contest of the same kernel on another shape."""
        return run_without_obstacle(self.gpu, self.launch, self.operands.config, shape)

    def check_seed(self, seed: int) -> None:
        """Assert the same bits under one seed, with the warps' turns as they are and reversed."""
        for reverse_warps in (False, True):
            options = LaunchOptions(
                adversarial_try_wait=True, latency_seed=seed, reverse_warps=reverse_warps
            )
            self.gpu.runtime.options = options
            try:
                y = run_gemm(self.gpu, self.launch, self.operands)
            finally:
                self.gpu.runtime.options = None
            assert torch.equal(y.view(torch.int16), self.bits), f"other bits under {options}"


def start_contest(gpu: Any, config: GemmConfig, shape: GemmShape) -> Contest:
    """Compile a configuration and run it without any obstacle."""
    return run_without_obstacle(gpu, compile_gemm(config), config, shape)


def run_without_obstacle(gpu: Any, launch: Launch, config: GemmConfig, shape: GemmShape) -> Contest:
    """Run integers, check them, and keep their bits."""
    operands = make_operands(config, shape, RANK, is_integer=True)
    check_gemm(gpu, launch, operands, is_integer=True)
    bits = run_gemm(gpu, launch, operands).view(torch.int16)
    return Contest(gpu, launch, operands, bits)
