"""Random operands as published kernels take them, and their product."""

import dataclasses
from typing import Any

import numpy as np
import torch

from halfbyte.kernels.gemm_w4a4.published_operands import PublishedOperands
from halfbyte.reference.decode import (
    Float64Array,
    make_value_table,
    read_bytes,
    read_floats,
    unpack_codes,
)

M, N, K, RANK = 37, 24, 48, 5


def make_published(m: int = M, **changes: Any) -> PublishedOperands:
    """Return random operands of `m` rows in the published layout."""
    draw = torch.Generator().manual_seed(5)

    def bytes_(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=draw).to(torch.uint8)

    operands = PublishedOperands(
        act=bytes_(0, 256, m, K // 2),
        wgt=bytes_(0, 256, N, K // 2),
        ascales=bytes_(0x20, 0x50, K // 16, m).view(torch.float8_e4m3fn),
        wscales=bytes_(0x20, 0x50, K // 16, N).view(torch.float8_e4m3fn),
        lora_act_in=torch.randn(m, RANK, generator=draw) * 8,
        lora_up=torch.randn(N, RANK, generator=draw),
        wcscales=torch.rand(N, generator=draw) + 0.5,
        bias=torch.randn(N, generator=draw),
        alpha=0.01,
    )
    return dataclasses.replace(operands, **changes)


def multiply_published(p: PublishedOperands) -> Float64Array:
    """Return the float64 y of the module's formula, straight from the published layout."""

    def decode(codes: torch.Tensor, scales: torch.Tensor) -> Float64Array:
        values = make_value_table("e2m1")[unpack_codes(read_bytes(codes), 4)]
        return values * np.repeat(make_value_table("e4m3")[read_bytes(scales)].T, 16, axis=1)

    y = decode(p.act, p.ascales) @ decode(p.wgt, p.wscales).T * p.alpha
    if p.wcscales is not None:
        y = y * read_floats(p.wcscales)
    if p.bias is not None:
        y = y + read_floats(p.bias)
    if p.lora_act_in is not None and p.lora_up is not None:
        y = y + read_floats(p.lora_act_in) @ read_floats(p.lora_up).T
    return np.asarray(y)


def multiply_published_in_torch(p: PublishedOperands, dtype: torch.dtype) -> torch.Tensor:
    """Return y of `dtype`: the 4-bit product rounded to it, plus a low-rank product in it."""
    exact = multiply_published(dataclasses.replace(p, lora_act_in=None, lora_up=None))
    y = torch.from_numpy(exact).to(dtype)
    if p.lora_act_in is not None and p.lora_up is not None:
        y = y + p.lora_act_in.to(dtype) @ p.lora_up.to(dtype).T
    return y
