"""Calls of the compiled block quantizer on torch CPU tensors; every argument is checked first.

Layer: below formats/, so a format arrives as plain settings and results leave as plain tensors.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.errors import FormatError
from halfbyte.native import records
from halfbyte.native.library import NativeLibrary

VALUE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SCALE_RULES = {"e4m3": 0, "e8m0": 1, "float": 2}
_SCALE_STORAGE = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}
ELEMENTS = {"e2m1": 0, "int4": 1, "uint4": 2}
_SCALE_ORDERS = {"divide_twice": 0, "divide_product": 1, "multiply_divisor": 2}
_PAYLOAD_ORDERS = {"divide_product": 0, "reciprocal": 1, "divide_quotient": 2, "unrounded": 3}
_E8M0_ROUNDINGS = {"floor": 0, "ceil": 1, "even": 2, "rceil": 3}


@dataclass(frozen=True)
class QuantizeSettings:
    """A 4-bit block format and how its scales are chosen, as plain settings.

    Attributes:
        element: "e2m1", "int4" or "uint4".
        block_size: elements of one block: 16, 32 or 64.
        scale: "e4m3", "e8m0" or "float".
        scale_dtype: storage of a "float" scale.
        multiplier: global scale; 1.0 where the format has none.
        divisor: the global scale as its reciprocal, rounded as the mode's tool rounds it.
        min_scale: least E4M3 block scale before rounding; 0.0 for none.
        block_scale_order: E4M3 scales from the block's amax, as in `formats.modes`.
        payload_order: how E2M1 values are scaled, as in `formats.modes`.
        zero_scale: E4M3 byte of a block of zeros.
        flushed_scale: E4M3 byte where the scale of a nonzero block rounds to zero.
        keeps_minus_zero: -0.0 gets code 8, else code 0.
        e8m0_rounding: "floor", "ceil", "even" or "rceil".
        is_optimal: scales that minimise the squared error of each block.
    """

    element: Literal["e2m1", "int4", "uint4"]
    block_size: int
    scale: Literal["e4m3", "e8m0", "float"]
    scale_dtype: torch.dtype = torch.float16
    multiplier: float = 1.0
    divisor: float = 1.0
    min_scale: float = 0.0
    block_scale_order: str = "divide_twice"
    payload_order: str = "divide_product"
    zero_scale: int = 0
    flushed_scale: int = 0
    keeps_minus_zero: bool = True
    e8m0_rounding: str = "floor"
    is_optimal: bool = False


@dataclass(frozen=True, eq=False)
class QuantizedBlocks:
    """What the compiled quantizer wrote.

    Attributes:
        codes: [rows, padded columns / 2] uint8, the even column in the low nibble.
        scales: [rows, blocks] float8_e4m3fn, float8_e8m0fnu or the settings' scale_dtype. A block
            that holds a NaN or an infinity has a NaN scale and zero codes.
        saturated: blocks whose scale was clamped to the largest number of its type.
        flushed: blocks that are not zero but whose scale rounds to zero.
        zero: all-zero blocks.
        nonfinite: blocks that hold a NaN or an infinity.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    saturated: int
    flushed: int
    zero: int
    nonfinite: int


def is_supported(x: torch.Tensor) -> bool:
    """Return whether the compiled loops can read `x`: a CPU matrix of a float type.

    Any row stride is read in place; a column stride other than 1 is not.
    """
    is_matrix = x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] <= 1)
    return x.device.type == "cpu" and x.dtype in VALUE_TYPES and is_matrix


