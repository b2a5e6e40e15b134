"""What else computes a linear on a GPU: torch's matrix products, 16-bit and E4M3, and a copy.

Each peer is checked against its own definition in float64: an E4M3 product against the E4M3 numbers
that it was given, not against the 16-bit linear.
"""

from typing import Any, Final

import torch

from halfbyte.bench.speed.problem import Problem, multiply_exactly
from halfbyte.bench.speed.row_quantizer import make_row_quantizer, quantize_rows_in_torch
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import Expected, Operands, Trial, count_bytes
from halfbyte.errors import UsageError

# Rounding of y to 16 bits (2^-9 of bfloat16, at most, and 0.4 of it on average) and the sums.
ROUNDING_LIMIT: Final = 4e-3
# An E4M3 product with fast accumulation adds 14-bit sums: 1.3e-3 at K = 3840, 3.1e-3 at 15360.
FAST_SUM_LIMIT: Final = 8e-3
# Codes of two quantizers that round the same quotient: a tie, here and there, tips.
CODE_LIMIT: Final = 2e-3


def make_cublas(problem: Problem) -> Trial:
    """x @ W.T + bias in 16 bits; a low-rank branch would be merged into W."""

    def bind(given: Operands, out: Operands) -> Launch:
        x, weight, bias = given["x"], given["weight"].t(), given["bias"]
        return lambda: torch.addmm(bias, x, weight, out=out["y"])

    operands = {"x": problem.x, "weight": problem.weight, "bias": problem.bias}
    return _make_trial(problem, operands, _make_outputs(problem), bind, with_low_rank=False)


def make_cublas_lora(problem: Problem) -> Trial:
    """The same with the low-rank branch beside it: three products."""

    def bind(given: Operands, out: Operands) -> Launch:
        def launch() -> None:
            torch.mm(given["x"], given["lora_down"].t(), out=out["lora_act"])
            torch.addmm(given["bias"], given["x"], given["weight"].t(), out=out["y"])
            torch.addmm(out["y"], out["lora_act"], given["lora_up"].t(), out=out["y"])

        return launch

    operands = {"x": problem.x, "weight": problem.weight, "bias": problem.bias}
    operands |= _list_low_rank(problem)
    outputs = _make_outputs(problem) | _make_lora_act(problem)
    return _make_trial(problem, operands, outputs, bind, with_low_rank=True)


def make_scaled_mm(problem: Problem) -> Trial:
    """torch's row-wise E4M3 product alone, fast accumulation; x is quantized beforehand."""
    return _make_scaled_mm(problem, is_fast=True)


def make_scaled_mm_slow(problem: Problem) -> Trial:
    """The same with accumulation in full float32."""
    return _make_scaled_mm(problem, is_fast=False)


def make_fp8_dynamic(problem: Problem) -> Trial:
    """Per-token quantization in one Triton kernel, then torch's row-wise E4M3 product."""
    return _make_dynamic(problem, {}, {})


def make_fp8_dynamic_lora(problem: Problem) -> Trial:
    """The same with the low-rank branch beside it: four kernels."""
    return _make_dynamic(problem, _list_low_rank(problem), _make_lora_act(problem))


def make_copy(problem: Problem) -> Trial:
    """A copy that moves what quantizing x must: x, its E4M3 codes and the low-rank activations."""
    shape = problem.shape
    num_bytes = shape.m * (2 * shape.k + shape.k + 2 * shape.rank)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=problem.device)
    source.random_(0, 256)
    outputs: Operands = {"copied": torch.empty_like(source)}

    def bind(given: Operands, out: Operands) -> Launch:
        return lambda: out["copied"].copy_(given["source"])

    return Trial(
        operands={"source": source},
        outputs=outputs,
        bind=bind,
        expect=lambda given, out: [Expected("copied", out["copied"], given["source"], 0.0)],
        moved_bytes=2 * source.numel(),
    )


def make_row_codes(problem: Problem) -> Trial:
    """Per-token quantization to E4M3 alone, by the Triton kernel of `fp8_dynamic`."""
    quantize = make_row_quantizer()
    operands: Operands = {"x": problem.x}
    outputs = _make_codes(problem)

    def bind(given: Operands, out: Operands) -> Launch:
        return lambda: quantize(given["x"], out["codes"], out["scales"])

    return Trial(operands, outputs, bind, _expect_codes, moved_bytes=count_bytes(operands, outputs))


PEERS = {
    "cublas": make_cublas,
    "cublas_lora": make_cublas_lora,
    "scaled_mm": make_scaled_mm,
    "scaled_mm_slow": make_scaled_mm_slow,
    "fp8_dynamic": make_fp8_dynamic,
    "fp8_dynamic_lora": make_fp8_dynamic_lora,
}
QUANTIZE_PEERS = {"copy": make_copy, "fp8_rows": make_row_codes}


