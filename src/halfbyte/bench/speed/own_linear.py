"""A problem as a 4-bit linear of ours, and what each mode must make of it, in float64.

Nothing here calls a kernel: the definitions are those of docs/design and of `halfbyte.reference`,
written with torch's own number formats so that the whole matrix is compared on the GPU.
"""

from dataclasses import dataclass
from typing import Final

import torch

from halfbyte.bench.speed.problem import Problem
from halfbyte.bench.speed.trial import Rate
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantize import (
    decode_codes,
    decode_scales,
    dequantize,
    quantize,
    quantize_activation,
)
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import unpack_act

_LARGEST_E4M3: Final = 448.0
_LARGEST_INT8: Final = 127.0
_INT4_GROUP: Final = 64  # columns that share a scale
_E4M3_BITS: Final = 4  # significant bits of a normal E4M3 number


@dataclass(frozen=True)
class OwnMode:
    """One way our kernels run a linear.

    Attributes:
        mode: the contract that the ops take: "fp8", "exact" or "int8".
        weight, activation: names of the formats of the record.
        rate: whose TFLOPS it is compared with.
        limit: of y's relative error against the definition.
        element_limit: of one element's error, over the size of its column.
    """

    mode: str
    weight: str
    activation: str
    rate: Rate
    limit: float
    element_limit: float = 0.06


# Rounding of y and of lora_act to 16 bits; E4M3 products also add 14-bit sums (see `peers`).
OWN_MODES: Final = {
    "fp8": OwnMode("fp8", "nvfp4", "nvfp4_nunchaku", "fp8", 8e-3),
    "exact": OwnMode("exact", "nvfp4", "nvfp4_nunchaku", "bf16", 5e-3),
    "int8": OwnMode("int8", "int4", "int4", "fp8", 5e-3),
    "exact_int4": OwnMode("exact", "int4", "int4", "fp8", 5e-3),
}


def make_linear(problem: Problem, own: OwnMode) -> QuantizedLinear:
    """Return the problem's linear with 4-bit weights, smoothing and a scale a channel."""
    weight = problem.weight.float()
    draw = torch.Generator(problem.device).manual_seed(problem.shape.k)
    spread = torch.rand(weight.shape, generator=draw, device=problem.device)
    smooth = spread[0] + 0.5
    channel_scale = torch.exp2(torch.round(4.0 * spread[:, 0]) - 2.0)
    smoothed = weight * smooth / channel_scale.unsqueeze(1)
    scale_dtype = torch.float16
    record = quantize(smoothed.cpu(), own.weight, scale_dtype=scale_dtype)
    return QuantizedLinear(
        weight=_move(record, problem.device),
        activation=get_activation_format(own.activation),
        channel_scale=channel_scale,
        smooth=smooth,
        lora_down=problem.lora_down,
        lora_up=problem.lora_up,
        bias=problem.bias,
    )


def _move(tensor: BlockScaledTensor, device: torch.device) -> BlockScaledTensor:
    scale = tensor.global_scale
    return BlockScaledTensor(
        tensor.format,
        tensor.data.to(device),
        tensor.scales.to(device),
        None if scale is None else scale.to(device),
        tensor.columns,
    )


def define_output(
    x: torch.Tensor,
    linear: QuantizedLinear,
    own: OwnMode,
    quantized: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return y [M, N] in float64 of x [M, K], as a mode of ours defines it.

    `quantized` [M, K] float64 is what the product was given for x; None: what it should be.
    """
    is_folded = own.mode == "fp8"
    weight = fold_scales(linear.weight) if is_folded else dequantize(linear.weight).double()
    y = (quantize_input(x, linear, own) if quantized is None else quantized) @ weight.t()
    if linear.channel_scale is not None:
        y *= linear.channel_scale.double()
    if linear.lora_down is not None and linear.lora_up is not None:
        lora_act = x.double() @ linear.lora_down.double().t()
        y.addmm_(lora_act, linear.lora_up.double().t())
    return y if linear.bias is None else y.add_(linear.bias.double())


def quantize_input(x: torch.Tensor, linear: QuantizedLinear, own: OwnMode) -> torch.Tensor:
    """Return x [M, K] as the mode's product sees it, in float64."""
    assert linear.activation is not None
    shifted = x.float() + linear.activation.shift
    if own.mode == "exact":
        smoothed = shifted if linear.smooth is None else shifted / linear.smooth.float()
        codes, _ = quantize_activation(smoothed.cpu(), linear.activation)
        return dequantize(codes).to(x.device).double()
    if linear.smooth is not None:
        shifted = shifted * (1.0 / linear.smooth.float())
    amax = shifted.abs().amax(dim=1, keepdim=True)
    if own.mode == "fp8":
        scale = round_up_to_power(divide(amax, _LARGEST_E4M3))
        return (shifted / scale).to(torch.float8_e4m3fn).double() * scale
    scale = torch.where(amax == 0, torch.ones_like(amax), divide(amax, _LARGEST_INT8))
    return torch.round(shifted / scale).double() * scale


def divide(values: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return float32 quotients, each rounded once.

    On a GPU torch multiplies by the reciprocal of a number; by a tensor it divides.
    """
    return values / torch.full_like(values, divisor)


def decode_hopper_act(codes: torch.Tensor, scales: torch.Tensor, own: OwnMode) -> torch.Tensor:
    """Return x [M, K_pad] in float64 as Hopper's quantizer wrote it, columns in their order."""
    if own.mode == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    values = unpack_act(codes).double()
    if own.mode == "exact" and own.weight != "int4":
        return values
    if own.mode == "exact":
        return values * scales.double().repeat_interleave(_INT4_GROUP, dim=1)
    return values * scales.double().unsqueeze(1)


def round_up_to_power(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two at or above each float32 value; 1 for 0."""
    mantissa, exponent = torch.frexp(values)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    power = torch.ldexp(torch.ones_like(values), exponent.clamp_min(-126))
    return torch.where(values == 0, torch.ones_like(values), power)


def fold_scales(weight: BlockScaledTensor) -> torch.Tensor:
    """Return the weight [N, K] in float64 with code times block scale rounded to E4M3.

    A power of two a channel keeps those products normal numbers, so that four significant bits are
    all that E4M3 means here. The global scale is applied afterwards.
    """
    tensor = BlockScaledTensor(
        weight.format,
        weight.data,
        weight.scales,
        None if weight.global_scale is None else torch.ones_like(weight.global_scale),
        weight.columns,
    )
    scales = decode_scales(tensor).double()
    products = decode_codes(tensor).double()
    products *= scales.repeat_interleave(weight.format.block_size, dim=1)[:, : weight.columns]
    mantissa, exponent = torch.frexp(products)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**_E4M3_BITS), exponent - _E4M3_BITS)
    return rounded if weight.global_scale is None else rounded * weight.global_scale.double()