def quantize_blocks(
    loaded: NativeLibrary,
    x: torch.Tensor,
    settings: QuantizeSettings,
    *,
    smooth: torch.Tensor | None = None,
    shift: float = 0.0,
) -> QuantizedBlocks:
    """Return codes, scales and counts of `(x + shift) / smooth`, quantized block by block.

    Args:
        loaded: the compiled library.
        x: [rows, columns] float32, bfloat16 or float16 on the CPU, unit column stride.
        settings: the format.
        smooth: [columns] float32, contiguous, or None for ones.
        shift: added to x first.

    Raises:
        FormatError: an argument that the loops cannot read.
    """
    rows, columns = _check_input(x, smooth)
    block = settings.block_size
    if block not in (16, 32, 64):
        raise FormatError(f"block_size {block}, wanted 16, 32 or 64")
    blocks = -(-columns // block)
    storage = _SCALE_STORAGE.get(settings.scale, settings.scale_dtype)
    if settings.scale == "float" and storage not in VALUE_TYPES:
        raise FormatError(f"scale_dtype {storage}, wanted float16, bfloat16 or float32")
    codes = torch.empty(rows, blocks * block // 2, dtype=torch.uint8)
    scales = torch.empty(rows, blocks, dtype=storage)
    counts = torch.zeros(records.NUM_COUNTERS, dtype=torch.int64)
    job = _make_job(x, settings)
    job.smooth = None if smooth is None else smooth.data_ptr()
    job.shift, job.has_shift = shift, int(shift != 0.0)
    job.scale_type = VALUE_TYPES.get(storage, 0)
    job.codes, job.scales, job.counts = codes.data_ptr(), scales.data_ptr(), counts.data_ptr()
    if codes.numel():
        loaded.call("halfbyte_quantize", job)
    saturated, flushed, zero, nonfinite = counts.tolist()
    return QuantizedBlocks(codes, scales, saturated, flushed, zero, nonfinite)


def measure_amax(
    loaded: NativeLibrary,
    x: torch.Tensor,
    *,
    smooth: torch.Tensor | None = None,
    shift: float = 0.0,
) -> tuple[float, bool]:
    """Return the largest finite magnitude of `(x + shift) / smooth`, and whether all are finite.

    Arguments and errors are those of `quantize_blocks`.
    """
    rows, columns = _check_input(x, smooth)
    job = records.AmaxJob(
        x=x.data_ptr(),
        rows=rows,
        columns=columns,
        row_stride=x.stride(0),
        smooth=None if smooth is None else smooth.data_ptr(),
        shift=shift,
        value_type=VALUE_TYPES[x.dtype],
        has_shift=int(shift != 0.0),
        threads=choose_threads(rows * columns),
    )
    if x.numel():
        loaded.call("halfbyte_amax", job)
    return job.amax, not job.nonfinite


def choose_threads(work: int, work_per_thread: int = 1 << 16) -> int:
    """Return how many threads a call uses: torch's number, fewer where there is little work."""
    return max(1, min(torch.get_num_threads(), work // work_per_thread))


def _make_job(x: torch.Tensor, settings: QuantizeSettings) -> records.QuantizeJob:
    rows, columns = x.shape
    return records.QuantizeJob(
        x=x.data_ptr(),
        rows=rows,
        columns=columns,
        row_stride=x.stride(0),
        multiplier=settings.multiplier,
        divisor=settings.divisor,
        min_scale=settings.min_scale,
        value_type=VALUE_TYPES[x.dtype],
        element=ELEMENTS[settings.element],
        scale_rule=SCALE_RULES[settings.scale],
        block_size=settings.block_size,
        scale_order=_SCALE_ORDERS[settings.block_scale_order],
        payload_order=_PAYLOAD_ORDERS[settings.payload_order],
        zero_scale=settings.zero_scale,
        flushed_scale=settings.flushed_scale,
        keeps_minus_zero=int(settings.keeps_minus_zero),
        e8m0_rounding=_E8M0_ROUNDINGS[settings.e8m0_rounding],
        search=int(settings.is_optimal),
        threads=choose_threads(rows * columns),
    )


def _check_input(x: torch.Tensor, smooth: torch.Tensor | None) -> tuple[int, int]:
    if not is_supported(x):
        raise FormatError(
            f"x: {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()} on {x.device}; wanted a "
            "CPU matrix of float32, bfloat16 or float16 with unit column stride; call .contiguous()"
        )
    rows, columns = x.shape
    if smooth is not None:
        is_dense = smooth.dtype == torch.float32 and smooth.is_contiguous()
        if not is_dense or smooth.device.type != "cpu" or tuple(smooth.shape) != (columns,):
            raise FormatError(
                f"smooth: {smooth.dtype} of shape {tuple(smooth.shape)} on {smooth.device}, wanted "
                f"contiguous float32 of shape ({columns},) on the CPU"
            )
    return rows, columns
