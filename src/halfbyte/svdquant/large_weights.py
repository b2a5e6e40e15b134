"""`quantize_linear_group` without data, for weights too large to hold: a few rows at a time.

Without data there is no smoothing and no error propagation, and what is left of SVDQuant needs
the weight only in products with narrow matrices (the low-rank split) and block by block (the
rounding). Memory: about 3 * K * (R + 8) floats, one chunk of rows and the 4-bit result, whatever
N is. The arithmetic is that of `quantize_layer`; float32 sums run in another order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import FLOAT_BY_NAME, get_scale_dtype
from halfbyte.formats.quantize import dequantize, measure_amax, quantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant.low_rank import find_row_space
from halfbyte.svdquant.presets import SVDQuantPreset
from halfbyte.svdquant.rows import iter_row_ranges


@dataclass(frozen=True)
class WeightRows:
    """A weight that is read a few rows at a time.

    Attributes:
        rows: N.
        columns: K.
        read: gives rows [start, stop) as [stop - start, K] in any float dtype.
    """

    rows: int
    columns: int
    read: Callable[[int, int], torch.Tensor]

    def iter_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, stop, rows [start, stop) as float32) from the first to the last row."""
        for start, stop in iter_row_ranges(self.rows, self.columns):
            yield start, stop, self.read(start, stop).float()


def quantize_large_group(
    weights: Sequence[WeightRows],
    biases: Sequence[torch.Tensor | None],
    preset: SVDQuantPreset,
) -> list[QuantizedLinear]:
    """Return the linears of one input, quantized without data.

    Args:
        weights: of equal K; finite.
        biases: [N_i] float or None, kept as they are.
        preset: weight format, activation, rank, rounding and refinements.
    """
    best = _split(weights, biases, preset, None)
    if not preset.rank or not preset.refinements:
        return best
    best_error = _measure_squared_error(weights, best)
    for _ in range(preset.refinements):
        candidate = _split(weights, biases, preset, best)
        error = _measure_squared_error(weights, candidate)
        if error >= best_error:
            break
        best, best_error = candidate, error
    return best


def _split(
    weights: Sequence[WeightRows],
    biases: Sequence[torch.Tensor | None],
    preset: SVDQuantPreset,
    last: list[QuantizedLinear] | None,
) -> list[QuantizedLinear]:
    """Return the low rank of what `last` left unrounded, and the rounded rest of the weights."""
    targets = weights if last is None else [_less(w, q) for w, q in zip(weights, last, strict=True)]
    columns = weights[0].columns
    rank = min(preset.rank, columns, *(weight.rows for weight in weights))
    activation = get_activation_format(preset.activation) if preset.activation else None
    down = project = None
    dtype = FLOAT_BY_NAME[preset.low_rank_dtype]
    if rank:
        space, values = find_row_space(partial(_iter_all, targets), columns, rank, seed=preset.seed)
        root = values.sqrt()
        down = (space * root).T.contiguous().to(dtype)  # [R, K]
        project = space / root.clamp(min=torch.finfo(torch.float32).tiny)  # [K, R]
    linears = []
    for weight, target, bias in zip(weights, targets, biases, strict=True):
        up = None if project is None else _project_rows(target, project).to(dtype)
        rounded = _round_residual(weight, down, up, preset)
        linears.append(QuantizedLinear(rounded, activation, lora_down=down, lora_up=up, bias=bias))
    return linears


def _less(weight: WeightRows, linear: QuantizedLinear) -> WeightRows:
    """Return the weight without the rounded part of `linear`."""

    def read(start: int, stop: int) -> torch.Tensor:
        rounded = dequantize(linear.weight.take_rows(start, stop))
        return weight.read(start, stop).float() - rounded

    return WeightRows(weight.rows, weight.columns, read)


def _iter_all(weights: Sequence[WeightRows]) -> Iterator[torch.Tensor]:
    for weight in weights:
        for _, _, chunk in weight.iter_chunks():
            yield chunk


def _project_rows(weight: WeightRows, project: torch.Tensor) -> torch.Tensor:
    out = torch.empty(weight.rows, project.shape[1])
    for start, stop, chunk in weight.iter_chunks():
        torch.mm(chunk, project, out=out[start:stop])
    return out


def _round_residual(
    weight: WeightRows,
    down: torch.Tensor | None,
    up: torch.Tensor | None,
    preset: SVDQuantPreset,
) -> BlockScaledTensor:
    """Return weight - up @ down in the preset's format (see `rounding.round_residual`)."""
    record = get_format(preset.weight_format)
    round_rows = partial(
        quantize,
        format=record,
        scale_search="absmax" if preset.rounding == "nearest" else "optimal",
    )
    global_scale = None
    if record.has_global_scale:
        amax = torch.zeros(())
        for _, _, chunk in _iter_residual(weight, down, up):
            amax = torch.maximum(amax, measure_amax(chunk))
        # that of a tensor whose largest magnitude this is, so that the rule lives in one place
        global_scale = round_rows(amax.reshape(1, 1)).global_scale
    data = torch.empty(weight.rows, record.row_bytes(weight.columns), dtype=torch.uint8)
    shape = (weight.rows, record.num_blocks(weight.columns))
    scales = torch.empty(shape, dtype=get_scale_dtype(record.scale))
    for start, stop, chunk in _iter_residual(weight, down, up):
        part = round_rows(chunk, global_scale=global_scale)
        data[start:stop] = part.data
        scales[start:stop] = part.scales
    return BlockScaledTensor(record, data, scales, global_scale, weight.columns)


def _iter_residual(
    weight: WeightRows, down: torch.Tensor | None, up: torch.Tensor | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    wide = None if down is None else down.float()
    for start, stop, chunk in weight.iter_chunks():
        if wide is not None and up is not None:
            chunk = torch.addmm(chunk, up[start:stop].float(), wide, alpha=-1)
        yield start, stop, chunk


def _measure_squared_error(
    weights: Sequence[WeightRows], linears: Sequence[QuantizedLinear]
) -> float:
    total = 0.0
    for weight, linear in zip(weights, linears, strict=True):
        for start, stop, chunk in _iter_residual(weight, linear.lora_down, linear.lora_up):
            rounded = dequantize(linear.weight.take_rows(start, stop))
            total += float(torch.linalg.vector_norm(chunk - rounded, dim=1).double().square().sum())
    return total
