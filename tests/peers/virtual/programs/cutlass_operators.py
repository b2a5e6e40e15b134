"""nvidia-cutlass-operators: one case for each family of operators, through the public interface.

Of each family several designs run (1 and 2 CTAs per MMA, with and without TMA store, clusters,
static and dynamic schedulers): the first of every combination that supports the arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass.operators as ops
import torch
from cases import case, check_same, integers, run_cases

F16, F32, I8 = torch.float16, torch.float32, torch.int8
MAJOR, MINOR = torch.cuda.get_device_capability()
TARGET = f"{MAJOR}{MINOR}a" if MAJOR >= 9 else f"{MAJOR}{MINOR}"


def _design_key(operator: Any) -> tuple[Any, ...]:
    design = operator.metadata.design
    scheduler = type(getattr(design, "tile_scheduler", None)).__name__
    flags = (getattr(design, "use_2cta_mma", None), getattr(design, "use_tma_store", None))
    clustered = tuple(extent > 1 for extent in design.cluster_shape)
    return (*flags, clustered, scheduler, *design.tile_shape[:2])


def _choose_operators(family: str, args: Any, at_most: int) -> list[Any]:
    """The first supported operator of each kind of design, spread over the family's kinds."""
    found = ops.get_operators(
        args,
        metadata_filter=lambda metadata: metadata.operator_class.__name__ == family,
        target_sm=TARGET,
    )
    if not found:
        raise SystemExit(f"no operator of {family} supports these arguments on {TARGET}")
    kinds: dict[tuple[Any, ...], Any] = {}
    for operator in found:
        kinds.setdefault(_design_key(operator), operator)
    chosen = list(kinds.values())
    step = max(1, len(chosen) // at_most)
    return chosen[::step][:at_most]


def _run_family(
    family: str, args: Any, out: torch.Tensor, check: Callable[[], None], at_most: int = 4
) -> None:
    for operator in _choose_operators(family, args, at_most):
        print("  ", operator.metadata.operator_name, flush=True)
        out.copy_(torch.full(out.shape, 77).to(out.dtype))
        operator.run(args)
        torch.cuda.synchronize()
        check()


def _run_gemm(
    family: str,
    dtype: torch.dtype = F16,
    out_dtype: torch.dtype = F32,
    accumulator: torch.dtype = F32,
    shape: tuple[int, int, int] = (256, 256, 128),
    at_most: int = 4,
) -> None:
    m, n, k = shape
    a, b = integers((1, m, k), dtype), integers((1, n, k), dtype).transpose(1, 2)
    out = torch.zeros(1, m, n, dtype=out_dtype, device="cuda")
    expected = (a.double() @ b.double()).to(out_dtype)
    args = ops.GemmArguments(a, b, out, accumulator)
    _run_family(family, args, out, partial(check_same, out, expected), at_most)


@case
def dense() -> None:
    family = "PersistentDenseGemmOperator" if MAJOR == 10 else "Sm90StaticPersistentGemmOperator"
    _run_gemm(family, at_most=8)


@case
def dense_fp8() -> None:
    _run_gemm("PersistentDenseGemmOperator", torch.float8_e4m3fn, F16, at_most=2)


@case
def dense_int8() -> None:
    _run_gemm("PersistentDenseGemmOperator", I8, torch.int32, torch.int32, at_most=2)


@case
def preferred_cluster() -> None:
    _run_gemm("PersistentDenseGemmPreferredClusterOperator", at_most=3)


@case
def few_rows() -> None:
    _run_gemm("TgvGemmOperator", shape=(16, 128, 256), at_most=3)


@case
def ampere() -> None:
    _run_gemm("Sm80TensorOpGemmOperator", at_most=3)


def _fused(accum, alpha, C, bias):  # type: ignore[no-untyped-def]
    F = relu((accum * alpha) + C)  # type: ignore[name-defined]  # noqa: F821
    D = F + bias
    return D, F


@case
def epilogue() -> None:
    """D = relu(2 A B + C) + bias, and the value before the bias."""
    m, n, k = 256, 256, 64
    a, b = integers((1, m, k), F16), integers((1, n, k), F16).transpose(1, 2)
    c, bias = integers((1, m, n), F16), integers((1, 1, n), F16)
    d, f = (torch.zeros(1, m, n, dtype=F32, device="cuda") for _ in range(2))
    fused = ops.EpilogueArguments(_fused, alpha=2.0, C=c, bias=bias, D=d, F=f)
    args = ops.GemmArguments(a, b, d, F32, epilogue=fused)
    before = torch.relu(2.0 * (a.float() @ b.float()) + c.float())

    def check() -> None:
        check_same(f, before)
        check_same(d, before + bias.float())

    _run_family("PersistentDenseGemmEFCOperator", args, d, check, at_most=3)


def _run_block_scaled(dtype: torch.dtype, scale_dtype: torch.dtype, block: int) -> None:
    m, n, k = 256, 256, 256
    pack = 2 if dtype == torch.float4_e2m1fn_x2 else 1

    def operand(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if pack == 2:  # E2M1 codes of 0, 1 and -1
            codes = torch.tensor([0, 2, 10], dtype=torch.uint8)[torch.randint(0, 3, (rows, k))]
            values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes.long() & 7]
            values = torch.where(codes > 7, -values, values)
            packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).view(dtype)
            return packed.to("cuda"), values
        values = torch.randint(-2, 3, (rows, k)).float()
        return values.to(dtype).to("cuda"), values

    def scales(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Powers of two, in the interleaved order of the hardware, and per element."""
        plain = 2.0 ** torch.randint(-1, 2, (rows, k // block)).float()
        tiles = plain.reshape(rows // 128, 4, 32, k // block // 4, 4).permute(0, 3, 2, 1, 4)
        packed = tiles.contiguous().to(scale_dtype).reshape(-1)
        return packed.to("cuda"), plain.repeat_interleave(block, dim=1)

    (a, a_values), (b, b_values) = operand(m), operand(n)
    (sfa, a_scale), (sfb, b_scale) = scales(m), scales(n)
    mode = ops.ScaleMode.Blockwise1x16 if block == 16 else ops.ScaleMode.Blockwise1x32
    swizzle = ops.ScaleSwizzleMode.Swizzle32x4x4
    out = torch.zeros(1, m, n, dtype=F32, device="cuda")
    args = ops.GemmArguments(
        ops.ScaledOperand(a.unsqueeze(0), sfa, mode, swizzle),
        ops.ScaledOperand(b.unsqueeze(0).transpose(1, 2), sfb, mode, swizzle),
        out,
        F32,
    )
    expected = ((a_values * a_scale) @ (b_values * b_scale).T).unsqueeze(0)
    family = "PersistentDenseBlockScaledGemmOperator"
    _run_family(family, args, out, partial(check_same, out, expected), at_most=3)


@case
def nvfp4() -> None:
    _run_block_scaled(torch.float4_e2m1fn_x2, torch.float8_e4m3fn, 16)


@case
def mxfp4() -> None:
    _run_block_scaled(torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 32)


@case
def mxfp8() -> None:
    _run_block_scaled(torch.float8_e4m3fn, torch.float8_e8m0fnu, 32)


@case
def mixed_input() -> None:
    """Eight-bit left-hand sides, converted on the way to bfloat16 multiplications."""
    for dtype, low in ((I8, -8), (torch.uint8, 0)):
        weight = integers((1, 256, 128), dtype, low, 9)
        b = integers((1, 128, 128), torch.bfloat16).transpose(1, 2)
        out = torch.zeros(1, 256, 128, dtype=F32, device="cuda")
        args = ops.GemmArguments(weight, b, out, F32)
        expected = weight.float() @ b.float()
        _run_family("MixedInputGemmOperator", args, out, partial(check_same, out, expected), 2)


@case
def grouped() -> None:
    """Three groups of rows, one of them empty, each with its own right-hand side."""
    sizes = [100, 0, 156]
    n, k = 128, 64
    a, b = integers((sum(sizes), k), F16), integers((3, n, k), F16).transpose(1, 2)
    out = torch.zeros(sum(sizes), n, dtype=F32, device="cuda")
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32).to("cuda")
    args = ops.IndexPtrGroupedGemmArguments(a, b, out, F32, offsets, "m")
    parts = [part.float() @ b[i].float() for i, part in enumerate(a.split(sizes))]
    expected = torch.cat(parts)
    family = "ContiguousOffset2D3DGemmDenseOperator"
    _run_family(family, args, out, partial(check_same, out, expected), at_most=3)


if __name__ == "__main__":
    run_cases()
