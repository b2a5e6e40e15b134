"""quack-kernels: linear layer, MLP and linear cross entropy, forward and backward."""

import torch
from cases import case, check_as_precise, check_close, integers, normals, run_cases
from quack.linear import linear_func
from quack.linear_cross_entropy import chunked_linear_cross_entropy
from quack.mlp import mlp_func

BF16 = torch.bfloat16


@case
def linear() -> None:
    x, weight = (
        integers((128, 64), BF16).requires_grad_(),
        integers((128, 64), BF16).requires_grad_(),
    )
    gradient = integers((128, 128), BF16)
    out = linear_func(x, weight, tuned=False)
    out.backward(gradient)
    check_close(out, x.float() @ weight.float().mT)
    check_close(x.grad, gradient.float() @ weight.float())
    check_close(weight.grad, gradient.float().mT @ x.float())


@case
def mlp() -> None:
    x = normals((128, 64), BF16).requires_grad_()
    weight1 = normals((256, 64), BF16, 0.125).requires_grad_()
    weight2 = normals((64, 256), BF16, 0.0625).requires_grad_()
    gradient = normals((128, 64), BF16)
    out = mlp_func(x, weight1, weight2, activation="gelu_tanh_approx", tuned=False)
    out.backward(gradient)
    found = []
    for dtype in (BF16, torch.float64):
        x2, w1, w2 = (t.detach().to(dtype).requires_grad_() for t in (x, weight1, weight2))
        out2 = torch.nn.functional.gelu(x2 @ w1.mT, approximate="tanh") @ w2.mT
        out2.backward(gradient.to(dtype))
        found.append((out2.detach(), x2.grad))
    (same_out, same_grad), (exact_out, exact_grad) = found
    check_as_precise(out.detach(), same_out, exact_out)
    check_as_precise(x.grad, same_grad, exact_grad)


@case
def linear_cross_entropy() -> None:
    x = normals((128, 64), BF16).requires_grad_()
    weight = normals((512, 64), BF16, 0.125).requires_grad_()
    target = torch.randint(0, 512, (128,)).to("cuda")
    loss = chunked_linear_cross_entropy(x, weight, target, chunk_size=64, tuned=False)
    loss.backward()
    x2, w2 = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    loss2 = torch.nn.functional.cross_entropy(x2 @ w2.mT, target)
    loss2.backward()
    check_close(loss.to(BF16), loss2)
    check_close(x.grad, x2.grad)


if __name__ == "__main__":
    run_cases()
