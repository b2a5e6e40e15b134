"""quack-kernels: RMSNorm and LayerNorm, forward and backward, with weight, bias and residual."""

import torch
from cases import case, check_close, normals, run_cases
from quack.rmsnorm import (
    layernorm_bwd,
    layernorm_fwd,
    layernorm_mean_ref,
    layernorm_ref,
    layernorm_rstd_ref,
    rmsnorm,
    rmsnorm_fwd,
    rmsnorm_ref,
)


def _check_forward(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = normals((rows, columns), dtype)
    weight = normals((columns,), torch.float32)
    out, _, rstd = rmsnorm_fwd(x, weight, store_rstd=True)
    check_close(out, rmsnorm_ref(x, weight))
    check_close(rstd, torch.rsqrt(x.float().square().mean(dim=-1) + 1e-6))


@case
def rmsnorm_bf16() -> None:
    _check_forward(9, 1024, torch.bfloat16)


@case
def rmsnorm_f32_odd_width() -> None:
    _check_forward(5, 760, torch.float32)


@case
def rmsnorm_cluster() -> None:
    """A row so long that several CTAs of a cluster share it."""
    _check_forward(2, 131072, torch.float16)


@case
def rmsnorm_residual_bias() -> None:
    x = normals((6, 512), torch.bfloat16)
    residual = normals((6, 512), torch.float32)
    weight, bias = normals((512,), torch.float32), normals((512,), torch.float32)
    out, residual_out, _ = rmsnorm_fwd(x, weight, bias=bias, residual=residual)
    expected, expected_residual = rmsnorm_ref(x, weight, bias=bias, residual=residual)
    check_close(out, expected)
    check_close(residual_out, expected_residual)


@case
def rmsnorm_backward() -> None:
    x = normals((33, 256), torch.float32).requires_grad_()
    weight = normals((256,), torch.float32).requires_grad_()
    gradient = normals((33, 256), torch.float32)
    rmsnorm(x, weight).backward(gradient)
    x2, weight2 = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    rmsnorm_ref(x2, weight2).backward(gradient)
    check_close(x.grad, x2.grad)
    check_close(weight.grad, weight2.grad)


@case
def layernorm() -> None:
    x = normals((7, 1536), torch.bfloat16)
    weight, bias = normals((1536,), torch.float32), normals((1536,), torch.float32)
    out, rstd, mean = layernorm_fwd(x, weight, bias, return_rstd=True, return_mean=True)
    reference = torch.nn.functional.layer_norm(x.float(), weight.shape, weight, bias, 1e-6)
    check_close(out, reference)
    check_close(rstd, layernorm_rstd_ref(x))
    check_close(mean, layernorm_mean_ref(x))


@case
def layernorm_backward() -> None:
    x = normals((17, 512), torch.float32)
    weight, gradient = normals((512,), torch.float32), normals((17, 512), torch.float32)
    out, rstd, mean = layernorm_fwd(x, weight, None, return_rstd=True, return_mean=True)
    check_close(out, layernorm_ref(x, weight))
    dx, dw, db = layernorm_bwd(x, weight, gradient, rstd, mean, has_bias=True)
    x2, weight2 = x.clone().requires_grad_(), weight.clone().requires_grad_()
    layernorm_ref(x2, weight2).backward(gradient)
    check_close(dx, x2.grad)
    check_close(dw, weight2.grad)
    check_close(db, gradient.sum(dim=0))


if __name__ == "__main__":
    run_cases()
