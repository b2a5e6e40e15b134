"""Products of 16-bit tensors are summed in float32 and rounded once."""

import pytest
import torch

from halfbyte.virtual.driver.session import cuda


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_sum_loses_nothing_before_the_last_rounding(dtype: torch.dtype) -> None:
    """2048 + 512 ones of 16-bit partial sums would stop at 2048 (fp16) or 256 (bfloat16)."""
    a = torch.ones(1, 2560, dtype=dtype, device="cuda")
    for product in (a @ a.t(), torch.einsum("mk,nk->mn", a, a), torch.nn.functional.linear(a, a)):
        assert product.dtype == dtype
        assert product.is_cuda
        assert product.item() == 2560


def test_gradients_flow_through_a_product(session: cuda) -> None:
    a = torch.ones(2, 3, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    (a @ a.t()).sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.bfloat16
    assert a.grad.tolist() == [[4.0] * 3] * 2
