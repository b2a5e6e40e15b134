"""The product of a quantized activation with packed weights, and what follows it.

Compiled path: block sums exact in int32, weights decoded panel by panel. Torch path: weights
dequantized a few rows at a time and multiplied in float32.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from halfbyte.cpu.quantize_act_lora import CHUNK_ELEMENTS, QuantizedActivation, row_chunks
from halfbyte.errors import FormatError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.compiled import find_library, make_operand
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.native import NativeLibrary
from halfbyte.native.packed_linear import (
    Epilogue,
    PackedOperand,
    dequantize_packed,
    is_multiplicable,
    multiply_decoded_rows,
    multiply_packed,
)

# What may follow the sum, by the name that kernels and ops have for it.
ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": lambda values: values,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
}
# Without vector integer products the decoded float32 product is faster beyond so few rows.
_MAX_GENERIC_ROWS = 4
# Up to so many rows, reading and decoding the weights costs more than the products.
_MAX_PRODUCT_ROWS = 16


@torch.no_grad()
def gemm_w4a4(
    act: QuantizedActivation,
    linear: QuantizedLinear,
    out_dtype: torch.dtype,
    activation: str = "none",
) -> torch.Tensor:
    """Return the linear's output: [M, N] `out_dtype`, rounded once.

    y = f((act @ weight.T) * channel_scale + bias + lora_act @ lora_up.T)

    Args:
        act: what `quantize_act_lora` returned for this linear.
        linear: the linear; its tensors are on the CPU.
        out_dtype: float32, bfloat16 or float16.
        activation: f, one of ACTIVATIONS; it is applied to float32 sums.

    Raises:
        FormatError: an activation of another depth, an output dtype or an f that there is not.
    """
    function = get_activation(activation)
    if act.values.columns != linear.in_features:
        raise FormatError(
            f"act: {act.values.columns} columns, the linear has K={linear.in_features}"
        )
    if out_dtype not in FLOAT_DTYPES:
        raise FormatError(f"out_dtype {out_dtype}, wanted float32, bfloat16 or float16")
    sum_dtype = out_dtype if activation == "none" else torch.float32
    out = torch.empty(act.values.shape[0], linear.out_features, dtype=sum_dtype)
    if out.numel() == 0:
        return out.to(out_dtype)
    if (act.lora_act is None) != (linear.rank == 0):
        raise FormatError(f"act: lora_act is {act.lora_act}, but the linear has rank {linear.rank}")
    loaded = find_library(act.values.data, act.values.format)
    if loaded is not None and linear.in_features > 0:
        a, w = make_operand(act.values), make_operand(linear.weight)
        if _is_worthwhile(loaded, a, w):
            multiply_packed(loaded, a, w, _make_epilogue(linear, act.lora_act), out)
            return function(out).to(out_dtype)
    multiply_decoded(lambda rows: _decode_rows(act.values, rows), linear, act.lora_act, out)
    return function(out).to(out_dtype)


def get_activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function of float32 sums; FormatError lists the known names."""
    if name not in ACTIVATIONS:
        raise FormatError(f"activation {name!r} is unknown; use one of: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def multiply_decoded(
    read_rows: Callable[[slice], torch.Tensor],
    linear: QuantizedLinear,
    lora_act: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write the linear's output into `out`, all of it, with float32 products of decoded weights.

    Memory beside input and output: one chunk of rows of each operand and one of the product.

    Args:
        read_rows: the float32 rows of the [M, K] left operand.
        linear: the linear.
        lora_act: [M, R] float32 or None.
        out: [M, N] of a float dtype.
    """
    k = linear.in_features
    loaded = find_library(linear.weight.data, linear.weight.format)
    if loaded is not None and 0 < out.shape[0] <= _MAX_PRODUCT_ROWS:
        left = read_rows(slice(0, out.shape[0])).contiguous()
        product = multiply_decoded_rows(loaded, left, make_operand(linear.weight))
        _finish(product, slice(None), linear, lora_act)
        out.copy_(product)
        return
    weight_rows = min(max(1, CHUNK_ELEMENTS // max(k, 1)), linear.out_features)
    panel = torch.empty(weight_rows, k)  # one buffer for all: it is written again and again
    for rows in row_chunks(out.shape[0], max(k, linear.out_features)):
        left = read_rows(rows)
        product = out[rows]
        if out.dtype != torch.float32:
            product = torch.empty(product.shape)
        for start in range(0, linear.out_features, weight_rows):
            columns = slice(start, min(start + weight_rows, linear.out_features))
            weight = panel[: columns.stop - start]
            _decode_rows_into(weight, linear.weight, columns, loaded)
            torch.mm(left, weight.T, out=product[:, columns])
        _finish(product, rows, linear, lora_act)
        if out.dtype != torch.float32:
            out[rows] = product


def _finish(
    product: torch.Tensor, rows: slice, linear: QuantizedLinear, lora_act: torch.Tensor | None
) -> None:
    # In place, on all columns at once: few large steps cost less than many small ones.
    if linear.channel_scale is not None:
        product *= linear.channel_scale
    if linear.bias is not None:
        product += linear.bias.to(torch.float32)
    if lora_act is not None and linear.lora_up is not None:
        product.addmm_(lora_act[rows], linear.lora_up.to(torch.float32).T)


def _is_worthwhile(loaded: NativeLibrary, a: PackedOperand, w: PackedOperand) -> bool:
    is_fast = loaded.isa != "generic" or a.codes.shape[0] <= _MAX_GENERIC_ROWS
    return is_fast and is_multiplicable(a, w)


def _make_epilogue(linear: QuantizedLinear, lora_act: torch.Tensor | None) -> Epilogue:
    def dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().contiguous()

    lora_up = None if lora_act is None else dense(linear.lora_up)
    return Epilogue(dense(linear.channel_scale), dense(linear.bias), dense(lora_act), lora_up)


def _decode_rows(t: BlockScaledTensor, rows: slice) -> torch.Tensor:
    return dequantize(t.take_rows(rows.start, rows.stop))


def _decode_rows_into(
    out: torch.Tensor, t: BlockScaledTensor, rows: slice, loaded: NativeLibrary | None
) -> None:
    part = t.take_rows(rows.start, rows.stop)
    if loaded is None:
        out.copy_(dequantize(part))
    else:
        dequantize_packed(loaded, make_operand(part), out, threads=1)
