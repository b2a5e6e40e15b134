"""The GEMM as a KernelSource: what it is compiled from and with which arguments it is called."""

from collections.abc import Callable
from typing import Any, Final

from halfbyte.device.kernel_source import KernelSource
from halfbyte.kernels.gemm_w4a4.config import GemmConfig, check_legal

MODULES: Final = (
    "halfbyte.arch.gpus",
    "halfbyte.device.accumulator_pair",
    "halfbyte.device.cluster_sum",
    "halfbyte.device.epilogue_values",
    "halfbyte.device.float_arithmetic",
    "halfbyte.device.inline_ptx",
    "halfbyte.device.memory_access",
    "halfbyte.device.operand_load",
    "halfbyte.device.output_store",
    "halfbyte.device.ring_position",
    "halfbyte.device.scale_copy",
    "halfbyte.device.scaled_product",
    "halfbyte.device.tile_scheduler",
    "halfbyte.device.traced_record",
    "halfbyte.formats.activation",
    "halfbyte.formats.block_format",
    "halfbyte.kernels.gemm_w4a4.buffers",
    "halfbyte.kernels.gemm_w4a4.config",
    "halfbyte.kernels.gemm_w4a4.host",
    "halfbyte.kernels.gemm_w4a4.layouts",
    "halfbyte.kernels.gemm_w4a4.quantized_store",
    "halfbyte.kernels.gemm_w4a4.sm100",
    "halfbyte.kernels.gemm_w4a4.sm100_few_tokens",
    "halfbyte.kernels.gemm_w4a4.source",
    "halfbyte.kernels.gemm_w4a4.work",
    "halfbyte.kernels.quantize_act_lora.block_quantizer",
    "halfbyte.kernels.quantize_act_lora.config",
)


def make_source(config: GemmConfig) -> KernelSource:
    """Return the kernel of a configuration; FormatError where it is not legal.

    The compiled function is called with, in this order:

        act_codes uint8 [M, K_pad / 2], act_sf uint8 flat,
        weight_codes uint8 [N, K_pad / 2], weight_sf uint8 flat,
        lora_act [M, R_pad], lora_up [N, R_pad]     (with a low-rank branch)
        column_scale float32 [N]                    (has_column_scale)
        bias float32 [N]                            (has_bias)
        next_smooth float32 [N]                     (has_next_smooth)
        alpha float32 [1]                           (has_alpha)
        y [M, N], rows at least N apart             (output "dense" or "both")
        next_codes uint8 [M, N_pad / 2], next_sf uint8 flat (output "nvfp4" or "both")
        next_global_scale float32 [1]               (next_activation with a static global scale)
        max_clusters int: clusters of the static scheduler's grid

    Rows start at multiples of 16 bytes; `kernels.gemm_w4a4.placement` makes such operands. N_pad is
    N rounded up to 32. What is quantized are y / next_smooth as y is rounded to its dtype; next_sf
    are the E4M3 scales of [M, ceil(N / 16)] in swizzled_128x4. Both are written whole, padding
    included: they are the act_codes and act_sf of the next layer.
    """
    check_legal(config)
    return KernelSource("gemm_w4a4", config, config.target, MODULES, lambda: _make(config))


def list_arguments(config: GemmConfig) -> tuple[str, ...]:
    """Return the names of the tensors that the compiled function takes, in order."""
    epilogue = config.epilogue
    names = ["act_codes", "act_sf", "weight_codes", "weight_sf"]
    names += ["lora_act", "lora_up"] if config.low_rank is not None else []
    names += ["column_scale"] if epilogue.has_column_scale else []
    names += ["bias"] if epilogue.has_bias else []
    names += ["next_smooth"] if epilogue.has_next_smooth else []
    names += ["alpha"] if epilogue.has_alpha else []
    names += ["y"] if epilogue.has_dense_output else []
    names += ["next_codes", "next_sf"] if epilogue.has_quantized_output else []
    names += ["next_global_scale"] if epilogue.has_next_global_scale else []
    return tuple(names)


def _make(config: GemmConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from halfbyte.kernels.gemm_w4a4.host import make_host_function

    return make_host_function(config, list_arguments(config))
