"""A made-up demo result, so that the report is tested without a model."""

import math

import torch

from halfbyte.bench.demo_result import (
    AS_SHIPPED,
    PRESETS,
    QUICK_SETTINGS,
    DemoResult,
    DemoRow,
    DemoSettings,
)
from halfbyte.bench.language_model_accuracy import LanguageModelAccuracy
from halfbyte.bench.text_corpus import describe_protocol, split_tokens
from tests.bench.plain_quantizer import make_report


def make_result(*, is_quick: bool = False) -> DemoResult:
    """Return a result of two decoder layers; one is exact, and a row's perplexity is infinite."""
    layers = (
        make_report("layers.0.mlp.up_proj", 0.0, None, alpha=0.0),
        make_report("layers.1.self_attn.q_proj", 0.25, 12.04, alpha=0.5),
    )
    rows = [DemoRow(AS_SHIPPED, LanguageModelAccuracy(16.0, 0.0, 1.0, 2048), 1000, 0.0, 1.5, ())]
    for index, preset in enumerate(PRESETS):
        accuracy = LanguageModelAccuracy(20.0 if index else math.inf, 0.1 * index, 0.8, 2048)
        rows.append(DemoRow(preset, accuracy, 900 + index, 2.0, 1.0, layers))
    slices = split_tokens(torch.arange(3000))
    return DemoResult(
        settings=QUICK_SETTINGS if is_quick else DemoSettings(),
        rows=tuple(rows),
        slices=slices,
        protocol=tuple(describe_protocol(slices)),
        notes=("a note with <b>angle brackets</b> & more",),
        num_weights=1600,
        versions={"python": "3.11.0", "torch": "2.13.0"},
        machine={"cpu": "A CPU", "cores": 2, "torch_threads": 2, "system": "Linux"},
        seconds=12.345,
        peak_memory_bytes=1_500_000_000,
    )
