"""The linear that all cases of a shape compute, in 16 bits: fresh random numbers."""

from dataclasses import dataclass

import torch

from halfbyte.bench.speed.settings import LinearShape

# Eight columns of x stand out, as in real activations: a quantizer sees a wide range.
_OUTLIER_COLUMNS = 8
_OUTLIER_FACTOR = 16.0
_LOW_RANK_SHARE = 0.3  # of the output's size that the low-rank branch has


@dataclass(frozen=True, eq=False)
class Problem:
    """y = x @ weight.T + (x @ lora_down.T) @ lora_up.T + bias.

    Attributes:
        shape: its sizes.
        x: [M, K]. weight: [N, K]. bias: [N].
        lora_down: [R, K]. lora_up: [N, R]; None for rank 0.
    """

    shape: LinearShape
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    lora_down: torch.Tensor | None
    lora_up: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """float16 or bfloat16, of all of it."""
        return self.x.dtype


def make_problem(
    shape: LinearShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Problem:
    """Return random operands of about unit size, drawn on `device`."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        values = torch.randn((rows, columns), generator=draw, device=device)
        return (values * scale).to(dtype)

    x = normal(shape.m, shape.k, 1.0)
    columns = torch.randint(0, shape.k, (_OUTLIER_COLUMNS,), generator=draw, device=device)
    x[:, columns] *= _OUTLIER_FACTOR
    low = _LOW_RANK_SHARE
    has_rank = shape.rank > 0
    return Problem(
        shape=shape,
        x=x,
        weight=normal(shape.n, shape.k, shape.k**-0.5),
        bias=normal(1, shape.n, 1.0).reshape(-1),
        lora_down=normal(shape.rank, shape.k, shape.k**-0.5) if has_rank else None,
        lora_up=normal(shape.n, shape.rank, low * shape.rank**-0.5) if has_rank else None,
    )


def multiply_exactly(problem: Problem, *, with_low_rank: bool) -> torch.Tensor:
    """Return y [M, N] in float64."""
    x = problem.x.double()
    y = torch.addmm(problem.bias.double(), x, problem.weight.double().t())
    if with_low_rank and problem.lora_down is not None and problem.lora_up is not None:
        y = y.addmm_(x @ problem.lora_down.double().t(), problem.lora_up.double().t())
    return y
