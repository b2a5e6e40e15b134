"""halfbyte::gemm_w4a4_quantized: the product, its activation function, and the next layer's input.

On Blackwell all of it is one kernel: y goes from registers to codes and block scales
(docs/design/0018-quantized-epilogue.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import UnsupportedHardwareError
from halfbyte.formats.input_rule import InputRule
from halfbyte.kernels.gemm_w4a4.config import EpilogueConfig
from halfbyte.kernels.gemm_w4a4.placement import GemmOperands, align
from halfbyte.ops.backends import Backend, check_backend, find_layout, see_session
from halfbyte.ops.blackwell import (
    InputShape,
    QuantizedInput,
    allocate_input,
    launch_gemm,
    make_operands,
)
from halfbyte.ops.checks import (
    check_dense_on,
    check_device,
    check_same_device,
    refuse_gradients,
)
from halfbyte.ops.gemm_w4a4 import check_product, find_placed_for, make_cpu_input
from halfbyte.ops.kernel_tensors import allocate_rows, check_kernel_dtype
from halfbyte.ops.linear_parts import LinearSpec, make_linear, rank_of
from halfbyte.ops.next_input import (
    NEXT_PART_NAMES,
    NextSpec,
    check_kernel_rule,
    decode_next_spec,
    make_rule,
)
from halfbyte.ops.quantize_act_lora import allocate_cpu_outputs, list_cpu_outputs

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Wanted:
    """What follows the sums: the decoded next spec, the rule made with its tensors, y's dtype."""

    spec: NextSpec
    rule: InputRule
    out_dtype: torch.dtype


