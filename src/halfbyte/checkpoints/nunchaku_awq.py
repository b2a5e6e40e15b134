"""nunchaku's AWQ W4A16 linears: packed unsigned codes with zero points, as the record holds them.

    qweight  int32 [N/4, K/2]   tiles of four rows by 64 columns
    wscales  float [K/64, N]
    wzeros   float [K/64, N]    already multiplied by the scale: W = code * wscales + wzeros
    bias     float [N]

The record has no zero points. They are a low-rank branch instead, and exactly so: with lora_down
[K/64, K] the indicator of the blocks (row g is one on the columns of block g) and lora_up [N, K/64]
the zeros, lora_up @ lora_down adds to every weight the zero of its block.

Linears of adaptive norms (`find_splits`) are stored for a kernel that wants shift, scale and gate
of one channel side by side: of `splits` chunks of N/splits rows, row i of chunk c is row
i * splits + c of the file, and the bias of the scale chunks has the one of `x * (1 + scale)` in it.
The record has the model's own order and bias.

A tile's row is two runs of 32 columns; 16-bit word j of a run holds columns j, j + 8, j + 16 and
j + 24, the lowest nibble first. Source: nunchaku 3a3cc3d, kernels/awq/gemv_awq.cu; deepcompressor,
backend/tinychat and backend/nunchaku.
"""

import re
from collections.abc import Mapping
from typing import Final

import torch

from halfbyte.checkpoints.layer_keys import KeySet
from halfbyte.errors import FormatError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear

FORMAT: Final = "uint4"
GROUP: Final = 64  # columns of one scale and one zero
TILE_ROWS: Final = 4
_HALVES: Final = ("F16", "BF16")
AWQ_KEYS: Final = KeySet(
    required={"qweight": ("I32",), "wscales": _HALVES, "wzeros": _HALVES},
    optional={"bias": (*_HALVES, "F32")},
)
# Adaptive norms of the models that nunchaku runs, by the end of the layer's name: FLUX's single
# blocks have shift, scale and gate; its double blocks and Qwen-Image's have them twice.
_SPLITS: Final = (
    (re.compile(r"(^|\.)norm\.linear$"), 3),
    (re.compile(r"(^|\.)norm1(_context)?\.linear$"), 6),
    (re.compile(r"(^|\.)(img|txt)_mod\.1$"), 6),
)


def find_splits(layer: str) -> int:
    """Return how many chunks nunchaku interleaves the rows of a layer from; 1 for rows in order."""
    return next((splits for pattern, splits in _SPLITS if pattern.search(layer)), 1)


