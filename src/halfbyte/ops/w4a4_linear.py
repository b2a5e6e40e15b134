"""halfbyte::w4a4_linear: the whole linear layer as one op, which is what `nn.W4A4Linear` calls."""

from collections.abc import Sequence

import torch

from halfbyte.ops.checks import check_device, check_input, check_same_device
from halfbyte.ops.linear_parts import decode_spec, make_linear


@torch.library.custom_op(
    "halfbyte::w4a4_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor[] linear, str spec) -> Tensor",
)
def w4a4_linear(x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str) -> torch.Tensor:
    """Return y [M, N] in x's dtype, rounded once; see `halfbyte.reference.w4a4_linear`.

    Args:
        x: [M, K] float16, bfloat16 or float32, any strides.
        linear: the tensor list of `linear_parts.list_parts`.
        spec: `LinearSpec.encode()` of the linear.

    A NaN or an infinity in a quantized x makes its row of y NaN, other rows do not change.

    Raises FormatError for shapes and dtypes;
    UnsupportedHardwareError where no kernel exists for x's device.
    """
    from halfbyte import cpu

    parsed = decode_spec(spec)
    check_input(x, parsed)
    check_device("w4a4_linear", x.device, linear)
    y: torch.Tensor = cpu.w4a4_linear(x, make_linear(linear, parsed))
    return y


@w4a4_linear.register_fake
def _(x: torch.Tensor, linear: Sequence[torch.Tensor], spec: str) -> torch.Tensor:
    check_input(x, decode_spec(spec))
    check_same_device(x.device, linear)
    return x.new_empty((x.shape[0], linear[0].shape[0]))
