"""GPTQ: rounding in which every column's error is carried into the columns not yet rounded.

Source of the method: Frantar et al., "GPTQ" (2022); block scales are fixed beforehand, columns go
in falling order of their Gram diagonal.
"""

from dataclasses import dataclass

import torch

from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.elements import decode_table, encode_elements
from halfbyte.formats.packing import pack_nibbles
from halfbyte.formats.quantize import decode_scales
from halfbyte.native import library
from halfbyte.native.gptq import MAX_COLUMNS, round_columns

_COMPILED_ELEMENTS = ("e2m1", "int4", "uint4")
_MAX_DAMPING_STEPS = 250  # each adds a tenth of the preset's damping, as GPTQ's retries do


@dataclass(frozen=True, eq=False)
class ErrorPropagation:
    """How errors travel between columns; shared by all linears of one input.

    Attributes:
        order: [K] int64, columns in the order in which they are rounded.
        factor: [K, K] float32, upper Cholesky factor of the inverse Gram matrix, in that order.
    """

    order: torch.Tensor
    factor: torch.Tensor


def make_error_propagation(
    gram: torch.Tensor, *, shrinkage: float, damping: float
) -> ErrorPropagation:
    """Return the order and factor of a Gram matrix.

    Args:
        gram: [K, K] float32, X^T X of the quantized inputs, up to a factor.
        shrinkage: share of the off-diagonal that is ignored, 0 to 1.
        damping: added to the diagonal, as a share of its mean; grows until the matrix is
            positive definite.
    """
    diagonal = gram.diagonal().double().clone()
    mean = float(diagonal.mean()) if diagonal.numel() else 0.0
    is_dead = diagonal <= 0
    diagonal[is_dead] = mean if mean > 0 else 1.0  # a column that never was on carries nothing
    order = torch.argsort(diagonal, descending=True, stable=True)
    matrix = gram.double() * (1.0 - shrinkage)
    matrix.diagonal().copy_(diagonal)
    matrix = matrix[order][:, order]
    step = max(damping, 1e-6) * (mean if mean > 0 else 1.0)
    matrix.diagonal().add_(damping * (mean if mean > 0 else 0.0))
    for _ in range(_MAX_DAMPING_STEPS):
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not int(failed):
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(failed):
                return ErrorPropagation(order, upper.float())
        matrix.diagonal().add_(0.1 * step)
    return ErrorPropagation(order, torch.diag(matrix.diagonal().rsqrt()).float())


def round_with_propagation(
    weight: torch.Tensor, scaled: BlockScaledTensor, propagation: ErrorPropagation
) -> BlockScaledTensor:
    """Return `weight` rounded under the scales of `scaled`, errors carried from column to column.

    Args:
        weight: [N, K] float32, finite.
        scaled: the same weight rounded without propagation; its scales are kept. 4-bit elements.
        propagation: of the inputs.
    """
    rows, columns = weight.shape
    order, factor = propagation.order, propagation.factor
    block = scaled.format.block_size
    divisors = decode_scales(scaled)[:, order // block]  # [N, K] in rounding order
    moving = weight[:, order].contiguous()
    rounded = torch.empty(rows, columns, dtype=torch.uint8)
    for start in range(0, columns, MAX_COLUMNS):
        stop = min(start + MAX_COLUMNS, columns)
        codes, errors = _round_block(
            moving[:, start:stop],
            divisors[:, start:stop].contiguous(),
            factor[start:stop, start:stop].contiguous(),
            scaled.format.element,
        )
        rounded[:, start:stop] = codes
        moving[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
    padded = torch.zeros(rows, scaled.format.padded_columns(columns), dtype=torch.uint8)
    padded[:, order] = rounded
    return BlockScaledTensor(
        scaled.format, pack_nibbles(padded), scaled.scales, scaled.global_scale, columns
    )


def _round_block(
    weights: torch.Tensor, divisors: torch.Tensor, factor: torch.Tensor, element: str
) -> tuple[torch.Tensor, torch.Tensor]:
    loaded = library()
    if loaded is not None and element in _COMPILED_ELEMENTS:
        return round_columns(loaded, weights, divisors, factor, element)
    moving = weights.clone()
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    errors = torch.empty_like(moving)
    table = decode_table(element)
    for column in range(moving.shape[1]):
        divisor = divisors[:, column]
        is_dead = divisor == 0
        code = encode_elements(moving[:, column] / divisor.masked_fill(is_dead, 1.0), element)
        code.masked_fill_(is_dead, 0)
        number = table[code.int()]
        error = (moving[:, column] - number * divisor) / factor[column, column]
        moving[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
        codes[:, column], errors[:, column] = code, error
    return codes, errors
