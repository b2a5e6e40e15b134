"""One power of two between the low-rank operands, so that float16 or bfloat16 holds both.

With F the largest number of the dtype and T its smallest normal one, an exponent s is safe when

    1. max lora_up' <= F: no entry of lora_up / factor / 2^s overflows;
    2. for every column, its largest |lora_up'| >= T, or 2^s * |factor[n]| <= 1;
    3. E * 2^s <= F, or s <= 0;
    4. B * 2^s >= 256 * T, or s >= 0.

(2) A number below T is rounded to a multiple of eps * T, so that its error is at most eps/2 * T. If
the column's largest entry is at least T, that is eps/2 of the largest entry: the row is as precise
as a row of normal numbers. Otherwise the error seen in y is that of lora_up times 2^s * |factor[n]|
<= 1: no more than that of lora_up itself, stored in this dtype.

(3) lora_act = x @ lora_down.T / alpha is not known here; its limits are, with z = x / smooth and
w[r, k] = lora_down[r, k] * smooth[k]:

    B = Z * max_r sum_k |w[r, k]|          |lora_act| <= B for every z with |z| <= Z
    E = Z' * max_r sqrt(sum_k w[r, k]^2)   |z| = Z' in all channels with random signs, or in one
                                           channel Z' * sqrt(K) where w is spread evenly

Z = 2688 * g: NVFP4's block scales and codes hold |z| <= 6 * 448 * g, where g is the static scale,
or 1 (a dynamic g is alpha, which is divided out). A z beyond it saturates in the 4-bit product as
well. Z' is the same where g is calibrated or measured. Formats without a global scale tell nothing
about z (MXFP4 has no limit at all): there Z' = 64, an assumption. An s with B * 2^s <= F is taken
where there is one: lora_act then cannot overflow. Else the smallest s that (1) allows, if E * 2^s
<= F: overflow takes a z aligned with a row of lora_down. With s <= 0 lora_act overflows no earlier
than x @ lora_down.T in this dtype does without any scaling.

(4) With B * 2^s >= 256 * T, lora_act of inputs down to 2^-8 of the largest ones are normal numbers;
in float16 those down to 2^-11 keep the 8 bits that bfloat16 would give them. With s >= 0 they are
as precise as x @ lora_down.T itself in this dtype.

So each operand either fits, or is no worse off than the unscaled one; where no s gives both, the
layer is refused. bfloat16 has float32's exponents: it is refused at absurd values only.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch

from halfbyte.errors import FormatError

KEPT_RANGE: Final = 256  # of (4)
MAX_EXPONENT: Final = 126  # 2^s and 2^-s are normal float32 numbers


@dataclass(frozen=True)
class ActivationRange:
    """How large |x @ lora_down.T| / alpha gets: `bound` at most (B), `expected` at most (E)."""

    bound: float
    expected: float


@dataclass(frozen=True, eq=False)
class LowRankRange:
    """What decides the exponent.

    Attributes:
        dtype: of lora_act and lora_up.
        factor: [N] float64, |factor|, all above zero.
        up_max: [N] float64, max_r |lora_up / factor| of each column; 0 where the row is zero.
        activation: B and E.
    """

    dtype: torch.dtype
    factor: torch.Tensor
    up_max: torch.Tensor
    activation: ActivationRange


def choose_exponent(extent: LowRankRange) -> int:
    """Return the safe s nearest to 0, or to the largest one below it with B * 2^s <= F.

    Raises FormatError naming the columns that leave none.
    """
    largest = torch.finfo(extent.dtype).max
    proven = min(0, _largest_exponent(extent.activation.bound, largest))
    used = torch.nonzero(extent.up_max > 0).flatten()
    if used.numel() == 0:
        return proven
    up_max, factor = extent.up_max[used], extent.factor[used]
    lowest = torch.ceil(torch.log2(up_max / largest))
    tiny = torch.finfo(extent.dtype).tiny
    highest = _highest_exponents(up_max, factor, tiny)
    smallest = min(0, _smallest_exponent(extent.activation.bound, KEPT_RANGE * tiny))
    low = max(int(lowest.max()), smallest, -MAX_EXPONENT)
    likely = max(0, _largest_exponent(extent.activation.expected, largest))
    high = min(int(highest.min()), likely, MAX_EXPONENT)
    if low > high:
        columns = int(used[lowest.argmax()]), int(used[highest.argmin()])
        raise FormatError(_describe_refusal(extent, columns))
    return min(max(proven, low), high)


def _highest_exponents(up_max: torch.Tensor, factor: torch.Tensor, tiny: float) -> torch.Tensor:
    """Return the largest s of each column for which its row of lora_up' loses nothing (2)."""
    stays_normal = torch.floor(torch.log2(up_max / tiny))
    costs_nothing = torch.floor(-torch.log2(factor))
    return torch.maximum(stays_normal, costs_nothing)


def _largest_exponent(magnitude: float, largest: float) -> int:
    """Return the largest s with magnitude * 2^s <= largest."""
    return math.floor(math.log2(largest / magnitude)) if magnitude > 0 else MAX_EXPONENT


def _smallest_exponent(magnitude: float, least: float) -> int:
    """Return the smallest s with magnitude * 2^s >= least."""
    return math.ceil(math.log2(least / magnitude)) if magnitude > 0 else -MAX_EXPONENT


def _describe_refusal(extent: LowRankRange, columns: tuple[int, int]) -> str:
    def describe(n: int) -> str:
        up, factor = float(extent.up_max[n]), float(extent.factor[n])
        return f"column {n}: lora_up up to {up * factor:.3g} / {factor:.3g} = {up:.3g}"

    both = "; ".join(describe(n) for n in dict.fromkeys(columns))
    return (
        "lora_up / (global scales * channel_scale) and lora_act do not both fit "
        f"{extent.dtype} ({both}; lora_act up to {extent.activation.expected:.3g}); run the layer "
        "in torch.bfloat16, or on the cpu backend, which adds the low-rank branch in float32"
    )
