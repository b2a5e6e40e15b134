"""The cases that every GPU runs; `test_on_gpus.py` names the GPUs."""

import dataclasses
from collections.abc import Callable

import torch

from halfbyte.formats.activation import ACTIVATION_FORMATS
from tests.kernels.quantize_act_lora import contents
from tests.kernels.quantize_act_lora.quantize_runs import (
    LORA_ACT_SCALE,
    CompileSource,
    Operands,
    Shape,
    check_call,
    make_operands,
    make_request,
)

HALVES = ("float16", "bfloat16")
SHAPES = (
    Shape(1, 64, 8),
    Shape(3, 48, 16),
    Shape(17, 100, 24),
    Shape(130, 1000, 33),
    Shape(257, 96, 64),
    Shape(128, 256, 0),
    Shape(5, 1, 1),
)

# Each mode meets two shapes, one with each dtype, and each shape two modes.
PAIRS = [
    (mode, HALVES[(index + number) % 2], SHAPES[(3 * index + number) % len(SHAPES)])
    for number in range(2)
    for index, mode in enumerate(ACTIVATION_FORMATS)
]

CONTENTS: dict[str, Callable[[str], Operands]] = {
    "ties": contents.make_ties,
    "tiny_ties": contents.make_tiny_ties,
    "extremes": contents.make_extremes,
    "extreme_smooth": contents.make_extreme_smooth,
    "spoilt": contents.make_spoilt,
    "magnitudes": contents.make_magnitudes,
}


def check_pair(compile_source: CompileSource, target: str, pair: tuple[str, str, Shape]) -> None:
    """Run one of PAIRS and compare it with the reference."""
    mode, dtype, shape = pair
    operands = make_operands(shape, dtype)
    check_call(compile_source, operands, make_request(operands, mode, target))


def check_contents(compile_source: CompileSource, target: str, mode: str, content: str) -> None:
    """Run adversarial content in both dtypes: one program of a mode and dtype for all contents."""
    for dtype in HALVES:
        operands = CONTENTS[content](dtype)
        columns = operands.x.shape[1]
        if operands.smooth is None:
            operands = dataclasses.replace(operands, smooth=torch.ones(columns))
        if operands.lora_down is None:
            lora_down = make_operands(Shape(1, columns, 3), dtype).lora_down
            operands = dataclasses.replace(operands, lora_down=lora_down)
        request = make_request(operands, mode, target)
        check_call(compile_source, operands, request, rows=32, rank_tile=16, stages=2, cluster_k=1)


def check_chosen_contents(
    compile_source: CompileSource, target: str, mode: str, content: str
) -> None:
    """Run adversarial content as it is, with the configuration that is chosen for it."""
    for dtype in HALVES:
        operands = CONTENTS[content](dtype)
        check_call(compile_source, operands, make_request(operands, mode, target))


def check_every_float16(compile_source: CompileSource, target: str) -> None:
    """Encode every float16 that E2M1 can hold unscaled."""
    operands = contents.make_every_float16()
    check_call(compile_source, operands, make_request(operands, "nvfp4_one_level", target))


def check_integers(
    compile_source: CompileSource, target: str, tile: tuple[int, int], lora_dtype: str
) -> None:
    """Multiply integers: lora_act has no rounding, however its sums are cut.

    `tile` is (CTAs of a cluster, rows).
    """
    operands = contents.make_integers(37, 600, 40, "float16")
    request = make_request(operands, "nvfp4_nunchaku", target, lora_dtype)
    result = check_call(
        compile_source, operands, request, cluster_k=tile[0], rows=tile[1], rank_tile=32
    )
    assert operands.lora_down is not None
    exact = operands.x.double() @ operands.lora_down.double().T * LORA_ACT_SCALE
    assert result.lora_act is not None
    torch.testing.assert_close(result.lora_act.double(), exact, rtol=0, atol=0)
