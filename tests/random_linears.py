"""QuantizedLinear records made of random bytes, for tests; no codec of the package is used."""

from dataclasses import dataclass

import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import BlockFormat, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear

# (weight format, activation format) pairs that a linear may have.
FORMAT_PAIRS = (
    ("nvfp4", "nvfp4_nunchaku"),
    ("nvfp4", "nvfp4_one_level"),
    ("nvfp4", "nvfp4_static"),
    ("nvfp4", "nvfp4_dynamic"),
    ("mxfp4", "mxfp4"),
    ("int4", "int4"),
    ("int4", "uint4_shifted"),
    ("nvfp4", None),
    ("int4", None),
)


def pair_id(pair: tuple[str, str | None]) -> str:
    """Return a readable test id of one of FORMAT_PAIRS."""
    return f"{pair[0]}-{pair[1] or 'weight_only'}"


@dataclass(frozen=True)
class LinearShape:
    """Which random linear to make; `parts` switches channel_scale, smooth and bias on."""

    n: int
    k: int
    rank: int = 16
    parts: bool = True
    dtype: torch.dtype = torch.float32


def make_weight(n: int, k: int, block_format: BlockFormat, seed: int = 0) -> BlockScaledTensor:
    """Return an [n, k] operand of random codes and scales near one; padding holds zero codes."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, block_format.padded_columns(k)), generator=draw)
    codes[:, k:] = 0
    data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    blocks = (n, block_format.num_blocks(k))
    scales: torch.Tensor
    if block_format.scale == "e4m3":
        scales = torch.randint(0x28, 0x48, blocks, generator=draw).to(torch.uint8)
        scales[:, ::5] = 0x00  # zero blocks are part of every weight
        scales = scales.view(torch.float8_e4m3fn)
    elif block_format.scale == "e8m0":
        scales = torch.randint(122, 130, blocks, generator=draw).to(torch.uint8)
        scales = scales.view(torch.float8_e8m0fnu)
    else:
        scales = (torch.rand(blocks, generator=draw) + 0.25).to(torch.float16)
    global_scale = torch.tensor(0.0371) if block_format.has_global_scale else None
    return BlockScaledTensor(block_format, data, scales, global_scale, k)


def make_linear(
    shape: LinearShape, pair: tuple[str, str | None] = ("nvfp4", "nvfp4_nunchaku"), seed: int = 0
) -> QuantizedLinear:
    """Return a random record of the given shape and (weight, activation) formats."""
    draw = torch.Generator().manual_seed(seed + 1)
    weight = make_weight(shape.n, shape.k, get_format(pair[0]), seed)
    activation = None if pair[1] is None else get_activation_format(pair[1])
    is_static = activation is not None and activation.global_scale == "static"

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw)

    def positive(size: int) -> torch.Tensor:
        return torch.rand(size, generator=draw) + 0.5

    has_rank = shape.rank > 0
    return QuantizedLinear(
        weight=weight,
        activation=activation,
        activation_global_scale=torch.tensor(0.0017) if is_static else None,
        channel_scale=positive(shape.n) if shape.parts else None,
        smooth=positive(shape.k).to(shape.dtype) if shape.parts else None,
        lora_down=normal(shape.rank, shape.k).to(shape.dtype) if has_rank else None,
        lora_up=normal(shape.n, shape.rank).to(shape.dtype) if has_rank else None,
        bias=normal(shape.n).to(shape.dtype) if shape.parts else None,
    )


def make_input(m: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return x [m, k] with one outlier column and, where there is room, one all-zero block."""
    x = torch.randn((m, k), generator=torch.Generator().manual_seed(seed + 2))
    if k > 3:
        x[:, 3] *= 20.0
    if m > 1 and k >= 128:
        x[1, 64:128] = 0.0
    return x.to(dtype)
