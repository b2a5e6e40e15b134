"""QuantizedLinear: the canonical record of one 4-bit linear layer, whatever file it came from."""

from dataclasses import dataclass, fields

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import FLOAT_DTYPES


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """y = (quantize((x + shift) / smooth) @ weight.T) * channel_scale + bias + low rank.

    Conventions, the same for every source: scales multiply, smooth divides, the low-rank branch
    `(x @ lora_down.T) @ lora_up.T` sees the raw x, vectors are not permuted, nothing is tiled,
    and `channel_scale` scales the 4-bit product alone (not the low-rank branch, not the bias).

    Attributes:
        weight: logical [N, K]; the smoothed residual, W * smooth - low rank in smoothed terms.
        activation: how x is quantized, or None for a weight-only layer (x stays 16/32-bit).
        activation_global_scale: [] float32, present exactly for a "static" activation format.
        channel_scale: [N] float32 or None for ones.
        smooth: [K] float or None for ones; finite and positive.
        lora_down: [R, K] float or None for rank 0.
        lora_up: [N, R] float, the dtype of lora_down.
        bias: [N] float or None; a shifted activation's correction is already folded in.
    """

    weight: BlockScaledTensor
    activation: ActivationFormat | None = None
    activation_global_scale: torch.Tensor | None = None
    channel_scale: torch.Tensor | None = None
    smooth: torch.Tensor | None = None
    lora_down: torch.Tensor | None = None
    lora_up: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check shapes, dtypes and which parts belong together."""
        if not isinstance(self.weight, BlockScaledTensor):
            raise FormatError(f"weight: {type(self.weight).__name__}, wanted BlockScaledTensor")
        n, k = self.weight.shape
        _check_vector("channel_scale", self.channel_scale, (n,), (torch.float32,))
        _check_vector("smooth", self.smooth, (k,), FLOAT_DTYPES)
        _check_vector("bias", self.bias, (n,), FLOAT_DTYPES)
        _check_vector("activation_global_scale", self.activation_global_scale, (), (torch.float32,))
        is_static = self.activation is not None and self.activation.global_scale == "static"
        if is_static != (self.activation_global_scale is not None):
            name = self.activation.name if self.activation else "none"
            wanted = "needs" if is_static else "takes no"
            raise FormatError(f"activation {name!r} {wanted} activation_global_scale")
        self._check_low_rank(n, k)

    def _check_low_rank(self, n: int, k: int) -> None:
        if (self.lora_down is None) != (self.lora_up is None):
            raise FormatError("lora_down and lora_up come together: one of them is missing")
        if self.lora_down is None or self.lora_up is None:
            return
        rank = self.lora_down.shape[0]
        _check_vector("lora_down", self.lora_down, (rank, k), FLOAT_DTYPES)
        _check_vector("lora_up", self.lora_up, (n, rank), (self.lora_down.dtype,))

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """K, without padding."""
        return self.weight.shape[1]

    @property
    def rank(self) -> int:
        """R; 0 where there is no low-rank branch."""
        return 0 if self.lora_down is None else self.lora_down.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything stored for this layer."""
        total = self.weight.num_bytes
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                total += value.numel() * value.element_size()
        return total


def _check_vector(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(f"{name}: {type(tensor).__name__}, wanted torch.Tensor")
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name}: shape {tuple(tensor.shape)}, wanted {shape}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise FormatError(f"{name}: dtype {tensor.dtype}, wanted {wanted}; convert it once at load")
