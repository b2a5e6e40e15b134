"""One call of the Hopper GEMM into a poisoned buffer, and what must hold of it afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import torch

from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig
from halfbyte.kernels.gemm_w4_wgmma.source import list_arguments, make_source
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import pack_lora_up
from halfbyte.reference.gemm_w4_wgmma import (
    WgmmaOperands,
    decode_act,
    decode_lora_blocks,
    decode_weight_blocks,
    gemm_w4_wgmma,
)
from tests.kernels.compiled_source import IS_ON_SILICON, compile_source_once
from tests.kernels.gemm_w4a4.gemm_runs import OutputBuffer

Launch = Callable[..., None]
DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE: Final = 2.0
BLOCK: Final = 128
SCALES_START: Final = 4096  # of a warpgroup's 4608 bytes
_INTEGER_SCALES: Final = (0x38, 0x40, 0x48)  # E4M3 of 1, 2 and 4: 1.5 times them needs no rounding
_SCALES: Final = tuple(range(0x10, 0x6A))  # 2^-5 to 72, in all steps


@dataclass(frozen=True)
class GemmShape:
    """One product; `max_clusters` limits the grid, so that a cluster has several tiles."""

    m: int
    n: int
    k: int
    rank: int = 0
    max_clusters: int = 64

    def __str__(self) -> str:
        """Return e.g. `130x257x95r40`."""
        return f"{self.m}x{self.n}x{self.k}r{self.rank}"


def draw_operands(
    config: WgmmaGemmConfig, shape: GemmShape, is_integer: bool = False, seed: int = 0
) -> WgmmaOperands:
    """Return operands drawn as bytes: every code occurs, and scales of all sizes.

    Integers have sums that float32 holds exactly, in any order. Padding of channels and tokens is
    the kernel's concern alone: weights beyond N are not zero.
    """
    generator = np.random.default_rng([seed, shape.m, shape.n, shape.k, shape.rank])
    channels, columns = (-(-size // BLOCK) * BLOCK for size in (shape.n, shape.k))
    is_fp8 = config.mode == "fp8"
    act = np.zeros((shape.m, columns), dtype=np.float32)
    integers = generator.integers(-4, 5, (shape.m, columns)) * 2.0
    act[:] = integers if is_integer else generator.standard_normal(act.shape) * 8
    dtype = torch.float8_e4m3fn if is_fp8 else torch.float16

    def draw(length: int, choices: tuple[float, ...]) -> torch.Tensor:
        drawn = generator.choice(np.array(choices, dtype=np.float32), length)
        factors = 1.0 if is_integer else generator.uniform(0.75, 1.5, length)
        return torch.from_numpy((drawn * factors).astype(np.float32))

    lora_act = lora_blocks = None
    if config.lora_dtype is not None:
        lora_dtype, padded = DTYPES[config.lora_dtype], -(-shape.rank // 32) * 32
        size = 3.0 if is_integer else 60.0
        values = generator.uniform(-size, size, (shape.m + shape.n, padded))
        values[:, shape.rank :] = 0
        low_rank = torch.from_numpy(values.round() if is_integer else values).to(lora_dtype)
        lora_act, lora_blocks = low_rank[: shape.m], pack_lora_up(low_rank[shape.m :])
    return WgmmaOperands(
        mode=config.mode,
        weight=config.weight,
        act=torch.from_numpy(act).to(dtype),
        weight_blocks=draw_blocks(config, (channels, columns), is_integer, generator),
        channel_scale=draw(channels, (1, 2, 0.5, -4)),
        token_scale=draw(shape.m, (1, 2, 0.25)) if config.has_token_scale else None,
        lora_act=lora_act,
        lora_blocks=lora_blocks,
        bias=draw(channels, (0, 3, -64)) if config.has_bias else None,
        alpha=torch.tensor([0.5 if is_integer else 0.3]) if config.has_alpha else None,
    )


def draw_blocks(
    config: WgmmaGemmConfig, shape: tuple[int, int], is_integer: bool, generator: Any
) -> torch.Tensor:
    """Return weight_blocks of random bytes, with scales that the layout allows."""
    blocks = (shape[0] // BLOCK, shape[1] // BLOCK, 2)
    data = generator.integers(0, 256, (*blocks, 4608), dtype=np.uint8)
    codes = np.array(_INTEGER_SCALES if is_integer else _SCALES, dtype=np.uint8)
    if config.weight == "int4":
        codes = codes[codes <= 0x68]  # 7 * 64 is the largest E4M3 number
        scales = generator.choice(codes, (*blocks, 128))
        values = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
        odd = [
            (values * factor).to(torch.float8_e4m3fn).view(torch.uint8) for factor in (1, 3, 5, 7)
        ]
        data[..., SCALES_START:] = torch.stack(odd, dim=-1).reshape(*blocks, 512).numpy()
    else:
        scales = generator.choice(codes, (*blocks, 512))
        values = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
        larger = (values * 1.5).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        data[..., SCALES_START:] = scales | (larger - scales - 4) << 7
    return torch.from_numpy(data.reshape(*blocks[:2], -1))


def compile_gemm(config: WgmmaGemmConfig) -> Launch:
    """Return the kernel of a configuration, compiled for the session that is open."""
    launch: Launch = compile_source_once(make_source(config))
    return launch


def run_gemm(
    gpu: Any, launch: Launch, config: WgmmaGemmConfig, shape: GemmShape, operands: WgmmaOperands
) -> torch.Tensor:
    """Return y [M, N] of one launch; nothing may be found, and nothing around y be written."""
    output = OutputBuffer(shape.m, shape.n, DTYPES[config.out_dtype])
    given = {"y": output.y}
    for field in fields(operands):
        value = getattr(operands, field.name)
        if isinstance(value, torch.Tensor):
            given[field.name] = value.cuda()
    before = len(gpu.log)
    launch(tuple(given[name] for name in list_arguments(config)), shape.max_clusters)
    if not IS_ON_SILICON:
        records = list(gpu.log)[before:]
        assert len(records) == 1, f"{len(records)} launches, 1 wanted"
        found = [str(finding) for finding in records[0].findings]
        assert not found, f"the virtual GPU found {found}"
    return output.read()


def check_gemm(
    gpu: Any, launch: Launch, config: WgmmaGemmConfig, shape: GemmShape, is_integer: bool
) -> torch.Tensor:
    """Assert that a launch gives the exact bits of integers, else at most twice torch's error."""
    operands = draw_operands(config, shape, is_integer)
    y = run_gemm(gpu, launch, config, shape, operands)
    truth = gemm_w4_wgmma(operands)[:, : shape.n]
    if is_integer:
        wanted = torch.from_numpy(truth).to(y.dtype)
        wrong = torch.nonzero(y != wanted)
        assert wrong.numel() == 0, f"{len(wrong)} wrong, first at {wrong[0].tolist()}"
    else:
        error, bound = measure_error(y, truth), TOLERANCE * measure_torch(operands, y, truth)
        assert error <= bound, f"relative error {error:.3g}, at most {bound:.3g} is wanted"
    return y


def measure_torch(operands: WgmmaOperands, y: torch.Tensor, truth: Any) -> float:
    """Return the error of the same sum in torch: float32, and one rounding to y's dtype."""

    def read(values: Any) -> torch.Tensor:
        return torch.from_numpy(values).float()

    weight = read(decode_weight_blocks(operands.weight_blocks, operands.mode, operands.weight))
    total = read(decode_act(operands.act)) @ weight.T
    if operands.lora_act is not None and operands.lora_blocks is not None:
        factors = decode_lora_blocks(operands.lora_blocks, operands.lora_act.dtype)
        total = total + operands.lora_act.float() @ read(factors).T
    total = total * operands.channel_scale
    if operands.token_scale is not None:
        total = total * operands.token_scale[:, None]
    if operands.alpha is not None:
        total = total * operands.alpha
    if operands.bias is not None:
        total = total + operands.bias
    return measure_error(total[:, : y.shape[1]].to(y.dtype), truth)


def measure_error(y: torch.Tensor, truth: Any) -> float:
    """Return the relative error of y, of all its elements together."""
    return float(np.linalg.norm(y.double().numpy() - truth) / np.linalg.norm(truth))
