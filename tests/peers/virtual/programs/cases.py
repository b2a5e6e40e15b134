"""Named cases of a peer program: `program.py` runs them all, `program.py NAME...` those named.

The programs beside this file are ordinary CUDA programs: they say device "cuda", know nothing of
the virtual GPU and stop with an exception at the first wrong number. GEMM operands are small
integers whose products and partial sums every accumulator holds exactly, so results compare
equal bit for bit; other kernels are held to PyTorch's own tolerance for their output type.
"""

import sys
from collections.abc import Callable

import torch

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """The function itself, registered under its name."""
    CASES[function.__name__] = function
    return function


def run_cases() -> None:
    """Run the cases named on the command line, or all; print one line for each."""
    names = sys.argv[1:] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise SystemExit(f"no case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    for name in names:
        torch.manual_seed(20260800)
        CASES[name]()
        torch.cuda.synchronize()
        print("passed", name, flush=True)


def integers(
    shape: tuple[int, ...], dtype: torch.dtype, low: int = -2, high: int = 3
) -> torch.Tensor:
    """A "cuda" tensor of whole numbers in [low, high)."""
    return torch.randint(low, high, shape).to(dtype).to("cuda")


def normals(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """A "cuda" tensor of normally distributed numbers."""
    return (torch.randn(shape) * scale).to(dtype).to("cuda")


def check_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless every element is equal."""
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=0, atol=0)


def check_as_precise(
    actual: torch.Tensor, same_precision: torch.Tensor, reference: torch.Tensor
) -> None:
    """Raise unless `actual` is at most twice as far from `reference` as `same_precision` is.

    For chains of products whose intermediate results are rounded.
    """
    exact = reference.double().cpu()
    error = (actual.double().cpu() - exact).norm()
    allowed = 2 * (same_precision.double().cpu() - exact).norm()
    assert error <= allowed, f"error {error:.3g}, {allowed:.3g} is allowed"


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise unless the tensors agree within PyTorch's tolerance for the actual tensor's dtype."""
    torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype).cpu())
