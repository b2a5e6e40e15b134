"""quack-kernels: linear layer, MLP and linear cross entropy, forward and backward."""

import torch
from cases import case, check_close, integers, normals, run_cases
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
    x2, w1, w2 = (t.detach().float().requires_grad_() for t in (x, weight1, weight2))
    hidden = torch.nn.functional.gelu(x2 @ w1.mT, approximate="tanh")
    (hidden @ w2.mT).backward(gradient.float())
    check_close(out, hidden @ w2.mT)
    check_close(x.grad, x2.grad)


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
