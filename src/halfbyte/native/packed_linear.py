"""Calls of the compiled packed linear on torch CPU tensors; every argument is checked first.

Layer: below formats/, so operands arrive as plain tensors and settings.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfbyte.errors import FormatError
from halfbyte.native import records
from halfbyte.native.library import NativeLibrary
from halfbyte.native.quantize_blocks import (
    ELEMENTS,
    SCALE_RULES,
    VALUE_TYPES,
    choose_threads,
    is_supported,
)

# Multiply-adds that are worth a thread of their own (some 20 microseconds of work).
_WORK_PER_THREAD = 1 << 20


@dataclass(frozen=True, eq=False)
class PackedOperand:
    """A matrix of packed 4-bit codes with block scales; value = element * scale * multiplier.

    Attributes:
        codes: [rows, depth / 2] uint8, contiguous; depth is padded to whole blocks.
        scales: [rows, depth / block_size], contiguous, one byte or a float type.
        element: "e2m1", "int4" or "uint4".
        scale: "e4m3", "e8m0" or "float".
        block_size: 16, 32 or 64.
        multiplier: the global scale; 1.0 where there is none.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    element: str
    scale: Literal["e4m3", "e8m0", "float"]
    block_size: int
    multiplier: float = 1.0

    @property
    def depth(self) -> int:
        """Elements of one row, padding included."""
        return 2 * self.codes.shape[1]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """What is done to the product: * channel_scale + bias + lora_act @ lora_up.T.

    Attributes:
        channel_scale: [N] float32 or None for ones.
        bias: [N] of a float type or None.
        lora_act: [M, R] float32 or None.
        lora_up: [N, R] of a float type, present exactly when lora_act is.
    """

    channel_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lora_act: torch.Tensor | None = None
    lora_up: torch.Tensor | None = None


def is_multiplicable(a: PackedOperand, w: PackedOperand) -> bool:
    """Return whether the compiled loops multiply these formats: same blocks, same element kind."""
    is_same = a.block_size == w.block_size and a.scale == w.scale
    kinds = (a.element == "e2m1", w.element == "e2m1")
    return is_same and kinds[0] == kinds[1] and (w.block_size, w.scale) in _SUPPORTED


# The block lengths and scale rules whose sums csrc/packed_linear.h proves exact.
_SUPPORTED = ((16, "e4m3"), (32, "e8m0"), (64, "float"))


def multiply_packed(
    loaded: NativeLibrary, a: PackedOperand, w: PackedOperand, epilogue: Epilogue, out: torch.Tensor
) -> None:
    """Write `a @ w.T` with its epilogue into `out`; each output is rounded once.

    Block sums are exact in int32; scaled block sums add up in float32 in the order of K, whatever
    the number of threads.

    Args:
        loaded: the compiled library.
        a: [M, K] activations.
        w: [N, K] weights.
        epilogue: scales, bias and low-rank branch.
        out: [M, N] float32, bfloat16 or float16, unit column stride; all of it is written.

    Raises:
        FormatError: shapes, dtypes or formats that do not fit together.
    """
    _check_operand(a, "a")
    _check_operand(w, "w")
    rows, outputs, depth = a.codes.shape[0], w.codes.shape[0], a.depth
    if not is_multiplicable(a, w) or w.depth != depth or depth == 0:
        raise FormatError(
            f"a ({a.element}, blocks of {a.block_size}, depth {depth}) and w ({w.element}, blocks "
            f"of {w.block_size}, depth {w.depth}) cannot be multiplied"
        )
    _check_out(out, rows, outputs)
    rank = _check_epilogue(epilogue, rows, outputs)
    job = records.LinearJob(
        a_codes=a.codes.data_ptr(),
        a_scales=a.scales.data_ptr(),
        w_codes=w.codes.data_ptr(),
        w_scales=w.scales.data_ptr(),
        rows=rows,
        outputs=outputs,
        depth=depth,
        rank=rank,
        channel_scale=_pointer(epilogue.channel_scale),
        bias=_pointer(epilogue.bias),
        lora_act=_pointer(epilogue.lora_act),
        lora_up=_pointer(epilogue.lora_up),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        alpha=a.multiplier * w.multiplier,
        a_element=ELEMENTS[a.element],
        w_element=ELEMENTS[w.element],
        scale_rule=SCALE_RULES[a.scale],
        a_scale_type=VALUE_TYPES.get(a.scales.dtype, 0),
        w_scale_type=VALUE_TYPES.get(w.scales.dtype, 0),
        block_size=a.block_size,
        bias_type=_value_type(epilogue.bias),
        lora_type=_value_type(epilogue.lora_up),
        out_type=VALUE_TYPES[out.dtype],
        threads=choose_threads(max(rows, 8) * outputs * depth, _WORK_PER_THREAD),
    )
    if out.numel():
        loaded.call("halfbyte_linear", job)


