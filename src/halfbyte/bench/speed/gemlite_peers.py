"""GemLite's linears: 4-bit weights with 16-bit activations, and 8-bit dynamic.

GemLite tunes its Triton kernels at the first call of a shape; that call is not timed. It
packs the weights itself, so that its y is checked against the 16-bit linear, with room for its
format's rounding.
"""

import importlib
import importlib.util
from typing import Any, Final

import torch

from halfbyte.bench.speed.problem import Problem
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import Expected, Operands, Rate, Trial, count_bytes

# Of the 16-bit linear: what 4 bits of weight, or 8 bits on both sides, cost at most.
_LIMITS: Final = {"A16W4_MXFP": 0.16, "A8W8_fp8_dynamic": 0.06}


def make_gemlite(problem: Problem) -> Trial:
    """MXFP4 weights, 16-bit activations, no low-rank branch."""
    return _make(problem, "A16W4_MXFP", "bf16")


def make_gemlite_fp8(problem: Problem) -> Trial:
    """E4M3 weights by channel, x quantized to E4M3 by token in the call."""
    return _make(problem, "A8W8_fp8_dynamic", "fp8")


GEMLITE_PEERS = {"gemlite": make_gemlite, "gemlite_fp8": make_gemlite_fp8}


def is_gemlite_here() -> bool:
    """Return whether GemLite can be imported."""
    return importlib.util.find_spec("gemlite") is not None


def _make(problem: Problem, kind: str, rate: Rate) -> Trial:
    linears: Any = importlib.import_module("gemlite.helper")
    maker = getattr(linears, kind)(device=str(problem.device), dtype=problem.dtype)
    shape = problem.shape
    linear = torch.nn.Linear(shape.k, shape.n, device="meta", dtype=problem.dtype)
    linear.weight = torch.nn.Parameter(problem.weight.clone(), requires_grad=False)
    linear.bias = torch.nn.Parameter(problem.bias.clone(), requires_grad=False)
    operands: Operands = {"x": problem.x, "linear": maker.from_linear(linear, del_orig=False)}
    outputs: Operands = {"y": problem.x.new_empty((shape.m, shape.n))}

    def bind(given: Operands, out: Operands) -> Launch:
        def launch() -> None:
            out["y"] = given["linear"](given["x"])

        return launch

    def expect(given: Operands, out: Operands) -> list[Expected]:
        wanted = torch.addmm(
            problem.bias.double(), given["x"].double(), problem.weight.double().t()
        )
        return [Expected("y", out["y"], wanted, _LIMITS[kind])]

    moved_bytes = count_bytes(operands, outputs)
    return Trial(operands, outputs, bind, expect, rate, moved_bytes, note="writes a fresh y")
