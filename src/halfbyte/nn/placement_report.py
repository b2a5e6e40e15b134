"""What the 4-bit linears of a model run for how many tokens, and the memory that this takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from halfbyte.nn.w4a4_linear import W4A4Linear
from halfbyte.ops.call_plan import CallPlan
from halfbyte.ops.hopper_modes import check_tokens

# Rows of x by what a layer is placed for: a step of decoding, batches of it, and prompts.
_TOKENS: Final = {"decode": (1, 16, 64), "prefill": (256, 4352), "both": (1, 16, 64, 256, 4352)}


@dataclass(frozen=True)
class LayerPlacement:
    """One 4-bit linear as it runs.

    Attributes:
        name: of the module in the model, "" for the model itself.
        shape: (N, K).
        calls: what runs, one for each number of tokens.
        buffer_bytes: of the module's own tensors.
        placed_bytes: of what was made from them and is not shared with them, all modes.
        dense_bytes: of the same weight in 16 bits.
    """

    name: str
    shape: tuple[int, int]
    calls: tuple[CallPlan, ...]
    buffer_bytes: int
    placed_bytes: int
    dense_bytes: int


def describe_placement(
    model: nn.Module, tokens: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[LayerPlacement, ...]:
    """Return what every W4A4Linear of `model` runs on its device, backend and mode.

    Layers are placed for it, as their first call would: after this a CUDA graph may be captured.

    Args:
        model: any module, a W4A4Linear itself too.
        tokens: numbers of rows; None for some that suit each layer's `tokens`.
        dtype: of x; None for that of the layer's 16-bit parts, bfloat16 where it has none.

    Raises UsageError for unknown `tokens` of a layer or here, and what a call of a layer raises.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, W4A4Linear):
            continue
        if tokens is None:
            check_tokens(module.tokens)
        rows = _TOKENS[module.tokens] if tokens is None else tuple(tokens)
        calls = tuple(module.plan_call(m, dtype) for m in rows)
        n, k = module.out_features, module.in_features
        found.append(
            LayerPlacement(
                name=name,
                shape=(n, k),
                calls=calls,
                buffer_bytes=module.to_record().num_bytes,
                placed_bytes=module.placed_bytes,
                dense_bytes=2 * n * k,
            )
        )
    return tuple(found)
