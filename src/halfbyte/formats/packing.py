"""Packing of 4-bit and 6-bit codes into bytes; orders are named, never guessed.

Only bits move here: `unpack_*` of `pack_*` returns the same codes for every order.
"""

import math
from typing import Literal, get_args

import torch

from halfbyte.errors import FormatError

NibbleOrder = Literal["low_first", "high_first", "ggml_split"]
NIBBLE_ORDERS: tuple[str, ...] = get_args(NibbleOrder)

GGML_BLOCK = 32  # ggml block_mxfp4: low nibbles are codes 0..15, high nibbles codes 16..31


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `tensor` in row-major order: [num_bytes] uint8, a copy if strided.

    `contiguous()` may leave any stride in a dimension of size 1, and `view` to bytes refuses it.
    """
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def pack_nibbles(codes: torch.Tensor, order: str = "low_first") -> torch.Tensor:
    """Return the packed bytes: [..., columns / 2] uint8.

    "low_first": byte j holds code 2j in its low and code 2j + 1 in its high nibble;
    "high_first": the other way round; "ggml_split": inside each 32 codes, byte j holds code j in
    its low and code j + 16 in its high nibble.

    Args:
        codes: [..., columns] uint8, each below 16; columns even (a multiple of 32 for ggml_split).
        order: one of `NIBBLE_ORDERS`.

    Raises:
        FormatError: an unknown order, another dtype, columns that do not fit, a code above 15.
    """
    _check_order(order)
    _check_codes(codes, 4, GGML_BLOCK if order == "ggml_split" else 2)
    if order == "ggml_split":
        halves = _split_last(codes, 2, GGML_BLOCK // 2)
        return (halves[..., 0, :] | (halves[..., 1, :] << 4)).flatten(-2)
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return even | (odd << 4) if order == "low_first" else odd | (even << 4)


def unpack_nibbles(data: torch.Tensor, order: str = "low_first") -> torch.Tensor:
    """Return the codes, one a byte: [..., 2 * bytes] uint8; the inverse of `pack_nibbles`.

    Args:
        data: [..., bytes] uint8; bytes a multiple of 16 for "ggml_split".
        order: one of `NIBBLE_ORDERS`.

    Raises:
        FormatError: an unknown order, another dtype, bytes that do not fit.
    """
    _check_order(order)
    _check_bytes(data, GGML_BLOCK // 2 if order == "ggml_split" else 1)
    low, high = data & 0x0F, data >> 4
    if order == "ggml_split":
        halves = [_split_last(nibbles, GGML_BLOCK // 2) for nibbles in (low, high)]
        return torch.stack(halves, -2).flatten(-3)
    pair = (low, high) if order == "low_first" else (high, low)
    return torch.stack(pair, -1).flatten(-2)


def pack_sixbit(codes: torch.Tensor) -> torch.Tensor:
    """Return 6-bit codes as a little-endian bit stream: [..., columns * 3 / 4] uint8.

    Code i of a row occupies bits 6i .. 6i + 5 of the row; four codes fill three bytes.

    Args:
        codes: [..., columns] uint8, each below 64; columns a multiple of 4.

    Raises:
        FormatError: another dtype, columns that do not fit, a code above 63.
    """
    _check_codes(codes, 6, 4)
    first, second, third, fourth = _split_last(codes, 4).unbind(-1)
    parts = (first | (second << 6), (second >> 2) | (third << 4), (third >> 4) | (fourth << 2))
    return torch.stack(parts, -1).flatten(-2)


def unpack_sixbit(data: torch.Tensor) -> torch.Tensor:
    """Return the 6-bit codes, one a byte: [..., bytes * 4 / 3] uint8; inverse of `pack_sixbit`.

    Args:
        data: [..., bytes] uint8; bytes a multiple of 3.

    Raises:
        FormatError: another dtype, bytes that do not fit.
    """
    _check_bytes(data, 3)
    low, middle, high = _split_last(data, 3).unbind(-1)
    parts = (low, (low >> 6) | (middle << 2), (middle >> 4) | (high << 4), high >> 2)
    return (torch.stack(parts, -1) & 0x3F).flatten(-2)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes of 4 (low nibble first), 6 or 8 bits as `BlockScaledTensor.data` holds them."""
    if bits == 4:
        return pack_nibbles(codes)
    return pack_sixbit(codes) if bits == 6 else codes


def unpack_codes(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of `BlockScaledTensor.data`, one a byte; the inverse of `pack_codes`."""
    if bits == 4:
        return unpack_nibbles(data)
    return unpack_sixbit(data) if bits == 6 else data


def _split_last(tensor: torch.Tensor, *sizes: int) -> torch.Tensor:
    # Written with the count spelled out: -1 is ambiguous for a tensor without elements.
    count = tensor.shape[-1] // math.prod(sizes)
    return tensor.reshape(*tensor.shape[:-1], count, *sizes)


def _check_order(order: str) -> None:
    if order not in NIBBLE_ORDERS:
        known = ", ".join(NIBBLE_ORDERS)
        raise FormatError(f"nibble order {order!r} is unknown; use one of: {known}")


def _check_codes(codes: torch.Tensor, bits: int, multiple: int) -> None:
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes: dtype {codes.dtype}, wanted torch.uint8")
    if codes.ndim == 0 or codes.shape[-1] % multiple:
        raise FormatError(
            f"codes: shape {tuple(codes.shape)}, wanted a last dimension that is a multiple of "
            f"{multiple}; pad with zero codes"
        )
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise FormatError(f"codes: {int(codes.max())} does not fit in {bits} bits")


def _check_bytes(data: torch.Tensor, multiple: int) -> None:
    if data.dtype != torch.uint8:
        raise FormatError(f"data: dtype {data.dtype}, wanted torch.uint8")
    if data.ndim == 0 or data.shape[-1] % multiple:
        raise FormatError(
            f"data: shape {tuple(data.shape)}, wanted a last dimension that is a multiple of "
            f"{multiple}"
        )
