"""Tensors on which tools could differ: shapes, tails, dtypes, zero and tiny blocks, minus zero."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 16), (7, 4096), (129, 48), (256, 576))
KINDS = ("gaussian", "student_t", "laplace", "uniform", "constant")
CASES = [
    (kind, shape, dtype)
    for kind, shape in [(kind, SHAPES[3]) for kind in KINDS] + [("gaussian", s) for s in SHAPES[:3]]
    for dtype in DTYPES
]
WITH_ENDS = [("ends", (64, 256), dtype) for dtype in DTYPES]


def case_id(case: tuple[str, tuple[int, int], torch.dtype]) -> str:
    kind, shape, dtype = case
    return f"{kind}-{shape[0]}x{shape[1]}-{str(dtype).removeprefix('torch.')}"


def make_tensor(case: tuple[str, tuple[int, int], torch.dtype]) -> torch.Tensor:
    """Return the tensor of a case; "ends" holds zero blocks, minus zeros and shrinking rows."""
    kind, shape, dtype = case
    torch.manual_seed(0)
    if kind == "student_t":
        values = torch.distributions.StudentT(3.0).sample(shape)
    elif kind == "laplace":
        values = torch.distributions.Laplace(0.0, 1.0).sample(shape)
    elif kind == "uniform":
        values = torch.rand(shape) - 0.5
    elif kind == "constant":
        values = torch.full(shape, 0.75)
    elif kind == "ends":
        # Rows from 1 down to about 2**-21 of the first: block scales cross every tool's floor.
        values = torch.randn(shape) * 2.0 ** -(torch.arange(shape[0])[:, None] / 3)
        values[5, 16:64] = 0.0
        values[6, ::3] = -0.0
    else:
        values = torch.randn(shape)
    return values.to(dtype)
