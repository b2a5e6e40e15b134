"""Operands of a GEMM made of x and a placed linear: what the quantize kernel writes, in NumPy."""

import numpy as np
import torch

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4_wgmma.placement import PlacedWgmmaLinear
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import pack_act
from halfbyte.reference import quantize_act_lora
from halfbyte.reference.decode import make_value_table, read_floats
from halfbyte.reference.gemm_w4_wgmma import WgmmaOperands

_LARGEST = {"fp8": 448.0, "int8": 127.0}


def make_operands(
    x: torch.Tensor, placed: PlacedWgmmaLinear, linear: QuantizedLinear
) -> WgmmaOperands:
    """Return the operands for x [M, K] in its dtype."""
    token_scale, group_scale, alpha = None, None, None
    if placed.mode in _LARGEST:
        values, token_scale = quantize_tokens(x, placed)
    elif placed.activation is None:
        values = x.float() if placed.smooth is None else x.float() / placed.smooth
        values = values.half()
    else:
        activation = quantize_act_lora(x, linear)
        codes = make_value_table(activation.block_format.element)[activation.codes]
        if placed.weight == "int4":
            values = torch.from_numpy(codes).to(torch.int8)
            group_scale = pad(torch.from_numpy(activation.scales).half(), 2)
        else:
            scales = np.repeat(activation.scales, activation.block_format.block_size, axis=1)
            values = torch.from_numpy(codes * scales).half()
        if placed.has_alpha:
            alpha = torch.tensor([activation.global_scale], dtype=torch.float32)
    return WgmmaOperands(
        mode=placed.mode,
        weight=placed.weight,
        act=pack_act(pad(values[:, : placed.columns], 128)),
        weight_blocks=placed.weight_blocks,
        channel_scale=placed.channel_scale,
        token_scale=token_scale,
        act_group_scale=group_scale,
        lora_act=project(x, placed, token_scale if alpha is None else alpha),
        lora_blocks=placed.lora_blocks,
        bias=placed.bias,
        alpha=alpha,
    )


def quantize_tokens(
    x: torch.Tensor, placed: PlacedWgmmaLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (E4M3 or INT8 values [M, K], token_scale [M] float32)."""
    z = x.float()
    if placed.activation is not None and placed.activation.shift:
        z = z + placed.activation.shift
    if placed.inverse_smooth is not None:
        z = z * placed.inverse_smooth
    amax = z.abs().amax(1)
    if placed.mode == "int8":
        scale = torch.where(amax > 0, amax / 127, 1.0)
        return (z / scale[:, None]).round().to(torch.int8), scale
    mantissa, exponent = np.frexp(amax.numpy().astype(np.float64) / 448)
    power = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    scale = torch.from_numpy(np.where(amax.numpy() > 0, power, 1.0)).float()
    return (z / scale[:, None]).to(torch.float8_e4m3fn), scale


def project(
    x: torch.Tensor, placed: PlacedWgmmaLinear, scale: torch.Tensor | None
) -> torch.Tensor | None:
    """Return lora_act [M, R_pad] in x's dtype, or None for rank 0."""
    if placed.lora_down is None:
        return None
    total = read_floats(pad(x, 128)) @ read_floats(placed.lora_down).T * placed.lora_factor
    if scale is not None:
        total = total / read_floats(scale)[:, None]
    return torch.from_numpy(total).to(x.dtype)


def pad(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `values` [M, K] with zero columns up to a multiple."""
    rows, columns = values.shape
    padded = torch.zeros((rows, -(-columns // multiple) * multiple), dtype=values.dtype)
    padded[:, :columns] = values
    return padded
