"""NVFP4 blocks: 16 E2M1 elements under one E4M3 scale, with or without a global scale.

Works on one chunk of blocks in float32; `formats.quantize` cuts tensors into chunks.
"""

from dataclasses import dataclass

import torch

from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.elements import decode_table, encode_elements, encode_scalar
from halfbyte.formats.modes import QuantizeMode

E2M1_MAX = 6.0  # S1E2M1, largest number
E4M3_MAX = 448.0  # OFP8 E4M3, largest number
_F32_MAX = torch.finfo(torch.float32).max
MIN_GLOBAL_SCALE = 2.0**-126  # smallest normal float32: below it divisions lose their bits


@dataclass(frozen=True)
class GlobalScale:
    """The tensor's scale in both conventions, each as its tool rounds it: [] float32.

    Attributes:
        multiplier: g; dequantized values are multiplied by it.
        divisor: h, about 1 / g; what compressed-tensors stores.
    """

    multiplier: torch.Tensor
    divisor: torch.Tensor


def make_global_scale(
    amax: torch.Tensor, mode: QuantizeMode, e4m3_max: float = E4M3_MAX
) -> GlobalScale:
    """Return the scale that maps `amax` ([] float32, finite) to 6 * `e4m3_max`; 1.0 for amax 0."""
    if float(amax) == 0.0:
        one = torch.ones((), device=amax.device)
        return GlobalScale(one, one)
    if mode.global_scale_order == "divisor":
        divisor = (E2M1_MAX * e4m3_max / amax).clamp_(max=1 / MIN_GLOBAL_SCALE)
        return GlobalScale(1.0 / divisor, divisor)
    multiplier = (amax / (E2M1_MAX * e4m3_max)).clamp_(min=MIN_GLOBAL_SCALE)
    return GlobalScale(multiplier, 1.0 / multiplier)


def quantize_nvfp4_blocks(
    blocks: torch.Tensor, scale: GlobalScale, mode: QuantizeMode
) -> tuple[torch.Tensor, torch.Tensor, BlockCounts]:
    """Return codes [rows, blocks, 16] uint8, E4M3 bytes [rows, blocks] uint8, and the counts.

    Args:
        blocks: [rows, blocks, 16] float32, finite.
        scale: the global scale; ones for the one-level format.
        mode: the arithmetic.
    """
    amax = blocks.abs().amax(-1)
    unrounded = _scale_blocks(amax, scale, mode)
    clamped = unrounded.clamp(mode.min_scale, E4M3_MAX) if mode.min_scale else unrounded
    stored = encode_elements(clamped, "e4m3")
    is_zero = amax == 0
    is_flushed = (stored == 0) & ~is_zero
    stored.masked_fill_(is_zero, encode_scalar(mode.zero_block_scale, "e4m3"))
    if mode.flushed_block_scale:
        stored.masked_fill_(is_flushed, encode_scalar(mode.flushed_block_scale, "e4m3"))
    codes = encode_nvfp4_payload(blocks, amax, stored, scale, mode)
    counts = BlockCounts(
        blocks=amax.numel(),
        saturated=int((unrounded > E4M3_MAX).sum()),
        flushed=int(is_flushed.sum()),
        zero=int(is_zero.sum()),
    )
    return codes, stored, counts


def encode_nvfp4_payload(
    blocks: torch.Tensor,
    amax: torch.Tensor,
    stored: torch.Tensor,
    scale: GlobalScale,
    mode: QuantizeMode,
) -> torch.Tensor:
    """Return the E2M1 codes of blocks whose scale bytes are chosen: uint8, shape of `blocks`.

    A block whose scale is zero gets code 0 throughout.

    Args:
        blocks: [rows, blocks, 16] float32.
        amax: [rows, blocks] float32, read by the "unrounded" order alone.
        stored: [rows, blocks] uint8, E4M3 bytes.
        scale: the global scale.
        mode: the arithmetic.
    """
    s = decode_table("e4m3").to(stored.device)[stored.to(torch.int32)]
    is_dead = s * scale.multiplier == 0
    s = s.masked_fill(is_dead, 1.0)
    if mode.payload_order == "reciprocal":
        factor = ((1.0 / scale.multiplier) / s).clamp_(max=_F32_MAX)  # 0 * inf would be NaN
        scaled = blocks * factor.unsqueeze(-1)
    else:
        if mode.payload_order == "divide_product":
            divisor = s * scale.multiplier
        elif mode.payload_order == "divide_quotient":
            divisor = s / scale.divisor
        else:
            divisor = (amax / E2M1_MAX).masked_fill(is_dead, 1.0)
        scaled = blocks / divisor.unsqueeze(-1)
    if not mode.keeps_minus_zero:
        scaled += 0.0  # -0.0 + 0.0 is 0.0
    codes = encode_elements(scaled, "e2m1")
    return codes.masked_fill_(is_dead.unsqueeze(-1), 0)


def _scale_blocks(amax: torch.Tensor, scale: GlobalScale, mode: QuantizeMode) -> torch.Tensor:
    if mode.block_scale_order == "divide_twice":
        return amax / E2M1_MAX / scale.multiplier
    if mode.block_scale_order == "divide_product":
        return amax / (E2M1_MAX * scale.multiplier)
    return amax / E2M1_MAX * scale.divisor
