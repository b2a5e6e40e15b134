"""A 4-bit linear as one 16-bit product of torch: mode "bf16", and what no kernel takes."""

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from halfbyte.errors import UnsupportedHardwareError
from halfbyte.formats.dense_linear import DenseLinear, make_dense_linear
from halfbyte.formats.quantized_linear import QuantizedLinear


@dataclass(frozen=True)
class DensePlacer:
    """Decodes linears into a weight of `dtype`: that of x."""

    dtype: torch.dtype

    def place(self, linear: QuantizedLinear) -> DenseLinear:
        """Return the decoded weight, the low-rank branch merged; see `make_dense_linear`."""
        return make_dense_linear(linear, self.dtype)

    def replace_low_rank(self, placed: DenseLinear, linear: QuantizedLinear) -> DenseLinear:
        """Return it decoded again: what was merged cannot be taken out of a rounded weight.

        An offloaded weight comes to the device for this time.
        """
        device, weight = placed.weight.device, linear.weight
        if weight.data.device != device:
            moved = replace(weight, data=weight.data.to(device), scales=weight.scales.to(device))
            linear = replace(linear, weight=moved)
        return make_dense_linear(linear, self.dtype)


def multiply_dense(x: torch.Tensor, placed: DenseLinear) -> torch.Tensor:
    """Return y [M, N] in x's dtype of x [M, K]."""
    return functional.linear(x, placed.weight, placed.bias)


def check_no_function(name: str, who: str) -> None:
    """Raise UnsupportedHardwareError for a function of the sums that `who` does not apply."""
    if name != "none":
        raise UnsupportedHardwareError(
            f"activation {name!r}: {who} writes y itself, and its sums are gone when it has; call "
            "the function of torch.nn.functional on y"
        )
