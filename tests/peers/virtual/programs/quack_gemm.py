"""quack-kernels: GEMM with its epilogues, batches, ragged groups and gathers (untuned choice)."""

from itertools import pairwise

import torch
from cases import case, check_close, check_same, integers, normals, run_cases
from quack.gemm_interface import (
    gemm,
    gemm_act,
    gemm_add,
    gemm_add_inplace,
    gemm_dact,
    gemm_norm_act,
    gemm_rms,
    gemm_symmetric,
)

BF16 = torch.bfloat16


def _check_plain(m: int, n: int, k: int, dtype: torch.dtype, transposed: bool = False) -> None:
    a = integers((k, m), dtype).mT if transposed else integers((m, k), dtype)
    b = integers((k, n), dtype) if transposed else integers((n, k), dtype).mT
    check_same(gemm(a, b, tuned=False).float(), a.float() @ b.float())


@case
def gemm_bf16() -> None:
    _check_plain(256, 256, 128, BF16)


@case
def gemm_f16_transposed() -> None:
    _check_plain(256, 192, 64, torch.float16, transposed=True)


@case
def gemm_ragged() -> None:
    _check_plain(200, 136, 72, BF16)


@case
def gemm_fp8() -> None:
    a, b = integers((256, 128), torch.float8_e4m3fn), integers((128, 128), torch.float8_e4m3fn).mT
    out = gemm(a, b, out_dtype=BF16, tuned=False)
    check_same(out.float(), a.float() @ b.float())


@case
def gemm_batched_bias() -> None:
    a, b = integers((2, 128, 64), BF16), integers((2, 128, 64), BF16).mT
    bias = integers((2, 128), BF16)
    out = gemm(a, b, bias=bias, alpha=2.0, out_dtype=torch.float32, tuned=False)
    check_same(out, 2.0 * (a.float() @ b.float()) + bias.float().unsqueeze(1))


@case
def gemm_dynamic_scheduler() -> None:
    a, b = integers((512, 64), BF16), integers((512, 64), BF16).mT
    out = gemm(a, b, dynamic_scheduler=True, tuned=False)
    check_same(out.float(), a.float() @ b.float())


@case
def gemm_split_k() -> None:
    a, b = integers((128, 512), BF16), integers((128, 512), BF16).mT
    out = gemm(a, b, split_k=2, tuned=False, out_dtype=torch.float32)
    check_same(out, a.float() @ b.float())


@case
def gemm_add_c() -> None:
    a, b, c = integers((256, 64), BF16), integers((128, 64), BF16).mT, integers((256, 128), BF16)
    check_same(gemm_add(a, b, c, tuned=False).float(), a.float() @ b.float() + c.float())
    out = c.clone()
    gemm_add_inplace(a, b, out, beta=2.0, tuned=False)
    check_same(out.float(), a.float() @ b.float() + 2.0 * c.float())


def _activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activation of the name in PyTorch; a gated one takes its gate and value in turn."""
    if name == "relu":
        return torch.relu(x)
    if name == "gelu_tanh_approx":
        return torch.nn.functional.gelu(x, approximate="tanh")
    return torch.nn.functional.silu(x[..., ::2]) * x[..., 1::2]


def _check_activation(name: str, n: int = 256) -> None:
    a, b = normals((128, 64), BF16), normals((n, 64), BF16, 0.125).mT
    preact, postact = gemm_act(a, b, activation=name, tuned=False)
    product = a.float() @ b.float()
    check_close(preact, product)
    check_close(postact, _activate(name, product))


@case
def gemm_relu() -> None:
    _check_activation("relu")


@case
def gemm_gelu() -> None:
    _check_activation("gelu_tanh_approx")


@case
def gemm_swiglu() -> None:
    _check_activation("swiglu")


@case
def gemm_gradients() -> None:
    for name, width in (("relu", 128), ("gelu_tanh_approx", 128), ("swiglu", 256)):
        a, b = normals((128, 64), BF16), normals((128, 64), BF16, 0.125).mT
        preact = normals((128, width), BF16)
        dx, postact = gemm_dact(a, b, preact, activation=name, tuned=False)
        x = preact.float().requires_grad_()
        expected = _activate(name, x)
        expected.backward(a.float() @ b.float())
        check_close(dx, x.grad)
        check_close(postact, expected.detach())


@case
def gemm_symmetric_out() -> None:
    a = integers((2, 256, 64), BF16)
    out = gemm_symmetric(a, a.mT)
    check_same((out[-1] if isinstance(out, tuple) else out).float(), a.float() @ a.float().mT)


@case
def gemm_norm() -> None:
    a, b = normals((128, 64), BF16), normals((256, 64), BF16, 0.125).mT
    weight = normals((256,), torch.float32)
    out, rstd = gemm_rms(a, b, norm_weight=weight, tuned=False)
    product = a.float() @ b.float()
    check_close(rstd, torch.rsqrt(product.square().mean(dim=-1) + 1e-6))
    check_close(out, product * weight)
    _, postact = gemm_norm_act(a, b, rstd=rstd, activation="relu", tuned=False)
    check_close(postact, torch.relu(product * rstd.unsqueeze(1)))


def _offsets(*sizes: int) -> torch.Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to("cuda")


@case
def gemm_varlen_m() -> None:
    offsets = _offsets(100, 0, 156)
    a, b = integers((256, 64), BF16), integers((3, 128, 64), BF16).mT
    out = gemm(a, b, cu_seqlens_m=offsets, tuned=False)
    bounds = offsets.tolist()
    parts = [a[s:e].float() @ b[i].float() for i, (s, e) in enumerate(pairwise(bounds))]
    check_same(out.float(), torch.cat(parts))


@case
def gemm_varlen_m_gather() -> None:
    offsets = _offsets(120, 136)
    index = torch.randperm(300)[:256].to(torch.int32).to("cuda")
    a, b = integers((300, 64), BF16), integers((2, 128, 64), BF16).mT
    out = gemm(a, b, cu_seqlens_m=offsets, A_idx=index, tuned=False)
    rows = a[index.long()].float()
    check_same(out.float(), torch.cat([rows[:120] @ b[0].float(), rows[120:] @ b[1].float()]))


@case
def gemm_varlen_k() -> None:
    offsets = _offsets(64, 40, 88)
    a, b = integers((192, 128), BF16).mT, integers((192, 128), BF16)
    out = gemm(a, b, cu_seqlens_k=offsets, tuned=False)
    bounds = offsets.tolist()
    parts = [a[:, s:e].float() @ b[s:e].float() for s, e in pairwise(bounds)]
    check_same(out.float(), torch.stack(parts))


if __name__ == "__main__":
    run_cases()
