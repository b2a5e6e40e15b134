"""`quantize_act_lora` as something to compile: one program serves every M, K and R."""

from collections.abc import Callable
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.kernels.quantize_act_lora.config import QuantizeConfig, check_legal

_MODULES = (
    "halfbyte.arch.gpus",
    "halfbyte.device.float_arithmetic",
    "halfbyte.device.inline_ptx",
    "halfbyte.device.memory_access",
    "halfbyte.device.warp_product",
    "halfbyte.formats.activation",
    "halfbyte.formats.block_format",
    "halfbyte.kernels.quantize_act_lora.amax_pass",
    "halfbyte.kernels.quantize_act_lora.block_quantizer",
    "halfbyte.kernels.quantize_act_lora.config",
    "halfbyte.kernels.quantize_act_lora.kernel",
    "halfbyte.kernels.quantize_act_lora.low_rank",
    "halfbyte.kernels.quantize_act_lora.source",
    "halfbyte.kernels.quantize_act_lora.tile_load",
    "halfbyte.kernels.quantize_act_lora.tile_quantize",
)


def make_source(config: QuantizeConfig) -> KernelSource:
    """Return the kernel of a configuration; UsageError where it is not legal.

    What is compiled takes (x, smooth, lora_down, act_codes, act_sf, lora_act, scales), `scales`
    being a tuple (activation, alpha, partial_amax, weight, lora_act); see `kernel.GlobalScales`.
    What a configuration does not have is None. M = 0 is no launch: the caller returns before.
    """
    check_legal(config)

    def make() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        from halfbyte.kernels.quantize_act_lora.kernel import QuantizeActLora

        return QuantizeActLora(config), _make_fake_arguments(config)

    return KernelSource("quantize_act_lora", config, config.target, _MODULES, make)


def _make_fake_arguments(config: QuantizeConfig) -> tuple[Any, ...]:
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

    from halfbyte.kernels.quantize_act_lora.kernel import GlobalScales

    types = {
        "float16": cutlass.Float16,
        "bfloat16": cutlass.BFloat16,
        "float32": cutlass.Float32,
    }
    m, k, rank = cute.sym_int32(), cute.sym_int32(), cute.sym_int32()

    def make_matrix(dtype: Any, rows: Any, columns: Any, align: int, step: int = 1) -> Any:
        stride = (cute.sym_int64(divisibility=step), 1)
        return make_fake_tensor(dtype, (rows, columns), stride, assumed_align=align)

    def make_vector(length: Any, align: int = 4) -> Any:
        return make_fake_compact_tensor(cutlass.Float32, (length,), assumed_align=align)

    x_access = (16, 8) if config.x_is_aligned else (2, 1)
    lora_type = types[config.lora_dtype]
    scale_type = cutlass.Uint8 if config.is_swizzled else cutlass.Float16
    rule = config.activation.global_scale
    has_rank = config.rank_tile > 0
    scales = GlobalScales(
        activation=make_vector(1) if rule != "none" else None,
        alpha=make_vector(1) if rule == "dynamic" else None,
        partial_amax=make_vector(cute.sym_int32()) if rule == "dynamic" else None,
        weight=cutlass.Float32(1.0),
        lora_act=cutlass.Float32(1.0),
    )
    return (
        make_matrix(types[config.dtype], m, k, *x_access),
        make_vector(k, 16) if config.has_smooth else None,
        make_matrix(types[config.dtype], rank, k, 16, 8) if has_rank else None,
        make_matrix(cutlass.Uint8, m, cute.sym_int32(), 16, 16),
        make_fake_compact_tensor(
            scale_type,
            (cute.sym_int32(), cute.sym_int32()),
            stride_order=(1, 0),
            assumed_align=16 if config.is_swizzled else 2,
        ),
        make_matrix(lora_type, m, cute.sym_int32(), 16, 8) if has_rank else None,
        scales,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
