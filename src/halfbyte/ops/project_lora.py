"""halfbyte::project_lora: the low-rank down projection alone, of an x that is quantized already."""

from collections.abc import Sequence

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.ops.backends import Layout, check_backend, find_layout, see_session
from halfbyte.ops.blackwell import BlackwellPlacer, project_input, round_up_rank
from halfbyte.ops.checks import check_device, check_input, check_same_device, refuse_gradients
from halfbyte.ops.kernel_tensors import check_kernel_dtype, on_device
from halfbyte.ops.linear_parts import (
    LinearSpec,
    check_part_count,
    decode_spec,
    make_linear,
    rank_of,
)
from halfbyte.ops.placed_linears import find_placed


@torch.library.custom_op(
    "halfbyte::project_lora",
    mutates_args=(),
    schema='(Tensor x, Tensor[] linear, str spec, str backend="auto") -> Tensor',
)
def project_lora(
    x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str, backend: str = "auto"
) -> torch.Tensor:
    """Return the lora_act that `quantize_act_lora` returns for x and a linear, by torch's product.

    For the y of `gemm_w4a4_quantized`, whose codes are there already. It may differ in the last bit
    from that of `quantize_act_lora`, which sums in another order.

    Args:
        x: [M, K] float16, bfloat16 or (on the CPU) float32, any strides.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear; it must have an activation format.
        backend: one of `backends.BACKENDS`.

    Returns [M, R] float32 on the CPU; on Blackwell [M, R_pad] in x's dtype, scaled for this linear.

    Raises FormatError for shapes and dtypes, or a weight-only linear; UnsupportedHardwareError
    where no kernel exists for x's device, on Hopper, and on Blackwell for a dynamic global scale.
    """
    from halfbyte import cpu

    with see_session():
        parsed = _check(x, linear, spec)
        chosen = check_device("project_lora", x.device, linear, backend)
        if chosen.target is None:
            lora_act = cpu.project_lora(x, make_linear(linear, parsed))
            return (
                x.new_empty((x.shape[0], 0), dtype=torch.float32) if lora_act is None else lora_act
            )
        _check_kernel(x, parsed, chosen.layout)
        with on_device(x):
            return project_input(x, find_placed(linear, parsed, BlackwellPlacer(x.dtype)))


refuse_gradients(project_lora)


@project_lora.register_fake
def _(
    x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str, backend: str = "auto"
) -> torch.Tensor:
    check_backend(backend)
    parsed = _check(x, linear, spec)
    check_same_device(x.device, linear)
    rank = rank_of(linear)
    layout = find_layout("project_lora", x.device, backend)
    if layout == "cpu":
        return x.new_empty((x.shape[0], rank), dtype=torch.float32)
    _check_kernel(x, parsed, layout)
    return x.new_empty((x.shape[0], round_up_rank(rank)))


def _check(x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str) -> LinearSpec:
    parsed = decode_spec(spec)
    check_part_count(linear)
    if parsed.activation is None:
        raise FormatError(f"linear spec {spec!r} is weight-only: its op makes its own lora_act")
    check_input(x, parsed)
    return parsed


def _check_kernel(x: torch.Tensor, spec: LinearSpec, layout: Layout) -> None:
    check_kernel_dtype("x", x.dtype)
    if layout == "hopper":
        raise UnsupportedHardwareError(
            "halfbyte::project_lora has no kernel for Hopper, where lora_act is divided by the "
            "scales of x's rows, which quantize_act_lora finds; call that"
        )
    activation = spec.activation_format
    if activation is not None and activation.global_scale == "dynamic":
        raise UnsupportedHardwareError(
            f"activation {activation.name!r}: its lora_act is divided by the global scale of all "
            "of x, which quantize_act_lora finds; call that"
        )