@torch.library.custom_op(
    "halfbyte::gemm_w4a4_quantized",
    mutates_args=(),
    schema="(Tensor[] act, Tensor[] linear, str spec, Tensor[] next, str next_spec, "
    'ScalarType out_dtype, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def gemm_w4a4_quantized(
    act: Sequence[torch.Tensor],
    linear: Sequence[torch.Tensor],
    spec: str,
    next: Sequence[torch.Tensor],
    next_spec: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Outputs:
    """Return (y, codes, scales, global_scale, lora_act), the last four for the next linear's op.

    y = f(sums) rounded to `out_dtype`, and what is quantized is that y: the bytes are those of
    `quantize_act_lora` for it. See `halfbyte.reference.gemm_w4a4_quantized`.

    Args:
        act: the four tensors that `quantize_act_lora`, or this op, returned for this linear.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear.
        next: the tensor list of `next_input.list_next_parts` of the next linear, whose K is N.
            On Blackwell a smooth in float32 spares a conversion on each call.
        next_spec: `NextSpec.encode()`: f, the next linear's activation format, which outputs.
        out_dtype: float16, bfloat16 or (on the CPU) float32.
        backend: one of `backends.BACKENDS`, that of both layers.

    Returns:
        y: [M, N] `out_dtype`; [0] where the next spec's output is "codes".
        codes, scales, global_scale, lora_act: as `quantize_act_lora` returns them on this backend
            for a next linear of rank 0: the `act` of its `gemm_w4a4`. For one with a low-rank
            branch ask for y too and put `project_lora` of it in lora_act's place.

    Raises FormatError for shapes, dtypes or a weight-only spec, UsageError for an unknown backend;
    UnsupportedHardwareError where no kernel exists for the device, the formats or the next layer:
    Blackwell's quantizes to NVFP4 with one level or a static global scale, Hopper has none.
    """
    with see_session():
        parsed = check_product(act, linear, spec, out_dtype)
        wanted = _check_next(next, next_spec, (linear[0].shape[0], out_dtype), act[0].device)
        chosen = check_device("gemm_w4a4_quantized", act[0].device, linear, backend)
        if chosen.target is None:
            return _run_on_cpu(act, linear, parsed, wanted)
        _refuse_hopper(chosen.layout)
        check_kernel_rule(wanted.spec)
        placed = find_placed_for(act, linear, parsed, out_dtype)
        return _run_kernel(make_operands(QuantizedInput(*act), placed), wanted, chosen)


refuse_gradients(gemm_w4a4_quantized)


def _run_on_cpu(
    act: Sequence[torch.Tensor], linear: Sequence[torch.Tensor], spec: LinearSpec, wanted: _Wanted
) -> Outputs:
    from halfbyte import cpu

    y, quantized = cpu.gemm_w4a4_quantized(
        make_cpu_input(act, spec, rank_of(linear)),
        make_linear(linear, spec),
        wanted.rule,
        wanted.out_dtype,
        wanted.spec.function,
    )
    outputs = list_cpu_outputs(quantized.values, None)
    return (y if wanted.spec.has_y else y.new_empty(0), *outputs)


def _run_kernel(operands: GemmOperands, wanted: _Wanted, backend: Backend) -> Outputs:
    m, n = operands.act_codes.shape[0], operands.weight_codes.shape[0]
    like = operands.act_codes
    out = _allocate_quantized(like, (m, n), wanted)
    y = like.new_empty(0, dtype=wanted.out_dtype)
    if wanted.spec.has_y:
        y = allocate_rows(like, (m, n), wanted.out_dtype)
    smooth, global_scale = wanted.rule.smooth, wanted.rule.global_scale
    outputs = {"y": y, "next_codes": out.codes, "next_sf": out.sf}
    if smooth is not None:
        outputs["next_smooth"] = align(smooth.detach().float().contiguous())
    if global_scale is not None:
        outputs["next_global_scale"] = out.global_scale.copy_(global_scale).reshape(1)
    if m > 0 and n > 0:
        epilogue = EpilogueConfig(
            activation=wanted.spec.function,
            output="both" if wanted.spec.has_y else "nvfp4",
            has_next_smooth=smooth is not None,
            next_activation=wanted.spec.activation,
        )
        launch_gemm(operands, outputs, epilogue, wanted.out_dtype, backend)
    return y.contiguous(), out.codes, out.sf, out.global_scale, out.lora_act


def _allocate_quantized(
    like: torch.Tensor, shape: tuple[int, int], wanted: _Wanted
) -> QuantizedInput:
    block_format = wanted.rule.activation.block_format
    sizes = InputShape(*shape, 0, block_format.block_size, block_format.has_global_scale)
    return allocate_input(like.new_empty(0, dtype=wanted.out_dtype), sizes)


@gemm_w4a4_quantized.register_fake
def _(
    act: Sequence[torch.Tensor],
    linear: Sequence[torch.Tensor],
    spec: str,
    next: Sequence[torch.Tensor],
    next_spec: str,
    out_dtype: torch.dtype,
    backend: str = "auto",
) -> Outputs:
    check_backend(backend)
    check_product(act, linear, spec, out_dtype)
    m, n = act[0].shape[0], linear[0].shape[0]
    wanted = _check_next(next, next_spec, (n, out_dtype), act[0].device)
    check_same_device(act[0].device, linear)
    y = act[0].new_empty((m, n) if wanted.spec.has_y else (0,), dtype=out_dtype)
    layout = find_layout("gemm_w4a4_quantized", act[0].device, backend)
    _refuse_hopper(layout)
    if layout == "cpu":
        return (y, *allocate_cpu_outputs(act[0], (m, n, 0), wanted.rule.activation))
    check_kernel_dtype("out_dtype", out_dtype)
    check_kernel_rule(wanted.spec)
    out = _allocate_quantized(act[0], (m, n), wanted)
    return y, out.codes, out.sf, out.global_scale, out.lora_act


def _refuse_hopper(layout: str) -> None:
    """Raise UnsupportedHardwareError for Hopper: its activations have a scale a token, not a block.

    A token's scale needs the whole row of y, which many CTAs write.
    """
    if layout == "hopper":
        raise UnsupportedHardwareError(
            "halfbyte::gemm_w4a4_quantized has no kernel for Hopper, whose activations share one "
            "scale along all of a row of y: call gemm_w4a4, then quantize_act_lora on its y"
        )


def _check_next(
    parts: Sequence[torch.Tensor],
    spec: str,
    output: tuple[int, torch.dtype],
    device: torch.device,
) -> _Wanted:
    """Return what follows the sums, for (N, dtype) of y; FormatError names what does not fit."""
    decoded = decode_next_spec(spec)
    columns, out_dtype = output
    rule = make_rule(parts, decoded, columns)
    for name, part in zip(NEXT_PART_NAMES, parts, strict=True):
        check_dense_on(name, part, ("act codes", device))
    return _Wanted(decoded, rule, out_dtype)
