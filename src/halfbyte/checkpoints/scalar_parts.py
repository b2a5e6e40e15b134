"""Parts that hold one number: [] in some files, [1] in others."""

import torch

from halfbyte.errors import FormatError


def as_scalar(name: str, part: torch.Tensor) -> torch.Tensor:
    """Return a part of one number with shape []; FormatError for more or none."""
    if part.numel() != 1:
        raise FormatError(f"{name}: shape {list(part.shape)}, wanted one number")
    return part.reshape(())
