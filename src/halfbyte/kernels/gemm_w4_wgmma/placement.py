"""A QuantizedLinear as the tensors that the Hopper kernels read; torch only, done once a layer.

The GEMM adds the product of weights and activations and the low-rank branch in one accumulator:

    y[m, n] = (P[m, n] + sum_r lora_act[m, r] * lora_up'[n, r]) * channel_scale[n] * a[m] + bias[n]

a[m] is the token's scale in the modes "fp8" and "int8", the dynamic global scale of activations in
mode "exact", else 1. `channel_scale` is all that a channel has in common: the record's, the global
scale of the weight, a static one of activations (mode "exact" alone), and the power of two of
`weight_layout`. The low-rank branch is scaled by none of them, so they are divided out of its
operands beforehand, in float64 and rounded once, with one power of two between them:

    lora_up'[n, r] = lora_up[n, r] / channel_scale[n] / 2^s
    lora_act[m, r] = sum_k x[m, k] * lora_down[r, k] * 2^s / a[m]       in the quantize kernel

s is chosen, and its range proved, by `kernels/gemm_w4a4/balance.py`: an activation divided by its
token's scale is at most 448 (E4M3) or 127 (INT8), as one divided by a dynamic global scale is at
most 2688. Where channel_scale vanishes the column is the low-rank branch plus bias.

| weight | activation | fp8 | exact | int8 |
|---|---|---|---|---|
| nvfp4, nvfp4_one_level, mxfp4 | nvfp4_*, mxfp4 | yes | yes | no: no integers |
| int4 (groups of 64) | int4, uint4_shifted | yes, without code -8 | yes | yes |
| nvfp4, nvfp4_one_level, mxfp4 | weight-only | yes | yes: x / smooth as float16 | no |
| int4 | weight-only | yes, without code -8 | no | yes |

One layout serves every number of tokens.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4_wgmma.config import BLOCK_K, CHANNELS, CHUNK_RANKS, MODES
from halfbyte.kernels.gemm_w4_wgmma.weight_layout import (
    PackedWeight,
    name_weight,
    pack_lora_up,
    pack_weight,
    round_up,
)
from halfbyte.kernels.gemm_w4a4.placement import (
    EXPECTED_ONE_LEVEL,
    LARGEST_TWO_LEVEL,
    LORA_DTYPES,
    align,
    bound_lora_act,
    check_parts,
    make_factors,
    place_lora_down,
    place_lora_up,
)
from halfbyte.kernels.placed_bytes import count_bytes, count_shared_bytes

TOKENS: Final = ("both", "prefill", "decode")
LARGEST_ACT: Final = {"fp8": 448.0, "int8": 127.0}  # |x'| / token_scale
_SMALLEST_FACTOR: Final = 2.0**-126  # float32's smallest normal number
_EXACT_PAIRS: Final = {"e2m1": ("e2m1",), "int4": ("int4", "uint4")}
_ALTERNATIVE: Final = "mode='bf16' or the cpu backend runs it"


@dataclass(frozen=True, eq=False)
class PlacedWgmmaLinear:
    """The tensors of one linear in the layouts that the Hopper kernels read; padding is zero.

    K_pad and N_pad are multiples of 128, R_pad of 32.

    Attributes:
        mode: "fp8", "exact" or "int8".
        weight: "e2m1" or "int4".
        activation: how x is quantized in mode "exact"; None for a weight-only layer.
        out_features, columns, rank: N, K, R before padding.
        weight_blocks: [N_pad/128, K_pad/128, 9216] uint8 (`weight_layout`).
        channel_scale: [N_pad] float32.
        lora_down: [R_pad, K_pad] fp16 or bf16, of the raw x, columns in order; None for rank 0.
        lora_blocks: [N_pad/128, R_pad/32, 8192] uint8, lora_up' in that dtype; or None.
        lora_factor: 2^s, what the quantize kernel multiplies x @ lora_down.T by.
        bias: [N_pad] float32 or None.
        smooth: [K] float32 or None; x is divided by it, mode "exact".
        inverse_smooth: [K] float32 or None; x + shift is multiplied by it, "fp8" and "int8".
        activation_global_scale: [1] float32, a static one, mode "exact".
        requantized: blocks of the weight with another scale than the record's (`pack_weight`).
        tokens: what it was asked for: "both", "prefill" or "decode"; the tensors are the same.
        shared_bytes: bytes of `num_bytes` that are the record's own.
    """

    mode: str
    weight: str
    activation: ActivationFormat | None
    out_features: int
    columns: int
    rank: int
    weight_blocks: torch.Tensor
    channel_scale: torch.Tensor
    lora_down: torch.Tensor | None
    lora_blocks: torch.Tensor | None
    lora_factor: float
    bias: torch.Tensor | None
    smooth: torch.Tensor | None
    inverse_smooth: torch.Tensor | None
    activation_global_scale: torch.Tensor | None
    requantized: int
    tokens: str = "both"
    shared_bytes: int = 0

    @property
    def has_alpha(self) -> bool:
        """Whether the GEMM multiplies by a scalar that the quantize kernel measures."""
        is_dynamic = self.activation is not None and self.activation.global_scale == "dynamic"
        return self.mode == "exact" and is_dynamic

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, `shared_bytes` included."""
        return count_bytes(self)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same layer as a 16-bit weight and bias."""
        return 2 * self.out_features * (self.columns + (self.bias is not None))


@torch.no_grad()
def place_linear(
    linear: QuantizedLinear, dtype: torch.dtype, mode: str, tokens: str = "both"
) -> PlacedWgmmaLinear:
    """Return the tensors of `linear` as the Hopper kernels read them, on its device.

    Args:
        linear: formats as in the table above.
        dtype: of x, lora_act, lora_down and lora_up: float16 or bfloat16.
        mode: "fp8", "exact" or "int8".
        tokens: "both", "prefill" or "decode": one copy serves all three.

    Raises:
        UnsupportedHardwareError: formats, or INT4 codes, that the mode has no products for.
        FormatError: values that are not finite, negative block scales, low-rank factors that leave
            the range of `dtype` or lose bits that the dtype itself would keep.
    """
    _check_request(dtype, mode, tokens)
    check_runs_on_hopper(linear, mode)
    check_parts(linear)
    packed, channel_scale = _place_weight(linear, mode)
    lora_down, lora_blocks, exponent = _place_low_rank(linear, channel_scale, dtype, mode)
    n = linear.out_features
    padded = torch.ones(round_up(n, CHANNELS), dtype=torch.float32, device=channel_scale.device)
    padded[:n] = channel_scale
    is_exact = mode == "exact"
    static = linear.activation_global_scale if is_exact else None
    placed = PlacedWgmmaLinear(
        mode=mode,
        weight=name_weight(linear.weight),
        activation=linear.activation,
        out_features=n,
        columns=linear.in_features,
        rank=linear.rank,
        weight_blocks=packed.blocks,
        channel_scale=padded,
        lora_down=lora_down,
        lora_blocks=lora_blocks,
        lora_factor=2.0**exponent,
        bias=_place_bias(linear.bias),
        smooth=_place_smooth(linear.smooth) if is_exact else None,
        inverse_smooth=None if is_exact else _invert_smooth(linear.smooth),
        activation_global_scale=None if static is None else static.detach().reshape(1),
        requantized=packed.requantized,
        tokens=tokens,
    )
    return replace(placed, shared_bytes=count_shared_bytes(placed, linear))


@torch.no_grad()
def replace_low_rank(
    placed: PlacedWgmmaLinear, linear: QuantizedLinear, dtype: torch.dtype
) -> PlacedWgmmaLinear:
    """Return `placed` with the low-rank branch of `linear`, which is else what it was made from.

    The weight is neither read nor packed. Raises what `place_linear` raises for the factors.
    """
    check_parts(linear)
    channel_scale = placed.channel_scale[: placed.out_features]
    lora_down, lora_blocks, exponent = _place_low_rank(linear, channel_scale, dtype, placed.mode)
    again = replace(
        placed,
        rank=linear.rank,
        lora_down=lora_down,
        lora_blocks=lora_blocks,
        lora_factor=2.0**exponent,
    )
    return replace(again, shared_bytes=count_shared_bytes(again, linear))


def check_runs_on_hopper(linear: QuantizedLinear, mode: str) -> None:
    """Raise UnsupportedHardwareError for formats that `mode` has no products for."""
    kind = name_weight(linear.weight)
    name = linear.weight.format.name
    if mode == "int8" and kind != "int4":
        raise UnsupportedHardwareError(
            f"weight {name!r} in mode 'int8': integer tensor cores multiply INT4 weights; take "
            "mode='fp8'"
        )
    if mode != "exact":
        return
    if linear.activation is None:
        if kind == "int4":
            raise UnsupportedHardwareError(
                "weight-only 'int4' in mode 'exact': its products are of integers, and x has 16 "
                f"bits; take mode='fp8' or 'int8', or {_ALTERNATIVE}"
            )
        return
    block_format = linear.activation.block_format
    if block_format.element not in _EXACT_PAIRS[kind]:
        raise UnsupportedHardwareError(
            f"weight {name!r} with activation {linear.activation.name!r} in mode 'exact': E2M1 "
            f"goes with E2M1 and INT4 with INT4; take mode='fp8', or {_ALTERNATIVE}"
        )


def _check_request(dtype: torch.dtype, mode: str, tokens: str) -> None:
    if dtype not in LORA_DTYPES:
        raise FormatError(f"dtype {dtype}: the low-rank operands are float16 or bfloat16")
    if mode not in MODES:
        raise FormatError(f"mode {mode!r}: wanted one of {', '.join(MODES)}")
    if tokens not in TOKENS:
        raise FormatError(f"tokens {tokens!r}: wanted one of {', '.join(TOKENS)}")


def _place_weight(linear: QuantizedLinear, mode: str) -> tuple[PackedWeight, torch.Tensor]:
    """Return (blocks, channel_scale [N] float32 without zeros)."""
    channel = linear.channel_scale
    if channel is None:
        channel = torch.ones(linear.out_features, device=linear.weight.data.device)
    static = linear.activation_global_scale if mode == "exact" else None
    factor, is_zero = make_factors((linear.weight.global_scale, static), channel)
    packed = pack_weight(linear.weight, mode, is_zero)
    scaled = factor.double() * packed.normalizer.double()
    is_small = scaled.abs() < _SMALLEST_FACTOR
    if bool(is_small.any()):  # a channel of numbers that float32 cannot say
        packed = pack_weight(linear.weight, mode, is_zero | is_small)
        scaled = torch.where(is_small, 1.0, factor.double() * packed.normalizer.double())
    channel_scale = scaled.float()
    if not bool(torch.isfinite(channel_scale).all()):
        row = int(torch.nonzero(~torch.isfinite(channel_scale))[0])
        raise FormatError(
            f"channel {row}: channel_scale times the global scales times its block scales leaves "
            f"float32 ({scaled[row].item():g}); divide the scales at the source"
        )
    return packed, channel_scale


def _place_low_rank(
    linear: QuantizedLinear, channel_scale: torch.Tensor, dtype: torch.dtype, mode: str
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Return (lora_down, lora_blocks, s)."""
    if linear.lora_down is None or linear.lora_up is None or linear.rank == 0:
        return None, None, 0
    shape = (round_up(linear.rank, CHUNK_RANKS), round_up(linear.in_features, BLOCK_K))
    lora_down = place_lora_down(linear.lora_down, shape, dtype)
    largest, expected = _bound_act(linear, mode)
    activation = bound_lora_act(linear, dtype, largest, expected)
    lora_up, exponent = place_lora_up(linear.lora_up, channel_scale, dtype, activation)
    return lora_down, pack_lora_up(lora_up), exponent


