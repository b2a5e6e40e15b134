"""One call of the GEMM into a poisoned buffer, and what must hold of it afterwards."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from halfbyte.kernels.gemm_w4a4.config import GemmConfig
from halfbyte.kernels.gemm_w4a4.source import list_arguments
from tests.kernels.gemm_w4a4.grid import GridCase
from tests.kernels.gemm_w4a4.operands import (
    DTYPES,
    GemmOperands,
    Truth,
    make_operands,
    make_truth,
    measure_relative_error,
)

Launch = Callable[..., None]
POISON: Final = 0x7FFF  # NaN in float16 and in bfloat16
GUARD_ROWS: Final = 1  # poisoned rows in front of y and behind it
GUARD_COLUMNS: Final = 8  # poisoned columns at least between the rows of y
TOLERANCE: Final = 2.0


class OutputBuffer:
    """A y [M, N] inside poison: rows in front and behind, columns between its rows.

    Attributes:
        y: the view, on the virtual GPU; rows start at multiples of 16 bytes.
    """

    def __init__(self, m: int, n: int, dtype: torch.dtype) -> None:
        """Poison everything."""
        width = -(-n // 8) * 8 + GUARD_COLUMNS
        bits = torch.full((m + 2 * GUARD_ROWS, width), POISON, dtype=torch.int16)
        self._buffer = bits.cuda().view(dtype)
        self.y = self._buffer[GUARD_ROWS : GUARD_ROWS + m, :n]

    def read(self) -> torch.Tensor:
        """Return y on the CPU; AssertionError where anything around it was written."""
        bits = self._buffer.cpu().view(torch.int16)
        m, n = self.y.shape
        inside = torch.zeros(bits.shape, dtype=torch.bool)
        inside[GUARD_ROWS : GUARD_ROWS + m, :n] = True
        written = torch.nonzero((bits != POISON) & ~inside)
        assert written.numel() == 0, (
            f"written outside of y, in its buffer at {written[:4].tolist()}"
        )
        return self._buffer.cpu()[GUARD_ROWS : GUARD_ROWS + m, :n]


def run_gemm(gpu: Any, launch: Launch, operands: GemmOperands) -> torch.Tensor:
    """Return y [M, N] of one launch; nothing may be found, and nothing around y be written."""
    config, shape = operands.config, operands.shape
    output = OutputBuffer(shape.m, shape.n, DTYPES[config.out_dtype])
    given = {name: tensor.cuda() for name, tensor in operands.tensors.items()} | {"y": output.y}
    before = len(gpu.log)
    launch(tuple(given[name] for name in list_arguments(config)), shape.max_clusters)
    records = list(gpu.log)[before:]
    assert len(records) == 1, f"{len(records)} launches, 1 wanted"
    found = [str(finding) for finding in records[0].findings]
    assert not found, f"the virtual GPU found {found}"
    return output.read()


def check_gemm(
    gpu: Any, launch: Launch, operands: GemmOperands, is_integer: bool, truth: Truth | None = None
) -> None:
    """Assert that a launch gives the exact bits of integers, else at most twice torch's error."""
    y = run_gemm(gpu, launch, operands)
    truth = make_truth(operands) if truth is None else truth
    if is_integer:
        wanted = torch.from_numpy(truth.wanted).to(y.dtype)
        wrong = torch.nonzero(y != wanted)
        assert wrong.numel() == 0, f"{len(wrong)} wrong, first at {wrong[0].tolist()}"
    else:
        error, bound = measure_relative_error(y, truth.wanted), TOLERANCE * truth.torch_error
        assert error <= bound, f"relative error {error:.3g}, at most {bound:.3g} is wanted"


def compile_gemm(config: GemmConfig) -> Launch:
    """Return the kernel of a configuration, compiled for the session that is open."""
    import cutlass.cute as cute

    from halfbyte.kernels.gemm_w4a4.source import make_source

    host, arguments = make_source(config).make()
    launch: Launch = cute.compile(host, *arguments, options="--enable-tvm-ffi")
    return launch


def check_cases(gpu: Any, config: GemmConfig, cases: Iterable[GridCase]) -> int:
    """Compile a configuration, check its cases and return how many; a failure names its case."""
    launch = compile_gemm(config)
    num_cases = 0
    for case in cases:
        operands = make_operands(config, case.shape, case.rank, case.is_integer)
        try:
            check_gemm(gpu, launch, operands, case.is_integer)
        except Exception as error:
            raise AssertionError(f"{case} of {config}: {error}") from error
        num_cases += 1
    return num_cases
