"""The kernels' arithmetic on placed operands, in float64 with the roundings that they make."""

import numpy as np
import torch

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import unpack_scales
from halfbyte.kernels.gemm_w4a4.placement import PlacedLinear
from halfbyte.reference import quantize_act_lora, w4a4_linear
from halfbyte.reference.decode import (
    Float64Array,
    make_value_table,
    read_bytes,
    read_floats,
    unpack_codes,
)

_SCALES = {"nvfp4": ("e4m3", 16), "mxfp4": ("e8m0", 32)}


def decode_placed_weight(placed: PlacedLinear) -> Float64Array:
    """Return the [N, K] float64 weight of the placed bytes, without any factor."""
    scale_name, block_size = _SCALES[placed.block_format]
    values = make_value_table("e2m1")[unpack_codes(read_bytes(placed.weight_codes), 4)]
    blocks = -(-placed.columns // block_size)
    sf = unpack_scales(placed.weight_sf, "swizzled_128x4", placed.out_features, blocks)
    scales = np.repeat(make_value_table(scale_name)[read_bytes(sf)], block_size, axis=1)
    return values[:, : placed.columns] * scales[:, : placed.columns]


def multiply_as_the_kernel_does(
    x: torch.Tensor, placed: PlacedLinear, linear: QuantizedLinear
) -> torch.Tensor:
    """Return y [M, N] in x's dtype: the two kernels' formulas, sums in float64."""
    activation = quantize_act_lora(x, linear)
    values = make_value_table("e2m1")[activation.codes]
    act = values * np.repeat(activation.scales, activation.block_format.block_size, axis=1)
    total = act[:, : placed.columns] @ decode_placed_weight(placed).T
    is_dynamic = placed.activation.global_scale == "dynamic"
    alpha = activation.global_scale if is_dynamic else 1.0
    if placed.lora_down is not None and placed.lora_up is not None:
        padded = np.zeros((len(x), placed.lora_down.shape[1]))
        padded[:, : placed.columns] = read_floats(x)
        exact = padded @ read_floats(placed.lora_down).T * placed.lora_act_scale / alpha
        lora_act = torch.from_numpy(exact).to(x.dtype)  # the quantize kernel's rounding
        total = total + read_floats(lora_act) @ read_floats(placed.lora_up).T
    if placed.column_scale is not None:
        total = total * read_floats(placed.column_scale)
    total = total * alpha
    if placed.bias is not None:
        total = total + read_floats(placed.bias)
    return torch.from_numpy(total).to(x.dtype)


def multiply_in_torch(x: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
    """Return y of the same precision in plain torch: a float32 4-bit product of exact operands,
    the low-rank branch as two products in x's dtype, one addition."""
    activation = quantize_act_lora(x, linear)
    values = make_value_table("e2m1")[activation.codes]
    act = values * np.repeat(activation.scales, activation.block_format.block_size, axis=1)
    weight = torch.from_numpy(_decode_blocks(linear)).float()
    y = torch.from_numpy(act[:, : linear.in_features]).float() @ weight.T
    for scale in (linear.weight.global_scale, linear.channel_scale):
        y = y if scale is None else y * scale
    y = y * activation.global_scale
    if linear.bias is not None:
        y = y + linear.bias.float()
    y = y.to(x.dtype)
    if linear.lora_down is not None and linear.lora_up is not None:
        y = y + (x @ linear.lora_down.to(x.dtype).T) @ linear.lora_up.to(x.dtype).T
    return y


def _decode_blocks(linear: QuantizedLinear) -> Float64Array:
    weight = linear.weight
    values = make_value_table("e2m1")[unpack_codes(read_bytes(weight.data), 4)]
    scales = make_value_table(weight.format.scale)[read_bytes(weight.scales)]
    return (values * np.repeat(scales, weight.format.block_size, axis=1))[:, : weight.columns]


def measure_column_error(y: torch.Tensor, x: torch.Tensor, linear: QuantizedLinear) -> float:
    """Return the Frobenius error of y with every column divided by the norm of the true one.

    A plain norm would see nothing but the largest columns where magnitudes are mixed.
    """
    wanted = w4a4_linear(x, linear)
    norms = np.linalg.norm(wanted, axis=0)
    norms[norms == 0] = 1.0
    return float(np.linalg.norm((y.double().numpy() - wanted) / norms) / len(norms) ** 0.5)
