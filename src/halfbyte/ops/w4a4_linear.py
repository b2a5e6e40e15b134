"""halfbyte::w4a4_linear: the whole linear layer as one op, which is what `nn.W4A4Linear` calls."""

from collections.abc import Sequence

import torch

from halfbyte.ops.backends import check_backend, has_kernel_layout, see_session
from halfbyte.ops.blackwell import check_kernel_dtype, run_linear
from halfbyte.ops.checks import check_device, check_input, check_same_device, refuse_gradients
from halfbyte.ops.linear_parts import check_part_count, decode_spec, make_linear
from halfbyte.ops.next_input import check_function
from halfbyte.ops.placed_linears import find_placed


@torch.library.custom_op(
    "halfbyte::w4a4_linear",
    mutates_args=(),
    schema='(Tensor x, Tensor[] linear, str spec, str backend="auto", '
    'str activation="none") -> Tensor',
)
def w4a4_linear(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    activation: str = "none",
) -> torch.Tensor:
    """Return y [M, N] in x's dtype, rounded once; see `halfbyte.reference.w4a4_linear`.

    On Blackwell lora_act is rounded to x's dtype in between.

    Args:
        x: [M, K] float16, bfloat16 or (on the CPU) float32, any strides.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear.
        backend: one of `backends.BACKENDS`.
        activation: function of the float32 sums: "none", "gelu", "gelu_tanh" or "silu".

    A NaN or an infinity in a quantized x makes its row of y NaN, other rows do not change.

    Raises FormatError for shapes and dtypes, UsageError for an unknown backend;
    UnsupportedHardwareError where no kernel exists for x's device or the formats.
    """
    from halfbyte import cpu

    with see_session():
        parsed = decode_spec(spec)
        check_part_count(linear)
        check_input(x, parsed)
        check_function(activation)
        chosen = check_device("w4a4_linear", x.device, linear, backend)
        if chosen.target is not None:
            check_kernel_dtype("x", x.dtype)
            return run_linear(x, find_placed(linear, parsed, x.dtype), chosen, activation)
        return cpu.w4a4_linear(x, make_linear(linear, parsed), activation)


refuse_gradients(w4a4_linear)


@w4a4_linear.register_fake
def _(
    x: torch.Tensor,
    linear: Sequence[torch.Tensor],
    spec: str,
    backend: str = "auto",
    activation: str = "none",
) -> torch.Tensor:
    check_backend(backend)
    check_input(x, decode_spec(spec))
    check_function(activation)
    check_part_count(linear)
    check_same_device(x.device, linear)
    if has_kernel_layout(x.device, backend):
        check_kernel_dtype("x", x.dtype)
    return x.new_empty((x.shape[0], linear[0].shape[0]))
