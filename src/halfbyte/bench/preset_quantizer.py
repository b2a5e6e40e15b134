"""The demo's quantizer: model surgery by preset, its report told in the demo's rows."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import nn

from halfbyte.bench.demo_result import LayerRow


class LayerReport(Protocol):
    """What the demo reads of the surgery's report on one linear; see `LayerRow`."""

    name: str
    relative_error: float
    snr_db: float
    saturated: int
    flushed: int
    zero_scales: int
    alpha: float | None
    beta: float | None


class ModelReport(Protocol):
    """What the demo reads of the surgery's report: one entry a linear."""

    layers: Sequence[LayerReport]


def quantize_with_preset(
    model: nn.Module,
    preset: str,
    calibration: torch.Tensor | Sequence[torch.Tensor],
    on_step: Callable[[], None] = lambda: None,
) -> list[LayerRow]:
    """Return a row for each linear that was replaced, in place, by its 4-bit form.

    Args:
        model: a model whose layers are in a ModuleList called `layers`.
        preset: a name in `svdquant.presets.PRESETS`.
        calibration: tokens [B, T] int64, or one such tensor for each text.
        on_step: called once for each of the model's layers.
    """
    surgery = import_module("halfbyte.nn.quantize_model")
    report: ModelReport = surgery.quantize_model(model, preset, calibration=calibration)
    layers = model.get_submodule("layers")
    for _ in layers.children():
        on_step()
    return [
        LayerRow(
            layer=layer.name,
            relative_error=layer.relative_error,
            snr_db=layer.snr_db,
            saturated=layer.saturated,
            flushed=layer.flushed,
            zero_scales=layer.zero_scales,
            alpha=layer.alpha,
            beta=layer.beta,
        )
        for layer in report.layers
    ]
