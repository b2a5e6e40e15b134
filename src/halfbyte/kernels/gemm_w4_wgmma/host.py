"""The host function of a configuration, with arguments that stand for its tensors."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from halfbyte.device.scaled_product import FLOAT_TYPES
from halfbyte.kernels.gemm_w4_wgmma.buffers import act_type
from halfbyte.kernels.gemm_w4_wgmma.config import (
    LORA_BLOCK_BYTES,
    WEIGHT_BLOCK_BYTES,
    WgmmaGemmConfig,
)
from halfbyte.kernels.gemm_w4_wgmma.sm90 import GemmProgram, GemmTensors

ROW_ALIGNMENT_BYTES = 16  # of a TMA descriptor's strides and address


def make_host_function(
    config: WgmmaGemmConfig, names: tuple[str, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return (host function, fake arguments); the function takes the tensors called `names`."""
    program = GemmProgram(config)

    @cute.jit
    def gemm_w4_wgmma(tensors: Any, max_clusters: Int32, stream: Any) -> None:
        given = dict.fromkeys(GemmTensors._fields) | dict(zip(names, tensors, strict=True))
        program.launch(GemmTensors(**given), max_clusters, stream)

    fakes = tuple(make_fake(config, name) for name in names)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return gemm_w4_wgmma, (fakes, Int32(1), stream)


def make_fake(config: WgmmaGemmConfig, name: str) -> Any:
    """Return a tensor without memory for the argument called `name`: any shape, aligned rows."""
    if name == "act":
        return _make_rows(act_type(config))
    if name == "lora_act":
        assert config.lora_dtype is not None
        return _make_rows(FLOAT_TYPES[config.lora_dtype])
    if name == "y":
        return _make_rows(FLOAT_TYPES[config.out_dtype], is_padded=False)
    if name == "act_group_scale":  # two a block: read together
        sizes, stride = (cute.sym_int(), cute.sym_int(divisibility=2)), cute.sym_int(divisibility=2)
        return make_fake_tensor(Float16, sizes, (stride, 1), assumed_align=4)
    if name in ("weight_blocks", "lora_blocks"):
        size = WEIGHT_BLOCK_BYTES if name == "weight_blocks" else LORA_BLOCK_BYTES
        shape = (cute.sym_int(), cute.sym_int(), size)
        return make_fake_compact_tensor(Uint8, shape, stride_order=(2, 1, 0), assumed_align=16)
    return make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4)


def _make_rows(element: Any, is_padded: bool = True) -> Any:
    """Return [rows, columns] with rows a multiple of 16 bytes apart, and as long if padded."""
    divisor = ROW_ALIGNMENT_BYTES * 8 // element.width
    columns = cute.sym_int(divisibility=divisor) if is_padded else cute.sym_int()
    stride = cute.sym_int(divisibility=divisor)
    return make_fake_tensor(
        element, (cute.sym_int(), columns), (stride, 1), assumed_align=ROW_ALIGNMENT_BYTES
    )
