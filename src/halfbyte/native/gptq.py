"""The compiled inner loop of GPTQ on torch CPU tensors; every argument is checked first."""

import torch

from halfbyte.errors import FormatError
from halfbyte.native import records
from halfbyte.native.library import NativeLibrary
from halfbyte.native.quantize_blocks import ELEMENTS, choose_threads

MAX_COLUMNS = 128  # kMaxGptqColumns in csrc/abi.h
_WORK_PER_THREAD = 1 << 18


def round_columns(
    loaded: NativeLibrary,
    weights: torch.Tensor,
    divisors: torch.Tensor,
    factor: torch.Tensor,
    element: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [N, B] uint8 and carried errors [N, B] float32 of one block of columns.

    Each operation is rounded on its own, in the order of the columns: the torch loop of
    `svdquant.gptq` gives the same bits.

    Args:
        loaded: the library.
        weights: [N, B] float32, unit column stride, B at most 128.
        divisors: [N, B] float32, contiguous; the scale of each element.
        factor: [B, B] float32, contiguous, upper triangular.
        element: "e2m1", "int4" or "uint4".

    Raises:
        FormatError: an argument of another dtype, shape or layout.
    """
    rows, columns = weights.shape
    shapes = (tuple(divisors.shape), tuple(factor.shape))
    if shapes != ((rows, columns), (columns, columns)) or columns > MAX_COLUMNS:
        raise FormatError(
            f"divisors and factor: shapes {shapes}, wanted {(rows, columns)} and "
            f"{(columns, columns)} with at most {MAX_COLUMNS} columns"
        )
    is_dense = divisors.is_contiguous() and factor.is_contiguous() and weights.stride(1) == 1
    dtypes = {weights.dtype, divisors.dtype, factor.dtype}
    devices = {weights.device.type, divisors.device.type, factor.device.type}
    if not is_dense or dtypes != {torch.float32} or devices != {"cpu"}:
        raise FormatError(
            f"weights, divisors, factor: {dtypes} on {devices}, wanted dense float32 on the CPU"
        )
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    errors = torch.empty(rows, columns)
    job = records.GptqJob(
        weights=weights.data_ptr(),
        rows=rows,
        columns=columns,
        row_stride=weights.stride(0),
        factor=factor.data_ptr(),
        divisors=divisors.data_ptr(),
        codes=codes.data_ptr(),
        errors=errors.data_ptr(),
        element=ELEMENTS[element],
        threads=choose_threads(rows * columns * columns // 2, _WORK_PER_THREAD),
    )
    loaded.call("halfbyte_gptq", job)
    return codes, errors
