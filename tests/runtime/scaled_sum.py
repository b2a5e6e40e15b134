"""A tiny kernel source for tests: y = scale * (a + b). Imports no CuTe DSL."""

from dataclasses import dataclass
from typing import Any

from halfbyte.device.kernel_source import KernelSource

MODULES = ("tests.runtime.scaled_sum_program", "tests.runtime.scaled_sum")


@dataclass(frozen=True)
class ScaledSumConfig:
    scale: float = 1.0
    target: str = "sm_100a"


def make_source(config: ScaledSumConfig = ScaledSumConfig()) -> KernelSource:
    def make() -> tuple[Any, tuple[Any, ...]]:
        import cutlass
        from cutlass import cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from tests.runtime.scaled_sum_program import launch_scaled_sum

        size = cute.sym_int()
        vectors = [
            make_fake_compact_tensor(cutlass.Float32, (size,), stride_order=(0,), assumed_align=16)
            for _ in range(3)
        ]
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return launch_scaled_sum, (*vectors, cutlass.Int32(1), stream, config.scale)

    return KernelSource("scaled_sum", config, config.target, MODULES, make)
