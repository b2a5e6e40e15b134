"""The host function of a configuration, with arguments that stand for its tensors."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from halfbyte.device.scaled_product import FLOAT_TYPES
from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from halfbyte.kernels.gemm_w4a4.sm100 import GemmProgram, GemmTensors

ROW_ALIGNMENT_BYTES = 16  # of a TMA descriptor's strides and address


def make_host_function(
    config: GemmConfig, names: tuple[str, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return (host function, fake arguments); the function takes the tensors called `names`."""
    program = GemmProgram(config)

    @cute.jit
    def gemm_w4a4(tensors: Any, max_clusters: Int32, stream: Any) -> None:
        program.launch(
            arrange(config, dict(zip(names, tensors, strict=True))), max_clusters, stream
        )

    fakes = tuple(make_fake(config, name) for name in names)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return gemm_w4a4, (fakes, Int32(1), stream)


def arrange(config: GemmConfig, tensors: dict[str, Any]) -> GemmTensors:
    """Return the tensors as the MMA's A and B: with swapped operands A is the weight."""
    act = tensors["act_codes"], tensors["act_sf"], tensors.get("lora_act")
    weight = tensors["weight_codes"], tensors["weight_sf"], tensors.get("lora_up")
    a, b = (weight, act) if config.tile.swap else (act, weight)
    return GemmTensors(
        a_codes=a[0],
        a_sf=a[1],
        b_codes=b[0],
        b_sf=b[1],
        lora_a=a[2],
        lora_b=b[2],
        scale=tensors.get("column_scale"),
        bias=tensors.get("bias"),
        smooth=tensors.get("next_smooth"),
        alpha=tensors.get("alpha"),
        output=tensors.get("y"),
        next_codes=tensors.get("next_codes"),
        next_sf=tensors.get("next_sf"),
        next_global_scale=tensors.get("next_global_scale"),
    )


def make_fake(config: GemmConfig, name: str) -> Any:
    """Return a tensor without memory for the argument called `name`: any shape, aligned rows."""
    if name in ("act_codes", "weight_codes", "next_codes"):
        return _make_rows(Uint8)
    if name in ("act_sf", "weight_sf", "next_sf"):
        return make_fake_compact_tensor(Uint8, (cute.sym_int(divisibility=512),), assumed_align=16)
    if name in ("lora_act", "lora_up"):
        assert config.low_rank is not None
        return _make_rows(FLOAT_TYPES[config.low_rank.dtype])
    if name == "y":
        return _make_rows(FLOAT_TYPES[config.out_dtype], is_padded=False)
    return make_fake_compact_tensor(Float32, (cute.sym_int(),), assumed_align=4)


def _make_rows(element: Any, is_padded: bool = True) -> Any:
    """Return [rows, columns] with rows a multiple of 16 bytes apart, and as long if padded."""
    divisor = ROW_ALIGNMENT_BYTES * 8 // element.width
    columns = cute.sym_int(divisibility=divisor) if is_padded else cute.sym_int()
    stride = cute.sym_int(divisibility=divisor)
    return make_fake_tensor(
        element, (cute.sym_int(), columns), (stride, 1), assumed_align=ROW_ALIGNMENT_BYTES
    )
