"""The torch dtypes behind the names that records use: one table for all folders."""

import torch

# Float parts of a linear, scales of INT4 and UINT4, activations.
FLOAT_BY_NAME = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
FLOAT_DTYPES = tuple(FLOAT_BY_NAME.values())
# One-byte block scales by `BlockFormat.scale`.
BYTE_SCALE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}


def get_scale_dtype(scale: str, float_dtype: torch.dtype = torch.float16) -> torch.dtype:
    """Return the dtype of block scales of kind `scale` ("e4m3", "e8m0" or "float").

    `float_dtype` is what "float" means; float16 is the quantizer's default.
    """
    return BYTE_SCALE_DTYPES.get(scale, float_dtype)