def dequantize_packed(
    loaded: NativeLibrary, w: PackedOperand, out: torch.Tensor, threads: int | None = None
) -> None:
    """Write the float32 numbers of packed rows into `out`: element * (scale * multiplier).

    Args:
        loaded: the compiled library.
        w: the packed rows.
        out: [rows, columns] float32, unit column stride; columns may leave out the padding.
        threads: None for as many as `choose_threads` says. Between two torch products take 1:
            torch's idle workers spin for a while, and threads of ours would fight them for cores.

    Raises:
        FormatError: shapes or dtypes that do not fit.
    """
    _check_operand(w, "w")
    columns = out.shape[1]
    _check_out(out, w.codes.shape[0], columns)
    blocks = -(-columns // w.block_size)
    if out.dtype != torch.float32 or blocks != w.scales.shape[1]:
        raise FormatError(
            f"out: {out.dtype} of shape {tuple(out.shape)}, wanted float32 with the columns of "
            f"{w.scales.shape[1]} blocks of {w.block_size}"
        )
    job = records.DequantizeJob(
        **_make_operand_fields(w),
        columns=columns,
        values=out.data_ptr(),
        row_stride=out.stride(0),
        threads=threads or choose_threads(out.numel()),
    )
    if out.numel():
        loaded.call("halfbyte_dequantize", job)


def multiply_decoded_rows(loaded: NativeLibrary, x: torch.Tensor, w: PackedOperand) -> torch.Tensor:
    """Return x @ w.T with float32 products of decoded weights: [M, N] float32.

    Each weight row is decoded once and read by all rows of x: meant for few rows.

    Args:
        loaded: the compiled library.
        x: [M, K] float32, contiguous; K may leave out the padding.
        w: [N, K] packed weights.

    Raises:
        FormatError: shapes or dtypes that do not fit.
    """
    _check_operand(w, "w")
    rows, columns = x.shape
    _check_tensor("x", x, (rows, columns), (torch.float32,))
    if -(-columns // w.block_size) != w.scales.shape[1]:
        raise FormatError(f"x: {columns} columns, w has {w.scales.shape[1]} blocks a row")
    out = torch.empty(rows, w.codes.shape[0])
    job = records.ProductJob(
        **_make_operand_fields(w),
        columns=columns,
        threads=choose_threads(max(rows, 8) * w.codes.numel(), _WORK_PER_THREAD),
        x=x.data_ptr(),
        x_rows=rows,
        out=out.data_ptr(),
    )
    if out.numel():
        loaded.call("halfbyte_product", job)
    return out


def project_rows(loaded: NativeLibrary, x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return x @ down.T in float32: [M, R] float32.

    Args:
        loaded: the compiled library.
        x: [M, K] float32, bfloat16 or float16, unit column stride.
        down: [R, K] float32, bfloat16 or float16, contiguous.

    Raises:
        FormatError: shapes or dtypes that do not fit.
    """
    if not is_supported(x):
        raise FormatError(f"x: {x.dtype}, strides {x.stride()} on {x.device}; call .contiguous()")
    rows, columns = x.shape
    rank = down.shape[0]
    _check_tensor("down", down, (rank, columns), tuple(VALUE_TYPES))
    out = torch.empty(rows, rank)
    job = records.ProjectJob(
        x=x.data_ptr(),
        rows=rows,
        columns=columns,
        row_stride=x.stride(0),
        down=down.data_ptr(),
        rank=rank,
        out=out.data_ptr(),
        value_type=VALUE_TYPES[x.dtype],
        down_type=VALUE_TYPES[down.dtype],
        threads=choose_threads(rows * rank * columns, _WORK_PER_THREAD),
    )
    if out.numel():
        loaded.call("halfbyte_project", job)
    return out


def _make_operand_fields(w: PackedOperand) -> dict[str, Any]:
    """Return what DequantizeJob and ProductJob say of one packed operand."""
    return {
        "codes": w.codes.data_ptr(),
        "scales": w.scales.data_ptr(),
        "rows": w.codes.shape[0],
        "multiplier": w.multiplier,
        "element": ELEMENTS[w.element],
        "scale_rule": SCALE_RULES[w.scale],
        "scale_type": VALUE_TYPES.get(w.scales.dtype, 0),
        "block_size": w.block_size,
    }


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _value_type(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else VALUE_TYPES[tensor.dtype]


def _check_operand(operand: PackedOperand, name: str) -> None:
    codes, scales = operand.codes, operand.scales
    is_dense = codes.is_contiguous() and scales.is_contiguous()
    is_host = codes.device.type == "cpu" and scales.device.type == "cpu"
    is_float = scales.dtype in VALUE_TYPES
    wanted = (codes.shape[0], 2 * codes.shape[-1] // operand.block_size)
    fits = (
        codes.dtype == torch.uint8
        and (is_float if operand.scale == "float" else scales.element_size() == 1)
        and tuple(scales.shape) == wanted
        and wanted[1] * operand.block_size == 2 * codes.shape[-1]
        and operand.element in ELEMENTS
        and operand.scale in SCALE_RULES
    )
    if not (is_dense and is_host and fits):
        raise FormatError(
            f"{name}: codes {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} "
            f"{tuple(scales.shape)} on {codes.device} are no contiguous CPU operand of "
            f"{operand.element} in blocks of {operand.block_size} with {operand.scale} scales"
        )


def _check_out(out: torch.Tensor, rows: int, columns: int) -> None:
    is_readable = out.device.type == "cpu" and out.dtype in VALUE_TYPES
    has_rows = tuple(out.shape) == (rows, columns) and (columns <= 1 or out.stride(1) == 1)
    if not is_readable or not has_rows:
        raise FormatError(
            f"out: {out.dtype} of shape {tuple(out.shape)}, strides {out.stride()} on {out.device};"
            f" wanted a CPU float tensor of shape {(rows, columns)} with unit column stride"
        )


def _check_epilogue(epilogue: Epilogue, rows: int, outputs: int) -> int:
    if (epilogue.lora_act is None) != (epilogue.lora_up is None):
        raise FormatError("lora_act and lora_up come together: one of them is missing")
    rank = 0 if epilogue.lora_act is None else epilogue.lora_act.shape[-1]
    floats, single = tuple(VALUE_TYPES), (torch.float32,)
    _check_tensor("channel_scale", epilogue.channel_scale, (outputs,), single)
    _check_tensor("bias", epilogue.bias, (outputs,), floats)
    _check_tensor("lora_act", epilogue.lora_act, (rows, rank), single)
    _check_tensor("lora_up", epilogue.lora_up, (outputs, rank), floats)
    return rank


def _check_tensor(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tensor is None:
        return
    is_dense = tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.dtype not in dtypes or tuple(tensor.shape) != shape or not is_dense:
        raise FormatError(
            f"{name}: {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}, wanted "
            f"contiguous {' or '.join(str(dtype) for dtype in dtypes)} of shape {shape} on the CPU"
        )
