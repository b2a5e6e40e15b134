"""Tensors to block-scaled tensors and back: the public door of the number formats.

Invariants: all arithmetic is float32 in a stated order, so every implementation gives the same
bytes; inputs of any strides give the bytes of their contiguous copy; memory beside input and
output is bounded by a few chunks (and a copy of an input whose columns are not adjacent).
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_format import BlockFormat, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.compiled import (
    count_blocks,
    dequantize_compiled,
    find_library,
    measure_amax_compiled,
    quantize_compiled,
)
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES
from halfbyte.formats.e8m0 import decode_e8m0
from halfbyte.formats.elements import decode_table, get_element
from halfbyte.formats.int4 import quantize_integer_blocks
from halfbyte.formats.modes import get_mode
from halfbyte.formats.mx import quantize_mx_blocks
from halfbyte.formats.nvfp4 import (
    E4M3_MAX,
    GlobalScale,
    make_global_scale,
    quantize_nvfp4_blocks,
)
from halfbyte.formats.packing import pack_codes, unpack_codes
from halfbyte.formats.quantize_plan import (
    QuantizePlan,
    check_global_scale,
    check_input,
    make_activation_plan,
)
from halfbyte.formats.scale_search import (
    SEARCH_E4M3_MAX,
    search_integer_blocks,
    search_mx_blocks,
    search_nvfp4_blocks,
)

CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: intermediate tensors stay in the cache

_BlockQuantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, BlockCounts]]


def quantize(
    x: torch.Tensor,
    format: BlockFormat | str,
    *,
    mode: str = "halfbyte",
    scale_search: Literal["absmax", "optimal"] = "absmax",
    global_scale: torch.Tensor | None = None,
    e8m0_rounding: str = "floor",
    scale_dtype: torch.dtype = torch.float16,
) -> BlockScaledTensor:
    """Return `x` in a block-scaled format; see `quantize_with_counts`."""
    quantized, _ = quantize_with_counts(
        x,
        format,
        mode=mode,
        scale_search=scale_search,
        global_scale=global_scale,
        e8m0_rounding=e8m0_rounding,
        scale_dtype=scale_dtype,
    )
    return quantized


def quantize_with_counts(
    x: torch.Tensor,
    format: BlockFormat | str,
    *,
    mode: str = "halfbyte",
    scale_search: Literal["absmax", "optimal"] = "absmax",
    global_scale: torch.Tensor | None = None,
    e8m0_rounding: str = "floor",
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[BlockScaledTensor, BlockCounts]:
    """Return `x` in a block-scaled format, and how many blocks met the ends of the scale format.

    Columns are padded with zeros to whole blocks. No gradient flows.

    Args:
        x: [rows, columns] float32, bfloat16 or float16, any strides; finite.
        format: the number format or its name.
        mode: the NVFP4 arithmetic (`formats.modes`); other formats take "halfbyte" and
            "nunchaku" (the same for them).
        scale_search: "absmax" maps the largest magnitude to the largest element; "optimal"
            chooses the scale with the least squared error (`formats.scale_search`).
        global_scale: [] float32 multiplier for "nvfp4"; None takes it from the tensor's amax.
        e8m0_rounding: the scale rule of MX formats (`formats.e8m0`).
        scale_dtype: dtype of the scales of INT4 and UINT4.

    Raises:
        FormatError: a wrong dtype, shape, name or combination, or `x` contains NaN or Inf.
    """
    record = format if isinstance(format, BlockFormat) else get_format(format)
    plan = QuantizePlan(record, get_mode(mode), scale_search, e8m0_rounding, scale_dtype)
    check_input(x, "x")
    check_global_scale(record, global_scale)
    return _quantize_tensor(x.detach(), plan, global_scale)


def quantize_activation(
    z: torch.Tensor, act: ActivationFormat, global_scale: torch.Tensor | None = None
) -> tuple[BlockScaledTensor, BlockCounts]:
    """Return the activation `z` as `act` quantizes it, and the block counts.

    Args:
        z: [M, K] float32, already shifted and divided by smooth, any strides; finite.
        act: the activation format.
        global_scale: [] float32 multiplier, present exactly when `act.global_scale` is "static".

    Raises:
        FormatError: as `quantize_with_counts`; or a global scale that `act` does not take.
    """
    if (act.global_scale == "static") != (global_scale is not None):
        wanted = "needs" if act.global_scale == "static" else "takes no"
        raise FormatError(f"activation {act.name!r} {wanted} global_scale")
    plan = make_activation_plan(act, "z")
    check_input(z, "z")
    check_global_scale(act.block_format, global_scale)
    return _quantize_tensor(z.detach(), plan, global_scale)


def dequantize(t: BlockScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the numbers of `t`: [rows, columns] `dtype`, contiguous.

    value = element * (block_scale * global_scale), two float32 products, then one cast.
    """
    compiled = dequantize_compiled(t)
    if compiled is not None:
        return compiled.to(dtype)
    scales = decode_scales(t)
    out = torch.empty(t.shape, dtype=dtype, device=t.data.device)
    for rows in _row_chunks(t.data.shape[0], t.format.padded_columns(t.columns)):
        blocks = _split_blocks(_decode_rows(t, rows), t.format.block_size)
        values = blocks * scales[rows].unsqueeze(-1)
        out[rows] = values.flatten(-2)[:, : t.columns].to(dtype)
    return out


def decode_codes(t: BlockScaledTensor) -> torch.Tensor:
    """Return the element values of `t` without any scale: [rows, columns] float32."""
    out = torch.empty(t.shape, dtype=torch.float32, device=t.data.device)
    for rows in _row_chunks(t.data.shape[0], t.format.padded_columns(t.columns)):
        out[rows] = _decode_rows(t, rows)[:, : t.columns]
    return out


