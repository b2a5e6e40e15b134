"""FlashInfer's NVFP4 linear on Blackwell: its quantizer, then its product, CUTLASS's or any.

Interface: docs.flashinfer.ai, `nvfp4_quantize` and `mm_fp4`. Not run on a GPU yet. FlashInfer packs
both operands itself, so that y is checked against the 16-bit linear, with room for 4 bits.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from halfbyte.bench.speed.problem import Problem
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import Expected, Operands, Trial, count_bytes

_LARGEST: Final = 448.0 * 6.0  # E4M3 block scale times E2M1 code
_LIMIT: Final = 0.2  # what 4 bits on both sides cost at most


def make_flashinfer(problem: Problem, backend: str = "auto") -> Trial:
    """x to NVFP4 with a calibrated global scale, then the 4-bit product; no low rank, no bias."""
    flashinfer: Any = importlib.import_module("flashinfer")
    x_scale, weight_scale = (_calibrate(part) for part in (problem.x, problem.weight))
    weight, weight_sf = flashinfer.nvfp4_quantize(problem.weight, weight_scale)
    operands: Operands = {
        "x": problem.x,
        "x_scale": x_scale,
        "weight": weight,
        "weight_sf": weight_sf,
        "alpha": 1.0 / (x_scale * weight_scale),
    }
    outputs: Operands = {"y": problem.x.new_empty((problem.shape.m, problem.shape.n))}

    def bind(given: Operands, out: Operands) -> Launch:
        def launch() -> None:
            codes, sf = flashinfer.nvfp4_quantize(given["x"], given["x_scale"])
            flashinfer.mm_fp4(
                codes,
                given["weight"].t(),
                sf,
                given["weight_sf"].t(),
                given["alpha"],
                out["y"].dtype,
                out["y"],
                backend=backend,
            )

        with flashinfer.autotune(True):
            launch()
        return launch

    def expect(given: Operands, out: Operands) -> list[Expected]:
        wanted = given["x"].double() @ problem.weight.double().t()
        return [Expected("y", out["y"], wanted, _LIMIT)]

    moved_bytes = count_bytes(operands, outputs)
    return Trial(operands, outputs, bind, expect, "fp8", moved_bytes, note="no bias, no low rank")


def _calibrate(values: torch.Tensor) -> torch.Tensor:
    """Return FlashInfer's global scale factor [1]: what the largest magnitude is multiplied by."""
    return (_LARGEST / values.float().abs().amax()).reshape(1)


FLASHINFER_PEERS: dict[str, Callable[[Problem], Trial]] = {
    "flashinfer": make_flashinfer,
    "flashinfer_cutlass": partial(make_flashinfer, backend="cutlass"),
}