def unpack_awq_codes(qweight: torch.Tensor) -> torch.Tensor:
    """Return codes [N, K/2] uint8, low nibble the even column, of int32 [N/4, K/2]."""
    if qweight.ndim != 2 or 2 * qweight.shape[1] % GROUP or qweight.numel() == 0:
        raise FormatError(
            f"qweight: shape {list(qweight.shape)}, wanted [N/4, K/2] with K a multiple of {GROUP}"
        )
    tiles, columns = qweight.shape[0], 2 * qweight.shape[1]
    # (tile, group, row, run, pair, e, b): byte b of word 2 * pair + e
    words = qweight.contiguous().view(torch.uint8).reshape(tiles, columns // GROUP, 4, 2, 4, 2, 2)
    even, odd = words[..., 0, :], words[..., 1, :]
    pairs = torch.stack(((even & 0x0F) | (odd << 4), (even >> 4) | (odd & 0xF0)), -1)
    # (tile, group, row, run, pair, b, h) -> (tile, row, group, run, b, h, pair)
    return pairs.permute(0, 2, 1, 3, 5, 6, 4).reshape(4 * tiles, columns // 2)


def pack_awq_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return int32 [N/4, K/2] of codes [N, K/2]; the inverse of `unpack_awq_codes`."""
    rows, row_bytes = codes.shape
    if rows % TILE_ROWS or 2 * row_bytes % GROUP:
        raise FormatError(
            f"{rows} rows and {2 * row_bytes} columns: AWQ tiles have {TILE_ROWS} by {GROUP}"
        )
    pairs = codes.reshape(rows // 4, 4, 2 * row_bytes // GROUP, 2, 2, 2, 4)
    low, high = pairs[..., 0, :], pairs[..., 1, :]
    words = torch.stack(((low & 0x0F) | (high << 4), (low >> 4) | (high & 0xF0)), -1)
    # (tile, row, group, run, b, pair, e) -> (tile, group, row, run, pair, e, b)
    words = words.permute(0, 2, 1, 3, 5, 6, 4).reshape(rows // 4, 4 * row_bytes)
    return words.view(torch.int32)


def decode_awq(parts: Mapping[str, torch.Tensor], splits: int) -> QuantizedLinear:
    """Return the weight-only record of an AWQ layer, rows in the model's order.

    Raises FormatError for shapes that do not fit each other or `splits`.
    """
    codes = _deinterleave(unpack_awq_codes(parts["qweight"]), splits)
    rows, groups = codes.shape[0], 2 * codes.shape[1] // GROUP
    for name in ("wscales", "wzeros"):
        if tuple(parts[name].shape) != (groups, rows):
            raise FormatError(
                f"{name}: shape {list(parts[name].shape)}, wanted [K/64, N] = {[groups, rows]}"
            )
    scales, zeros = parts["wscales"], parts["wzeros"]
    if zeros.dtype != scales.dtype:
        raise FormatError(f"wzeros: dtype {zeros.dtype}, wanted that of wscales, {scales.dtype}")
    bias = parts.get("bias")
    if bias is not None and tuple(bias.shape) != (rows,):
        raise FormatError(f"bias: shape {list(bias.shape)}, wanted [N] = {[rows]}")
    if bias is not None and splits > 1:
        bias = _deinterleave(bias.float(), splits) - _make_ones_of_scales(bias, splits)
    return QuantizedLinear(
        weight=BlockScaledTensor(
            get_format(FORMAT),
            codes,
            _deinterleave(scales.t(), splits).contiguous(),
            None,
            2 * codes.shape[1],
        ),
        lora_down=make_block_indicator(groups, zeros),
        lora_up=_deinterleave(zeros.t(), splits).contiguous(),
        bias=bias,
    )


def encode_awq(linear: QuantizedLinear, splits: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a record that `find_awq_obstacle` has no objection to."""
    scales = linear.weight.scales
    zeros = torch.zeros_like(scales) if linear.lora_up is None else linear.lora_up
    parts = {
        "qweight": pack_awq_codes(_interleave(linear.weight.data, splits)),
        "wscales": _interleave(scales, splits).t().contiguous(),
        "wzeros": _interleave(zeros, splits).t().contiguous(),
    }
    bias = linear.bias
    if bias is not None and splits > 1:
        whole = bias.float() + _make_ones_of_scales(bias, splits)
        bias = _interleave(whole, splits).to(scales.dtype)
    if bias is not None:
        parts["bias"] = bias
    return parts


def find_awq_obstacle(linear: QuantizedLinear) -> str | None:
    """Return why an AWQ layer cannot hold a record of unsigned codes; None where it can."""
    if linear.activation is not None:
        return f"activation {linear.activation.name}: nunchaku's unsigned codes take 16-bit x"
    for name in ("smooth", "channel_scale"):
        if getattr(linear, name) is not None:
            return (
                f"{name}: nunchaku's AWQ layers have none; fold it into the weight, quantize again"
            )
    if linear.out_features % TILE_ROWS or linear.in_features % GROUP:
        return (
            f"{linear.out_features} rows and {linear.in_features} columns: nunchaku's AWQ tiles "
            f"have {TILE_ROWS} by {GROUP}; pad the model's layer first"
        )
    scales = linear.weight.scales
    if scales.dtype == torch.float32:
        return "float32 block scales: nunchaku's AWQ scales are fp16 or bf16"
    if linear.lora_down is None or linear.lora_up is None:
        return None
    wanted = make_block_indicator(linear.in_features // GROUP, linear.lora_up)
    is_indicator = linear.lora_down.shape == wanted.shape and (
        wanted.is_meta or torch.equal(linear.lora_down, wanted)
    )
    if not is_indicator or linear.lora_up.dtype != scales.dtype:
        return (
            "a low-rank branch other than zero points (lora_down the indicator of blocks of 64, "
            "lora_up of the scales' dtype): nunchaku's AWQ layers have no low-rank branch"
        )
    return None


def make_block_indicator(groups: int, like: torch.Tensor) -> torch.Tensor:
    """Return [groups, groups * 64] with ones on the block diagonal, dtype and device as `like`."""
    unit = torch.eye(groups, dtype=like.dtype, device=like.device)
    return unit.unsqueeze(-1).expand(groups, groups, GROUP).reshape(groups, groups * GROUP)


def _deinterleave(rows: torch.Tensor, splits: int) -> torch.Tensor:
    """Return rows of the file's order in the model's: chunk after chunk."""
    _check_splits(rows, splits)
    return rows.reshape(-1, splits, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _interleave(rows: torch.Tensor, splits: int) -> torch.Tensor:
    """Return rows of the model's order in the file's: channel after channel."""
    _check_splits(rows, splits)
    return rows.reshape(splits, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _check_splits(rows: torch.Tensor, splits: int) -> None:
    if rows.shape[0] % splits:
        raise FormatError(
            f"{rows.shape[0]} rows: a layer of this name has {splits} chunks of equal size"
        )


def _make_ones_of_scales(bias: torch.Tensor, splits: int) -> torch.Tensor:
    """Return [N] float32 with one on the scale chunks, the second and the last but one."""
    ones = torch.zeros(splits, dtype=torch.float32, device=bias.device)
    ones[1] = ones[-2] = 1.0
    return ones.repeat_interleave(bias.numel() // splits)
