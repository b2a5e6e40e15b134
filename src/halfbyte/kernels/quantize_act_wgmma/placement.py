"""lora_down in the order in which the kernel multiplies; torch only.

A thread's registers hold 16 consecutive columns of a row of x, and they are the A operand of wgmma
as they lie (PTX ISA, register fragments of m64k16). The columns of lora_down follow:

    of each 64, position 16 * j + 8 * h + 2 * t + e   holds column 16 * t + 4 * j + 2 * h + e

Accumulators of a thread are two neighbouring columns of each eight. With the rows of lora_down in

    of each 16, position 8 * h + 2 * t + e            holds rank 4 * t + 2 * h + e

they are four neighbouring ranks of each sixteen.
"""

import torch

from halfbyte.errors import FormatError
from halfbyte.kernels.quantize_act_wgmma.config import padded_k, padded_rank

_DTYPES = (torch.float16, torch.bfloat16)


def arrange_lora_down(lora_down: torch.Tensor) -> torch.Tensor:
    """Return lora_down [R, K] as the kernel's operand [R_pad, K_pad], zeros in the padding.

    Raises FormatError for another shape or dtype than [R, K] float16 or bfloat16.
    """
    if lora_down.ndim != 2 or lora_down.dtype not in _DTYPES:
        raise FormatError(
            f"lora_down: {lora_down.dtype} {tuple(lora_down.shape)}, wanted [R, K] float16 or "
            "bfloat16; convert it once at load"
        )
    rank, k = lora_down.shape
    padded = lora_down.new_zeros((padded_rank(rank), padded_k(k)))
    padded[:rank, :k] = lora_down
    rows, columns = padded.shape
    # rank = (16 ranks, t, h, e), column = (64 columns, t, j, h, e)
    split = padded.view(rows // 16, 4, 2, 2, columns // 64, 4, 4, 2, 2)
    return split.permute(0, 2, 1, 3, 4, 6, 7, 5, 8).reshape(rows, columns).contiguous()


def restore_lora_down(arranged: torch.Tensor, rank: int, k: int) -> torch.Tensor:
    """Return lora_down [rank, k] of what `arrange_lora_down` made of it."""
    rows, columns = arranged.shape
    split = arranged.view(rows // 16, 2, 4, 2, columns // 64, 4, 2, 4, 2)
    plain = split.permute(0, 2, 1, 3, 4, 7, 5, 6, 8).reshape(rows, columns)
    return plain[:rank, :k].contiguous()
