"""`quantize_act_wgmma` as something to compile: one program for every M and R, a range of K."""

from collections.abc import Callable
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.kernels.quantize_act_wgmma.config import (
    TARGET,
    WgmmaQuantizeConfig,
    check_legal,
)

_MODULES = (
    "halfbyte.arch.gpus",
    "halfbyte.device.float_arithmetic",
    "halfbyte.device.inline_ptx",
    "halfbyte.device.memory_access",
    "halfbyte.device.operand_load",
    "halfbyte.device.packed_words",
    "halfbyte.device.ring_position",
    "halfbyte.device.scaled_product",
    "halfbyte.device.swizzled_box",
    "halfbyte.device.traced_record",
    "halfbyte.device.warp_product",
    "halfbyte.device.warpgroup_product",
    "halfbyte.formats.activation",
    "halfbyte.formats.block_format",
    "halfbyte.kernels.quantize_act_lora.amax_pass",
    "halfbyte.kernels.quantize_act_lora.block_quantizer",
    "halfbyte.kernels.quantize_act_lora.config",
    "halfbyte.kernels.quantize_act_lora.kernel",
    "halfbyte.kernels.quantize_act_lora.low_rank",
    "halfbyte.kernels.quantize_act_lora.tile_load",
    "halfbyte.kernels.quantize_act_lora.tile_quantize",
    "halfbyte.kernels.quantize_act_wgmma.block_rows",
    "halfbyte.kernels.quantize_act_wgmma.block_values",
    "halfbyte.kernels.quantize_act_wgmma.config",
    "halfbyte.kernels.quantize_act_wgmma.host",
    "halfbyte.kernels.quantize_act_wgmma.kernel",
    "halfbyte.kernels.quantize_act_wgmma.product",
    "halfbyte.kernels.quantize_act_wgmma.source",
    "halfbyte.kernels.quantize_act_wgmma.token_rows",
    "halfbyte.kernels.quantize_act_wgmma.token_scale",
    "halfbyte.kernels.quantize_act_wgmma.units",
    "halfbyte.kernels.quantize_act_wgmma.work",
)
ARGUMENTS = (
    "x",
    "smooth",
    "lora_down",
    "act",
    "token_scale",
    "act_group_scale",
    "lora_act",
)


def list_arguments(config: WgmmaQuantizeConfig) -> tuple[str, ...]:
    """Return the names of the tensors that a configuration takes; the others are None."""
    present = {
        "x": True,
        "smooth": config.has_smooth,
        "lora_down": config.rank_tile > 0,
        "act": True,
        "token_scale": config.has_token_scale,
        "act_group_scale": config.has_group_scales,
        "lora_act": config.rank_tile > 0,
    }
    return tuple(name for name in ARGUMENTS if present[name])


def make_source(config: WgmmaQuantizeConfig) -> KernelSource:
    """Return the kernel of a configuration; UsageError where it is not legal.

    What is compiled takes (tensors, scales, max_clusters), the tensors in a tuple in the order of
    ARGUMENTS, None for what `list_arguments` does not name. M = 0 is no launch: the caller returns
    before.

        x                [M, K] float16 or bfloat16, rows of any pitch
        smooth           [K] float32, 16-byte aligned: 1 / smooth in fp8 and int8, else smooth
        lora_down        [R_pad, K_pad] in x's dtype, zeros in the padding
        act              [M, K_pad], rows at multiples of 16 bytes; every element is written
        token_scale      [M] float32
        act_group_scale  [M, K_pad / 64] float16
        lora_act         [M, R_pad] in x's dtype
        scales           `quantize_act_lora.kernel.GlobalScales`
        max_clusters     clusters of cluster_k CTAs that the GPU holds at once
    """
    check_legal(config)

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from halfbyte.kernels.quantize_act_wgmma.host import make_host_function

        return make_host_function(config)

    return KernelSource("quantize_act_wgmma", config, TARGET, _MODULES, make)