def _list_low_rank(problem: Problem) -> Operands:
    if problem.lora_down is None:
        raise UsageError("the shape has rank 0: there is no low-rank branch")
    return {"lora_down": problem.lora_down, "lora_up": problem.lora_up}


def _make_lora_act(problem: Problem) -> Operands:
    return {"lora_act": problem.x.new_empty((problem.shape.m, problem.shape.rank))}


def _make_outputs(problem: Problem) -> Operands:
    return {"y": problem.x.new_empty((problem.shape.m, problem.shape.n))}


def _make_trial(
    problem: Problem, operands: Operands, outputs: Operands, bind: Any, *, with_low_rank: bool
) -> Trial:
    def expect(given: Operands, out: Operands) -> list[Expected]:
        wanted = multiply_exactly(problem, with_low_rank=with_low_rank)
        return [Expected("y", out["y"], wanted, ROUNDING_LIMIT)]

    return Trial(operands, outputs, bind, expect, "bf16", count_bytes(operands, outputs))


def _make_codes(problem: Problem) -> Operands:
    return {
        "codes": torch.empty_like(problem.x, dtype=torch.float8_e4m3fn),
        "scales": problem.x.new_empty((problem.shape.m, 1), dtype=torch.float32),
    }


def _expect_codes(given: Operands, out: Operands) -> list[Expected]:
    codes, scales = quantize_rows_in_torch(given["x"])
    actual = out["codes"].double() * out["scales"]
    return [Expected("codes", actual, codes.double() * scales, CODE_LIMIT)]


def _multiply_e4m3(given: Operands, codes: Any, scales: Any, out: Any, *, is_fast: bool) -> None:
    torch._scaled_mm(
        codes,
        given["weight"].t(),
        scale_a=scales,
        scale_b=given["weight_scales"],
        bias=given["bias"],
        out_dtype=out.dtype,
        use_fast_accum=is_fast,
        out=out,
    )


def _expect_e4m3(given: Operands, codes: Any, scales: Any, low_rank: Operands) -> torch.Tensor:
    """Return y in float64 of the E4M3 numbers that were multiplied, and the low-rank branch."""
    x, weight = codes.double() * scales, given["weight"].double() * given["weight_scales"].t()
    y = torch.addmm(given["bias"].double(), x, weight.t())
    if low_rank:
        y.addmm_(low_rank["lora_act"].double(), given["lora_up"].double().t())
    return y


def _quantize_weight(problem: Problem) -> Operands:
    weight, scales = quantize_rows_in_torch(problem.weight)
    return {"weight": weight, "weight_scales": scales.t().contiguous(), "bias": problem.bias}


def _make_scaled_mm(problem: Problem, *, is_fast: bool) -> Trial:
    codes, scales = quantize_rows_in_torch(problem.x)
    operands = {"x": codes, "x_scales": scales, **_quantize_weight(problem)}
    outputs = _make_outputs(problem)

    def bind(given: Operands, out: Operands) -> Launch:
        def launch() -> None:
            _multiply_e4m3(given, given["x"], given["x_scales"], out["y"], is_fast=is_fast)

        return launch

    def expect(given: Operands, out: Operands) -> list[Expected]:
        wanted = _expect_e4m3(given, given["x"], given["x_scales"], {})
        return [Expected("y", out["y"], wanted, FAST_SUM_LIMIT if is_fast else ROUNDING_LIMIT)]

    return Trial(operands, outputs, bind, expect, "fp8", count_bytes(operands, outputs))


def _make_dynamic(problem: Problem, low_rank: Operands, lora_act: Operands) -> Trial:
    quantize = make_row_quantizer()
    operands = {"x": problem.x, **_quantize_weight(problem), **low_rank}
    outputs = _make_outputs(problem) | lora_act | _make_codes(problem)

    def bind(given: Operands, out: Operands) -> Launch:
        def launch() -> None:
            quantize(given["x"], out["codes"], out["scales"])
            _multiply_e4m3(given, out["codes"], out["scales"], out["y"], is_fast=True)
            if low_rank:
                torch.mm(given["x"], given["lora_down"].t(), out=out["lora_act"])
                torch.addmm(out["y"], out["lora_act"], given["lora_up"].t(), out=out["y"])

        return launch

    def expect(given: Operands, out: Operands) -> list[Expected]:
        product = _expect_e4m3(given, out["codes"], out["scales"], out if low_rank else {})
        found = [*_expect_codes(given, out), Expected("y", out["y"], product, FAST_SUM_LIMIT)]
        if low_rank:
            wanted = given["x"].double() @ given["lora_down"].double().t()
            found.append(Expected("lora_act", out["lora_act"], wanted, ROUNDING_LIMIT))
        return found

    return Trial(operands, outputs, bind, expect, "fp8", count_bytes(operands, outputs))
