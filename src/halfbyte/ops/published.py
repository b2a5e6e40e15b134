"""One product from the operands that published SVDQuant kernels take."""

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.kernels.gemm_w4a4.published_operands import (
    PublishedOperands,
    convert_published_operands,
)
from halfbyte.ops.backends import choose_backend, see_session
from halfbyte.ops.blackwell import multiply_operands
from halfbyte.ops.kernel_tensors import check_kernel_dtype


@torch.no_grad()
def gemm_published(
    published: PublishedOperands, out_dtype: torch.dtype, backend: str = "auto"
) -> torch.Tensor:
    """Return y [M, N] of `out_dtype`, contiguous; the formula is PublishedOperands'.

    The operands are converted on every call: for a layer that runs often, make a QuantizedLinear
    once and use `w4a4_linear`.

    Args:
        published: the operands, all on one device.
        out_dtype: float16 or bfloat16.
        backend: one of `backends.BACKENDS`; the cpu backend does not take this operand set.

    Raises what `convert_published_operands` and `choose_backend` raise.
    """
    check_kernel_dtype("out_dtype", out_dtype)
    if not isinstance(published.wgt, torch.Tensor):
        raise FormatError(f"wgt: {type(published.wgt).__name__}, wanted a tensor [N, K/2]")
    with see_session():
        chosen = choose_backend("gemm_published", published.wgt.device, backend)
        if chosen.layout != "blackwell":
            raise UnsupportedHardwareError(
                "halfbyte::gemm_published runs the Blackwell kernel alone: move the operands to a "
                "B200 or B300, or name backend 'virtual-b200'"
            )
        return multiply_operands(
            convert_published_operands(published, out_dtype), out_dtype, chosen
        )
