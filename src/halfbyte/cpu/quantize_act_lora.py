"""Activations of a linear to 4-bit blocks, and their low-rank projection.

Non-finite activations: a block that holds a NaN or an infinity gets a NaN scale and zero codes, so
that every output of its row is NaN and no other row changes. (Offline quantization refuses them.)
"""

from dataclasses import dataclass

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.compiled import count_blocks, find_library, make_settings
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.nvfp4 import GlobalScale, make_global_scale
from halfbyte.formats.quantize import quantize_activation
from halfbyte.formats.quantize_plan import make_activation_plan
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.native import NativeLibrary, library
from halfbyte.native.packed_linear import project_rows
from halfbyte.native.quantize_blocks import is_supported, measure_amax, quantize_blocks

CHUNK_ELEMENTS = 1 << 20  # 4 MiB of float32: what a step may hold beside input and output

_SCALE_NAN_BYTES = {"e4m3": 0x7F, "e8m0": 0xFF}


@dataclass(frozen=True, eq=False)
class QuantizedActivation:
    """The quantized input of one linear.

    Attributes:
        values: logical [M, K], the quantized (x + shift) / smooth.
        lora_act: [M, R] float32, raw x @ lora_down.T; None for rank 0.
        counts: saturated, flushed and zero blocks of this input.
    """

    values: BlockScaledTensor
    lora_act: torch.Tensor | None
    counts: BlockCounts


@torch.no_grad()
def quantize_act_lora(x: torch.Tensor, linear: QuantizedLinear) -> QuantizedActivation:
    """Return x quantized for `linear`, and its low-rank projection.

    Args:
        x: [M, K] float32, bfloat16 or float16 on the CPU, any strides.
        linear: a linear with an activation format.

    Raises:
        FormatError: a weight-only linear, or an x that does not fit.
    """
    rule = InputRule.from_linear(linear)
    check_activation(x, linear)
    values, counts = quantize_rows(x, rule)
    return QuantizedActivation(values, project_lora(x, linear), counts)


def quantize_rows(x: torch.Tensor, rule: InputRule) -> tuple[BlockScaledTensor, BlockCounts]:
    """Return x [M, K] quantized by `rule`, without a low-rank part, and its block counts.

    Args:
        x: float32, bfloat16 or float16 on the CPU, any strides.
        rule: of the linear that reads it; its smooth has K factors.
    """
    loaded = find_library(x, rule.activation.block_format)
    if loaded is None:
        return _quantize_in_torch(x, rule)
    return _quantize_compiled(loaded, x, rule)


def check_activation(x: torch.Tensor, linear: QuantizedLinear) -> None:
    """Raise FormatError unless `x` is a float CPU matrix with the linear's K columns."""
    wanted = f"[M, {linear.in_features}] float32, bfloat16 or float16 on the CPU"
    if x.ndim != 2 or x.shape[1] != linear.in_features:
        raise FormatError(f"x: shape {tuple(x.shape)}, wanted {wanted}; flatten leading dimensions")
    if x.dtype not in FLOAT_DTYPES or x.device.type != "cpu":
        raise FormatError(f"x: {x.dtype} on {x.device}, wanted {wanted}")
    device = linear.weight.data.device
    if device.type != "cpu":
        raise FormatError(f"linear: weight on {device}, wanted the CPU")


def project_lora(x: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor | None:
    """Return float32(x) @ float32(lora_down).T: [M, R] float32, or None for rank 0."""
    if linear.lora_down is None or linear.rank == 0:
        return None
    loaded = library()
    if loaded is not None:
        values = x if is_supported(x) else x.contiguous()
        return project_rows(loaded, values, linear.lora_down.contiguous())
    down = linear.lora_down.to(torch.float32).T
    out = torch.empty(x.shape[0], linear.rank)
    for rows in row_chunks(x.shape[0], x.shape[1]):
        torch.mm(x[rows].to(torch.float32), down, out=out[rows])
    return out


def row_chunks(num_rows: int, columns: int) -> list[slice]:
    """Return slices over rows of which each covers about `CHUNK_ELEMENTS` elements."""
    step = max(1, CHUNK_ELEMENTS // max(columns, 1))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def smooth_rows(x: torch.Tensor, smooth: torch.Tensor | None, shift: float) -> torch.Tensor:
    """Return (float32(x) + shift) / float32(smooth): [rows, K] float32."""
    z = x.to(torch.float32)
    if shift != 0.0:
        z = z + shift
    return z if smooth is None else z / smooth.to(torch.float32)


def _quantize_compiled(
    loaded: NativeLibrary, x: torch.Tensor, rule: InputRule
) -> tuple[BlockScaledTensor, BlockCounts]:
    act = rule.activation
    values = x if is_supported(x) else x.contiguous()
    smooth = None
    if rule.smooth is not None:
        smooth = rule.smooth.to(torch.float32).contiguous()
    plan = make_activation_plan(act)
    scale = GlobalScale(torch.ones(()), torch.ones(()))
    if act.global_scale == "static" and rule.global_scale is not None:
        scale = GlobalScale(rule.global_scale, 1.0 / rule.global_scale)
    elif act.global_scale == "dynamic":
        amax, _ = measure_amax(loaded, values, smooth=smooth, shift=act.shift)
        scale = make_global_scale(torch.tensor(amax), plan.mode)
    settings = make_settings(plan, scale)
    blocks = quantize_blocks(loaded, values, settings, smooth=smooth, shift=act.shift)
    multiplier = scale.multiplier if act.block_format.has_global_scale else None
    record = BlockScaledTensor(
        act.block_format, blocks.codes, blocks.scales, multiplier, x.shape[1]
    )
    return record, count_blocks(blocks)


def _quantize_in_torch(x: torch.Tensor, rule: InputRule) -> tuple[BlockScaledTensor, BlockCounts]:
    z = smooth_rows(x, rule.smooth, rule.activation.shift)
    is_bad = ~z.isfinite()
    has_bad = bool(is_bad.any())
    if has_bad:
        z = z.masked_fill(is_bad, 0.0)
    values, counts = quantize_activation(z, rule.activation, rule.global_scale)
    if has_bad:
        _spoil_blocks(values, is_bad)
    return values, counts


def _spoil_blocks(values: BlockScaledTensor, is_bad: torch.Tensor) -> None:
    # Writes into tensors that quantize_activation has just made: nobody else holds them.
    record = values.format
    padding = record.padded_columns(values.columns) - values.columns
    padded = torch.nn.functional.pad(is_bad, (0, padding))
    is_spoilt = padded.view(len(padded), -1, record.block_size).any(-1)  # [M, blocks]
    block_bytes = record.block_size * record.element_bits // 8
    values.data.masked_fill_(is_spoilt.repeat_interleave(block_bytes, 1), 0)
    nan_byte = _SCALE_NAN_BYTES.get(record.scale)
    if nan_byte is None:
        values.scales.masked_fill_(is_spoilt, float("nan"))
    else:
        values.scales.view(torch.uint8).masked_fill_(is_spoilt, nan_byte)
