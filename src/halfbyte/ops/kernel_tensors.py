"""What every GPU kernel asks of its tensors: dtypes, rows of whole 16 bytes, the current device."""

import contextlib
from typing import Any, Final, Literal

import torch

from halfbyte.errors import FormatError

KERNEL_DTYPES: Final = (torch.float16, torch.bfloat16)
_NO_CONTEXT: Final = contextlib.nullcontext()
_ROW_BYTES: Final = 16  # rows that TMA reads or writes are a multiple of 16 bytes apart


def check_kernel_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise FormatError unless `dtype` is one that the kernels read and write."""
    if dtype not in KERNEL_DTYPES:
        raise FormatError(
            f"{name}: dtype {dtype}; the GPU kernels read and write float16 and bfloat16, "
            "and rounding float32 silently would cost its precision: convert with "
            ".to(torch.bfloat16), or use the cpu backend"
        )


def name_dtype(dtype: torch.dtype) -> Literal["float16", "bfloat16"]:
    """Return the name of a kernel dtype, as configurations spell it."""
    return "float16" if dtype == torch.float16 else "bfloat16"


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether every row of x [M, K], columns adjacent, starts at a multiple of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    return x.data_ptr() % _ROW_BYTES == 0 and (x.shape[0] == 1 or row_bytes % _ROW_BYTES == 0)


def allocate_rows(like: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised y [M, N] whose rows start at multiples of 16 bytes.

    Where N is no such multiple it is a view that `contiguous` packs.
    """
    m, n = shape
    row = -(-n // (_ROW_BYTES // 2)) * (_ROW_BYTES // 2)
    y = like.new_empty((m, row), dtype=dtype)
    return y if row == n else y[:, :n]


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the GPU of `tensor` is the current one: launches go there."""
    if not tensor.is_cuda or torch.cuda.current_device() == tensor.device.index:
        return _NO_CONTEXT
    return torch.cuda.device(tensor.device)
