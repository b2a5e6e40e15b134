"""What each mode of a 4-bit linear costs in accuracy, layer by layer, on a real model's inputs.

Every linear of the model is quantized with its calibration, then judged alone on inputs that the
float model has on other text: the relative error of its output against the float linear in float64.
A mode is computed in float64 as `halfbyte.reference.wgmma_linear` defines it, not by a kernel, here
with torch's own number formats: a few hundred layers in a minute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from halfbyte.bench.demo import list_block_linears, quantize_with_preset, restore_linears
from halfbyte.formats.dense_linear import make_dense_linear
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.reference import w4a4_linear
from halfbyte.reference.decode import Float64Array, read_floats
from halfbyte.reference.gemm_w4_wgmma import fold_weight
from halfbyte.svdquant.statistics import RowSample

MAX_ROWS = 256
_E4M3_MAX, _INT8_MAX = 448.0, 127.0
# (x [M, K], record) -> y [M, N] float64
Multiply = Callable[[torch.Tensor, QuantizedLinear], Any]


@dataclass(frozen=True)
class LayerAccuracy:
    """The relative output errors of one linear, by mode."""

    name: str
    errors: dict[str, float]


@dataclass(frozen=True)
class ModeSummary:
    """One mode over all linears of a model.

    Attributes:
        mode: its name.
        median: of the layers' relative errors. largest: of them.
        largest_ratio: largest error over that of mode "exact" in the same layer.
        worst_layer: where that is.
    """

    mode: str
    median: float
    largest: float
    largest_ratio: float
    worst_layer: str


@torch.no_grad()
def record_inputs(
    model: nn.Module, run: Callable[[], None], max_rows: int = MAX_ROWS
) -> dict[str, torch.Tensor]:
    """Return up to `max_rows` rows [T, K] float32 of each block linear's input during `run`."""
    samples: dict[str, RowSample] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].detach().flatten(0, -2).float()
            samples.setdefault(name, RowSample(rows.shape[1], max_rows)).add(rows)

        return note

    hooks = [
        linear.register_forward_pre_hook(watch(name))
        for name, linear in list_block_linears(model).items()
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sample.rows for name, sample in samples.items()}


def measure_layers(
    model: nn.Module,
    preset: str,
    calibration: torch.Tensor | Sequence[torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    modes: Mapping[str, Multiply],
) -> list[LayerAccuracy]:
    """Return the errors of every block linear in every mode; the model is as before afterwards.

    Args:
        model: float32, on the CPU.
        preset: a name in `svdquant.presets.PRESETS`.
        calibration: what `quantize_model` takes.
        inputs: rows of x by linear, of other text, as `record_inputs` returns them.
        modes: what computes each mode; "exact" among them.
    """
    linears = list_block_linears(model)
    quantize_with_preset(model, preset, calibration)
    records = {
        name: one.to_record() for name, one in model.named_modules() if isinstance(one, W4A4Linear)
    }
    restore_linears(model, linears)
    found = []
    for name, record in records.items():
        x = inputs[name].to(torch.bfloat16)
        linear = linears[name]
        wanted = x.double() @ linear.weight.double().t()
        if linear.bias is not None:
            wanted += linear.bias.double()
        size = float(torch.linalg.vector_norm(wanted))
        errors = {
            mode: float(np.linalg.norm(np.asarray(multiply(x, record)) - wanted.numpy())) / size
            for mode, multiply in modes.items()
        }
        found.append(LayerAccuracy(name, errors))
    return found


def summarize(layers: Sequence[LayerAccuracy]) -> list[ModeSummary]:
    """Return one row a mode, in the order of the first layer's."""
    rows = []
    for mode in layers[0].errors:
        ratios = [layer.errors[mode] / layer.errors["exact"] for layer in layers]
        worst = int(np.argmax(ratios))
        errors = [layer.errors[mode] for layer in layers]
        rows.append(
            ModeSummary(
                mode=mode,
                median=float(np.median(errors)),
                largest=max(errors),
                largest_ratio=ratios[worst],
                worst_layer=layers[worst].name,
            )
        )
    return rows


def multiply_dense(x: torch.Tensor, linear: QuantizedLinear) -> Any:
    """Return y of mode "bf16" in float64: the weight is rounded to bfloat16, the sums are not."""
    dense = make_dense_linear(linear, torch.bfloat16)
    y = x.double() @ dense.weight.double().t()
    return (y if dense.bias is None else y + dense.bias.double()).numpy()


def multiply_with_token_scales(x: torch.Tensor, linear: QuantizedLinear, mode: str) -> Float64Array:
    """Return y of mode "fp8" or "int8": one scale a row of x, and 4-bit weights as that mode reads.

    Args:
        x: [M, K] float16 or bfloat16. linear: any. mode: "fp8" or "int8".

    Returns [M, N] float64.
    """
    y = round_rows(x, linear, mode) @ fold_linear(linear, mode).T
    if linear.lora_down is not None and linear.lora_up is not None:
        lora_act = x.double() @ linear.lora_down.double().t()
        y = y + (lora_act @ linear.lora_up.double().t()).numpy()
    return y if linear.bias is None else y + read_floats(linear.bias)


def round_rows(x: torch.Tensor, linear: QuantizedLinear, mode: str) -> Float64Array:
    """Return what the product sees of x: [M, K] float64, smoothed, rounded under a scale a row."""
    rows = x.float()
    if linear.activation is not None and linear.activation.shift:
        rows = rows + linear.activation.shift
    if linear.smooth is not None:
        rows = rows * (1.0 / linear.smooth.double()).float()
    amax = rows.abs().amax(1, keepdim=True)
    amax = torch.where(amax == 0, 1.0, amax)
    if mode == "int8":
        scale = amax / _INT8_MAX
        rounded = torch.round(rows / scale).double() * scale.double()
    else:
        scale = torch.exp2(torch.ceil(torch.log2(amax.double() / _E4M3_MAX))).float()
        rounded = (rows / scale).to(torch.float8_e4m3fn).double() * scale.double()
    return np.asarray(rounded.numpy())


def fold_linear(linear: QuantizedLinear, mode: str) -> Float64Array:
    """Return the weight [N, K] float64 that the product sees, all its scales included."""
    values, normalizer = fold_weight(linear.weight, mode)
    weight = values * normalizer[:, None]
    if linear.weight.global_scale is not None:
        weight = weight * read_floats(linear.weight.global_scale)
    if linear.channel_scale is not None:
        weight = weight * read_floats(linear.channel_scale)[:, None]
    return weight


def list_modes(preset: str) -> dict[str, Multiply]:
    """Return what computes each mode that the weights of a preset have."""
    modes: dict[str, Multiply] = {
        "exact": w4a4_linear,
        "fp8": lambda x, linear: multiply_with_token_scales(x, linear, "fp8"),
    }
    if preset.startswith("int4"):
        modes["int8"] = lambda x, linear: multiply_with_token_scales(x, linear, "int8")
    return {**modes, "bf16": multiply_dense}
