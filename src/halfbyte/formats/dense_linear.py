"""A QuantizedLinear as one dense 16- or 32-bit weight: decoded, unsmoothed, low rank added.

    unsmoothed[n, k] = decoded[n, k] * channel_scale[n] / smooth[k]
    weight[n, k]     = unsmoothed[n, k] + sum_r lora_up[n, r] * lora_down[r, k]
    bias'[n]         = bias[n] + shift * sum_k unsmoothed[n, k]

in float64, rounded once: y = x @ weight^T + bias' is the layer without quantized activations.
"""

from dataclasses import dataclass

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear

_CHUNK_ELEMENTS = 2**22  # of float64: 32 MiB beside the result


@dataclass(frozen=True, eq=False)
class DenseLinear:
    """What torch multiplies with.

    Attributes:
        weight: [N, K]. bias: [N] of the same dtype, or None.
        shared_bytes: 0, nothing in it is the record's.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    shared_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        parts = [self.weight] if self.bias is None else [self.weight, self.bias]
        return sum(part.numel() * part.element_size() for part in parts)


@torch.no_grad()
def make_dense_linear(linear: QuantizedLinear, dtype: torch.dtype) -> DenseLinear:
    """Return the dense weight and bias of a record, on its device.

    Args:
        linear: any formats; its weight is decoded a few rows at a time.
        dtype: float16, bfloat16 or float32.

    Raises FormatError for another dtype, and for a weight or bias that does not fit it.
    """
    if dtype not in FLOAT_DTYPES:
        raise FormatError(f"dtype {dtype}: wanted float16, bfloat16 or float32")
    n, k = linear.weight.shape
    weight = torch.empty((n, k), dtype=dtype, device=linear.weight.data.device)
    shift = 0.0 if linear.activation is None else linear.activation.shift
    moved = torch.zeros(n, dtype=torch.float64, device=weight.device)
    step = max(_CHUNK_ELEMENTS // max(k, 1), 1)
    for start in range(0, n, step):
        stop = min(start + step, n)
        rows = _decode_rows(linear, start, stop)
        if shift:
            moved[start:stop] = rows.sum(1) * shift
        if linear.lora_down is not None and linear.lora_up is not None:
            rows += linear.lora_up[start:stop].double() @ linear.lora_down.double()
        weight[start:stop] = rows
    bias = None if linear.bias is None else linear.bias.detach().double()
    if shift:
        bias = moved if bias is None else bias + moved
    dense = DenseLinear(weight, None if bias is None else bias.to(dtype))
    for name, part in (("weight", dense.weight), ("bias", dense.bias)):
        if part is not None and not bool(torch.isfinite(part).all()):
            wider = "in torch.bfloat16, or " if dtype == torch.float16 else ""
            raise FormatError(
                f"{name}: decoded and merged it is not finite in {dtype}: a part of it is not, or "
                f"it is too large; run the layer {wider}in a mode that keeps it in 4 bits"
            )
    return dense


def _decode_rows(linear: QuantizedLinear, start: int, stop: int) -> torch.Tensor:
    """Return rows of the weight that x itself is multiplied with, without the low rank: float64."""
    rows = dequantize(linear.weight.take_rows(start, stop)).double()
    if linear.channel_scale is not None:
        rows *= linear.channel_scale[start:stop, None].double()
    if linear.smooth is not None:
        rows /= linear.smooth.double()
    return rows