def _bound_act(linear: QuantizedLinear, mode: str) -> tuple[float, float]:
    """Return Z and Z' of `balance` (3): how large an activation divided by its scale gets."""
    if mode in LARGEST_ACT:
        return LARGEST_ACT[mode], LARGEST_ACT[mode]
    largest = LARGEST_TWO_LEVEL
    if linear.activation_global_scale is not None:
        largest *= float(linear.activation_global_scale)
    has_level = linear.activation is not None and linear.activation.global_scale != "none"
    return largest, largest if has_level else EXPECTED_ONE_LEVEL


def _place_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None:
        return None
    placed = torch.zeros(round_up(len(bias), CHANNELS), dtype=torch.float32, device=bias.device)
    placed[: len(bias)] = bias
    return placed


def _place_smooth(smooth: torch.Tensor | None) -> torch.Tensor | None:
    return None if smooth is None else align(smooth.detach().float().contiguous())


def _invert_smooth(smooth: torch.Tensor | None) -> torch.Tensor | None:
    """Return 1 / smooth in float32, rounded once; raise FormatError where it is infinite."""
    if smooth is None:
        return None
    inverse = (1.0 / smooth.detach().double()).float()
    if not bool(torch.isfinite(inverse).all()):
        column = int(torch.nonzero(~torch.isfinite(inverse))[0])
        raise FormatError(
            f"smooth[{column}] is {smooth[column].item():g}: 1 / smooth leaves float32; scale it "
            "and the weight's column at the source"
        )
    return inverse
