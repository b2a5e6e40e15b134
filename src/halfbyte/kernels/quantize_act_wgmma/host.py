"""The host function of a configuration, with arguments that stand for its tensors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from halfbyte.kernels.quantize_act_lora.kernel import GlobalScales
from halfbyte.kernels.quantize_act_wgmma.config import K_ALIGNMENT, WgmmaQuantizeConfig
from halfbyte.kernels.quantize_act_wgmma.kernel import QuantizeActWgmma, has_dynamic_scale

_TYPES = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
_ACT_TYPES = {
    "float16": cutlass.Float16,
    "int8": cutlass.Int8,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}
ROW_ALIGNMENT_BYTES = 16


class QuantizeTensors(NamedTuple):
    """The tensors of a call, None where the configuration has none; see `source.make_source`."""

    x: Any
    smooth: Any
    lora_down: Any
    act: Any
    token_scale: Any
    act_group_scale: Any
    lora_act: Any


def make_host_function(
    config: WgmmaQuantizeConfig,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return (host function, fake arguments)."""
    program = QuantizeActWgmma(config)

    @cute.jit
    def quantize_act_wgmma(
        tensors: Any, scales: GlobalScales, max_clusters: Int32, stream: Any
    ) -> None:
        program(QuantizeTensors(*tensors), scales, max_clusters, stream)

    return quantize_act_wgmma, (
        tuple(_make_fake_tensors(config)),
        _make_fake_scales(config),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _make_fake_tensors(config: WgmmaQuantizeConfig) -> QuantizeTensors:
    m = cute.sym_int32()
    element = _TYPES[config.dtype]
    has_rank = config.rank_tile > 0
    return QuantizeTensors(
        x=_make_x(config, m),
        smooth=_make_vector(Float32, cute.sym_int32(), ROW_ALIGNMENT_BYTES)
        if config.has_smooth
        else None,
        lora_down=_make_rows(element, cute.sym_int32(), 1) if has_rank else None,
        act=_make_rows(_ACT_TYPES[config.act_dtype], m, K_ALIGNMENT),
        token_scale=_make_vector(Float32, m) if config.has_token_scale else None,
        act_group_scale=make_fake_tensor(
            Float16, (m, cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=2
        )
        if config.has_group_scales
        else None,
        lora_act=_make_rows(element, m, ROW_ALIGNMENT_BYTES // 2) if has_rank else None,
    )


def _make_x(config: WgmmaQuantizeConfig, m: Any) -> Any:
    align, step = (16, 8) if config.x_is_aligned else (2, 1)
    stride = (cute.sym_int64(divisibility=step), 1)
    return make_fake_tensor(
        _TYPES[config.dtype], (m, cute.sym_int32()), stride, assumed_align=align
    )


def _make_rows(element: Any, rows: Any, divisor: int) -> Any:
    """Return [rows, columns] with rows at multiples of 16 bytes, columns of `divisor`."""
    step = ROW_ALIGNMENT_BYTES * 8 // element.width
    stride = (cute.sym_int64(divisibility=step), 1)
    columns = cute.sym_int32(divisibility=divisor)
    return make_fake_tensor(element, (rows, columns), stride, assumed_align=ROW_ALIGNMENT_BYTES)


def _make_vector(element: Any, length: Any, align: int = 4) -> Any:
    return make_fake_compact_tensor(element, (length,), assumed_align=align)


def _make_fake_scales(config: WgmmaQuantizeConfig) -> GlobalScales:
    is_dynamic = has_dynamic_scale(config)
    is_static = not config.has_token_scale and config.activation.global_scale == "static"
    partial = _make_vector(Float32, cute.sym_int32()) if is_dynamic else None
    return GlobalScales(
        activation=_make_vector(Float32, 1) if is_dynamic or is_static else None,
        alpha=_make_vector(Float32, 1) if is_dynamic else None,
        partial_amax=partial,
        weight=Float32(1.0),
        lora_act=Float32(1.0),
    )
