"""quack-kernels: softmax, cross entropy, top-k, Hadamard transform and rotary embedding."""

import torch
from cases import case, check_close, check_same, normals, run_cases
from quack.cross_entropy import cross_entropy
from quack.rms_final_reduce import rms_final_reduce
from quack.rotary import apply_rotary_emb
from quack.softmax import softmax
from quack.split_k_reduce import split_k_reduce
from quack.topk import topk
from quack.transform.hadamard import hadamard_transform, hadamard_transform_ref


def _check_softmax(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = normals((rows, columns), dtype).requires_grad_()
    gradient = normals((rows, columns), dtype)
    y = softmax(x)
    y.backward(gradient)
    x2 = x.detach().clone().requires_grad_()
    y2 = torch.softmax(x2, dim=-1)
    y2.backward(gradient)
    check_close(y, y2)
    check_close(x.grad, x2.grad)


@case
def softmax_f32() -> None:
    _check_softmax(11, 1024, torch.float32)


@case
def softmax_bf16_odd_width() -> None:
    _check_softmax(4, 1016, torch.bfloat16)


@case
def softmax_cluster() -> None:
    _check_softmax(1, 65536, torch.float16)


@case
def cross_entropy_f32() -> None:
    x = normals((13, 512), torch.float32).requires_grad_()
    target = torch.randint(0, 512, (13,)).to("cuda")
    target[3] = -100
    loss = cross_entropy(x, target, reduction="none")
    loss.backward(torch.ones_like(loss))
    x2 = x.detach().clone().requires_grad_()
    loss2 = torch.nn.functional.cross_entropy(x2, target, reduction="none")
    loss2.backward(torch.ones_like(loss2))
    check_close(loss, loss2)
    check_close(x.grad, x2.grad)


@case
def cross_entropy_cluster_weight() -> None:
    x = normals((2, 65536), torch.bfloat16)
    weight = normals((65536,), torch.float32).abs()
    target = torch.tensor([17, 65535]).to("cuda")
    loss = cross_entropy(x, target, weight=weight, reduction="none")
    expected = torch.nn.functional.cross_entropy(x.float(), target, weight=weight, reduction="none")
    check_close(loss, expected)


def _check_topk(columns: int, k: int, dtype: torch.dtype) -> None:
    # Distinct values: the order of equal ones is the kernel's choice.
    rows = [torch.randperm(columns)[:columns] for _ in range(5)]
    x = (torch.stack(rows) - columns // 2).to(dtype).to("cuda").requires_grad_()
    values, indices = topk(x, k)
    expected, expected_indices = torch.topk(x.detach(), k)
    check_same(values.detach(), expected)
    check_same(indices.long(), expected_indices)
    values.backward(torch.ones_like(values))
    chosen = torch.zeros_like(x.detach()).scatter_(1, expected_indices, 1.0)
    check_same(x.grad, chosen)


@case
def topk_bf16() -> None:
    _check_topk(256, 16, torch.bfloat16)


@case
def topk_f32() -> None:
    _check_topk(1024, 32, torch.float32)


@case
def topk_softmax() -> None:
    x = normals((6, 128), torch.float32)
    values, _ = topk(x, 8, softmax=True)
    check_close(values, torch.softmax(torch.topk(x, 8).values, dim=-1))


@case
def hadamard() -> None:
    for columns, dtype in ((128, torch.bfloat16), (1024, torch.float32), (96, torch.float32)):
        x = normals((5, columns), dtype)
        check_close(hadamard_transform(x, 0.5), hadamard_transform_ref(x, 0.5))


@case
def rotary() -> None:
    x = normals((2, 24, 3, 64), torch.float32)
    angle = torch.rand(24, 32) * 6.0
    cos, sin = torch.cos(angle).to("cuda"), torch.sin(angle).to("cuda")
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    first, second = x[..., :32], x[..., 32:]
    expected = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    check_close(apply_rotary_emb(x, cos, sin), expected)
    even, odd = x[..., ::2], x[..., 1::2]
    expected = torch.stack([even * c - odd * s, odd * c + even * s], dim=-1).flatten(-2)
    check_close(apply_rotary_emb(x, cos, sin, interleaved=True), expected)


@case
def partial_sums() -> None:
    """The reductions after a GEMM with a split K or with row statistics."""
    parts = torch.randint(-8, 9, (2 * 3, 48, 64)).float().to("cuda")
    out = torch.full((2, 48, 64), float("nan")).to("cuda")
    split_k_reduce(parts, out, 3)
    check_same(out, parts.view(2, 3, 48, 64).sum(dim=1))
    squares = normals((40, 16), torch.float32).square()
    expected = torch.rsqrt(squares.sum(dim=1) / 1024 + 1e-6)
    check_close(rms_final_reduce(squares, 1.0 / 1024), expected)


if __name__ == "__main__":
    run_cases()