def decode_scales(t: BlockScaledTensor) -> torch.Tensor:
    """Return block scale times global scale: [rows, blocks] float32."""
    if t.format.scale == "e8m0":
        return decode_e8m0(t.scales)
    scales = t.scales.to(torch.float32)
    return scales if t.global_scale is None else scales * t.global_scale


def _decode_rows(t: BlockScaledTensor, rows: slice) -> torch.Tensor:
    data = t.data[rows]
    if t.format.element_bits == 4:
        pairs = _pair_table(t.format.element).to(data.device)
        found = torch.index_select(pairs, 0, data.reshape(-1).to(torch.int32))
        return found.view(torch.float32).reshape(data.shape[0], 2 * data.shape[1])
    table = decode_table(t.format.element).to(data.device)
    return table[unpack_codes(data, t.format.element_bits).to(torch.int32)]


@cache
def _pair_table(element: str) -> torch.Tensor:
    # Both numbers of a packed byte as one 8-byte entry: one lookup a byte instead of two.
    table = decode_table(element)
    byte = torch.arange(256)
    return torch.stack((table[byte & 0x0F], table[byte >> 4]), -1).view(torch.int64).squeeze(-1)


def _split_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    num_rows, columns = values.shape
    return values.reshape(num_rows, columns // block_size, block_size)


def _row_chunks(num_rows: int, columns: int) -> Iterator[slice]:
    if columns == 0:
        return
    step = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _quantize_tensor(
    x: torch.Tensor, plan: QuantizePlan, global_scale: torch.Tensor | None
) -> tuple[BlockScaledTensor, BlockCounts]:
    record = plan.format
    loaded = find_library(x, record)
    needs_amax = record.has_global_scale and global_scale is None
    amax = None
    if loaded is None or needs_amax:  # the compiled loops find NaN and Inf on their way
        amax = measure_amax(x)
        _check_finite(amax, x, plan)
    scale = _make_scale(amax if needs_amax else None, global_scale, plan, x.device)
    multiplier = scale.multiplier if record.has_global_scale else None
    if loaded is not None:
        blocks = quantize_compiled(loaded, x, plan, scale)
        if blocks.nonfinite:
            _check_finite(measure_amax(x), x, plan)
        quantized = BlockScaledTensor(record, blocks.codes, blocks.scales, multiplier, x.shape[1])
        return quantized, count_blocks(blocks)
    data, scales, counts = _quantize_in_torch(x, plan, scale)
    return BlockScaledTensor(record, data, scales, multiplier, x.shape[1]), counts


def _quantize_in_torch(
    x: torch.Tensor, plan: QuantizePlan, scale: GlobalScale
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    record = plan.format
    quantize_blocks = _choose_block_quantizer(plan, scale)
    num_rows, columns = x.shape
    scale_dtype = plan.scale_dtype if record.scale == "float" else torch.uint8
    data = torch.empty((num_rows, record.row_bytes(columns)), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, record.num_blocks(columns)), dtype=scale_dtype, device=x.device)
    counts = BlockCounts()
    padding = record.padded_columns(columns) - columns
    for rows in _row_chunks(num_rows, record.padded_columns(columns)):
        values = torch.nn.functional.pad(x[rows].to(torch.float32), (0, padding))
        blocks = _split_blocks(values, record.block_size)
        codes, scales[rows], chunk_counts = quantize_blocks(blocks)
        data[rows] = pack_codes(codes.flatten(-2), record.element_bits)
        counts += chunk_counts
    if record.scale in BYTE_SCALE_DTYPES:
        scales = scales.view(BYTE_SCALE_DTYPES[record.scale])
    return data, scales, counts


def _make_scale(
    amax: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    plan: QuantizePlan,
    device: torch.device,
) -> GlobalScale:
    if global_scale is not None:
        multiplier = global_scale.detach().to(device).clone()
        return GlobalScale(multiplier, 1.0 / multiplier)
    if amax is None:
        one = torch.ones((), device=device)
        return GlobalScale(one, one)
    e4m3_max = SEARCH_E4M3_MAX if plan.scale_search == "optimal" else E4M3_MAX
    return make_global_scale(amax, plan.mode, e4m3_max)


def _choose_block_quantizer(plan: QuantizePlan, scale: GlobalScale) -> _BlockQuantizer:
    element = get_element(plan.format.element)
    if plan.scale_search == "optimal":
        if plan.format.scale == "e4m3":
            return lambda blocks: search_nvfp4_blocks(blocks, scale)
        if plan.format.scale == "e8m0":
            return lambda blocks: search_mx_blocks(blocks, element, plan.e8m0_rounding)
        return lambda blocks: search_integer_blocks(blocks, element, plan.scale_dtype)
    if plan.format.scale == "e4m3":
        return lambda blocks: quantize_nvfp4_blocks(blocks, scale, plan.mode)
    if plan.format.scale == "e8m0":
        return lambda blocks: quantize_mx_blocks(blocks, element, plan.e8m0_rounding)
    return lambda blocks: quantize_integer_blocks(blocks, element, plan.scale_dtype)


def measure_amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of `x` as [] float32; 0 for an empty tensor; NaN spreads."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    compiled = measure_amax_compiled(x)
    if compiled is not None:
        return compiled
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(torch.float32)


def _check_finite(amax: torch.Tensor, x: torch.Tensor, plan: QuantizePlan) -> None:
    if bool(amax.isfinite()):
        return
    num_nan = int(x.isnan().sum())
    num_inf = int(x.isinf().sum())
    raise FormatError(
        f"{plan.tensor_name} contains NaN/Inf: {num_nan} NaN and {num_inf} Inf of {x.numel()} "
        "elements; a block scale cannot be chosen for them"
    )
