"""The Hopper GEMM as a KernelSource: what it is compiled from, and its arguments."""

from collections.abc import Callable
from typing import Any, Final

from halfbyte.device.kernel_source import KernelSource
from halfbyte.kernels.gemm_w4_wgmma.config import TARGET, WgmmaGemmConfig, check_legal

MODULES: Final = (
    "halfbyte.arch.gpus",
    "halfbyte.device.cluster_fragments",
    "halfbyte.device.float_arithmetic",
    "halfbyte.device.inline_ptx",
    "halfbyte.device.memory_access",
    "halfbyte.device.operand_load",
    "halfbyte.device.packed_words",
    "halfbyte.device.ring_position",
    "halfbyte.device.scaled_product",
    "halfbyte.device.swizzled_box",
    "halfbyte.device.tile_scheduler",
    "halfbyte.device.traced_record",
    "halfbyte.device.warp_product",
    "halfbyte.device.warpgroup_product",
    "halfbyte.kernels.gemm_w4_wgmma.buffers",
    "halfbyte.kernels.gemm_w4_wgmma.config",
    "halfbyte.kernels.gemm_w4_wgmma.decode",
    "halfbyte.kernels.gemm_w4_wgmma.epilogue",
    "halfbyte.kernels.gemm_w4_wgmma.few_tokens_epilogue",
    "halfbyte.kernels.gemm_w4_wgmma.host",
    "halfbyte.kernels.gemm_w4_wgmma.integer_products",
    "halfbyte.kernels.gemm_w4_wgmma.loading",
    "halfbyte.kernels.gemm_w4_wgmma.sm90",
    "halfbyte.kernels.gemm_w4_wgmma.source",
    "halfbyte.kernels.gemm_w4_wgmma.work",
)


def make_source(config: WgmmaGemmConfig) -> KernelSource:
    """Return the kernel of a configuration; FormatError where it is not legal.

    The compiled function is called with, in this order:

        act [M, K_pad] float8_e4m3fn (fp8), float16 (exact e2m1) or int8 (INT4 exact, int8)
        weight_blocks uint8 [N_pad / 128, K_pad / 128, 9216]
        token_scale float32 [M]                     (fp8, int8)
        act_group_scale float16 [M, K_pad / 64]     (INT4 exact)
        channel_scale float32 [N_pad]
        lora_act [M, R_pad], lora_blocks uint8 [N_pad / 128, R_pad / 32, 8192]  (lora_dtype)
        bias float32 [N_pad]                        (has_bias)
        alpha float32 [1]                           (has_alpha)
        y [M, N], rows at least N apart
        max_clusters int: clusters of the persistent grid

    N_pad and K_pad are N and K rounded up to 128, R_pad is the rank rounded up to 32. Rows start at
    multiples of 16 bytes; columns of act are permuted as `weight_layout` says.
    """
    check_legal(config)
    return KernelSource("gemm_w4_wgmma", config, TARGET, MODULES, lambda: _make(config))


def list_arguments(config: WgmmaGemmConfig) -> tuple[str, ...]:
    """Return the names of the tensors that the compiled function takes, in order."""
    names = ["act", "weight_blocks"]
    names += ["token_scale"] if config.has_token_scale else []
    names += ["act_group_scale"] if config.has_act_group_scale else []
    names += ["channel_scale"]
    names += ["lora_act", "lora_blocks"] if config.lora_dtype is not None else []
    names += ["bias"] if config.has_bias else []
    names += ["alpha"] if config.has_alpha else []
    return (*names, "y")


def _make(config: WgmmaGemmConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from halfbyte.kernels.gemm_w4_wgmma.host import make_host_function

    return make_host_function(config, list_arguments(config))
