"""The order in which nunchaku stores a linear's tensors: fragments of its mma.sync tiles.

Every tensor is a permutation of the plain one; no value changes. Axis letters of the formulas
below are those of the reshapes. Source: nunchaku 3a3cc3d, packer of the w4a4 linear; checked
against files that its own packer wrote (tests/data).

    codes     [N, K/2]   n = 128 nt + 16 a + 8 b + c,  k = 64 kt + 32 d + 8 e + (0..7)
    scales    [K/16, N]  n = 128 nt + 32 p + 8 i + h,  group = 4 kt + j             (E4M3)
              [K/64, N]  n = 128 nt + 16 a + 8 p + 2 l + e                          (fp16, bf16)
    vectors   [N]        the same as scales with one group
    proj_down [K, R]     r = 16 rf + 8 n2 + nl,  k = 16 kf + 8 k2 + 2 kl + e
    proj_up   [N, R]     the same with n for r and r for k
"""

import torch

from halfbyte.errors import FormatError

TILE_ROWS = 128  # N is padded to whole tiles
TILE_COLUMNS = 64  # codes of K in a tile
FRAGMENT = 16  # rows and columns of a low-rank fragment


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Return codes [N, K/2] uint8, low nibble the even column, of packed int8 or uint8 [N, K/2]."""
    n, row_bytes = packed.shape
    _check_multiple("rows", n, TILE_ROWS)
    _check_multiple("columns", 2 * row_bytes, TILE_COLUMNS)
    tiles = _view_words(packed).reshape(n // 128, row_bytes // 32, 8, 8, 4, 2, 2)
    # (nt, kt, a, c, e, b, d) -> (nt, a, b, c, kt, d, e)
    return tiles.permute(0, 2, 5, 3, 1, 6, 4).reshape(n, row_bytes // 4).view(torch.uint8)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return the packed form of codes [N, K/2] as int8; the inverse of `unpack_codes`."""
    n, row_bytes = codes.shape
    _check_multiple("rows", n, TILE_ROWS)
    _check_multiple("columns", 2 * row_bytes, TILE_COLUMNS)
    tiles = _view_words(codes).reshape(n // 128, 8, 2, 8, row_bytes // 32, 2, 4)
    # (nt, a, b, c, kt, d, e) -> (nt, kt, a, c, e, b, d)
    packed = tiles.permute(0, 4, 1, 3, 6, 2, 5).reshape(n, row_bytes // 4)
    return packed.view(torch.int8)


def unpack_byte_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return E4M3 scales [N, K/16] of packed [K/16, N]."""
    groups, n = packed.shape
    _check_multiple("rows", n, TILE_ROWS)
    _check_multiple("groups", groups, 4)
    tiles = _view_words(packed).reshape(n // 128, groups // 4, 8, 4, 4)
    # (nt, kt, h, i, p) of words of four j -> (nt, p, i, h, kt)
    return tiles.permute(0, 4, 3, 2, 1).reshape(n, groups // 4).view(packed.dtype)


def pack_byte_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the packed form [K/16, N] of E4M3 scales [N, K/16]."""
    n, groups = scales.shape
    _check_multiple("rows", n, TILE_ROWS)
    _check_multiple("groups", groups, 4)
    tiles = _view_words(scales).reshape(n // 128, 4, 4, 8, groups // 4)
    # (nt, p, i, h, kt) of words of four j -> (nt, kt, h, i, p)
    return tiles.permute(0, 4, 3, 2, 1).reshape(groups, n // 4).view(scales.dtype)


def unpack_float_scales(packed: torch.Tensor) -> torch.Tensor:
    """Return scales [N, G] of packed [G, N], fp16 or bf16."""
    groups, n = packed.shape
    _check_multiple("rows", n, TILE_ROWS)
    tiles = packed.reshape(n // 128, groups, 8, 4, 2, 2)
    # (nt, g, a, l, p, e) -> (nt, a, p, l, e, g)
    return tiles.permute(0, 2, 4, 3, 5, 1).reshape(n, groups)


def pack_float_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the packed form [G, N] of scales [N, G]."""
    n, groups = scales.shape
    _check_multiple("rows", n, TILE_ROWS)
    tiles = scales.reshape(n // 128, 8, 2, 4, 2, groups)
    # (nt, a, p, l, e, g) -> (nt, g, a, l, p, e)
    return tiles.permute(0, 5, 1, 3, 2, 4).reshape(groups, n)


def unpack_vector(packed: torch.Tensor) -> torch.Tensor:
    """Return a plain vector of a packed one of N or K elements."""
    return unpack_float_scales(packed.reshape(1, -1)).reshape(-1)


def pack_vector(vector: torch.Tensor) -> torch.Tensor:
    """Return the packed form of a vector."""
    return pack_float_scales(vector.reshape(-1, 1)).reshape(-1)


def unpack_lora_down(packed: torch.Tensor) -> torch.Tensor:
    """Return lora_down [R, K] of packed [K, R]."""
    k, rank = packed.shape
    _check_fragments(k, rank)
    tiles = packed.reshape(k // 16, rank // 16, 8, 4, 2, 2, 2)
    # (kf, rf, nl, kl, n2, k2, e) -> (rf, n2, nl, kf, k2, kl, e)
    return tiles.permute(1, 4, 2, 0, 5, 3, 6).reshape(rank, k)


def pack_lora_down(lora_down: torch.Tensor) -> torch.Tensor:
    """Return the packed form [K, R] of lora_down [R, K]."""
    rank, k = lora_down.shape
    _check_fragments(k, rank)
    tiles = lora_down.reshape(rank // 16, 2, 8, k // 16, 2, 4, 2)
    # (rf, n2, nl, kf, k2, kl, e) -> (kf, rf, nl, kl, n2, k2, e)
    return tiles.permute(3, 0, 2, 5, 1, 4, 6).reshape(k, rank)


def unpack_lora_up(packed: torch.Tensor) -> torch.Tensor:
    """Return lora_up [N, R] of packed [N, R]."""
    n, rank = packed.shape
    _check_fragments(n, rank)
    tiles = packed.reshape(n // 16, rank // 16, 8, 4, 2, 2, 2)
    # (nf, rf, nl, kl, n2, k2, e) -> (nf, n2, nl, rf, k2, kl, e)
    return tiles.permute(0, 4, 2, 1, 5, 3, 6).reshape(n, rank)


def pack_lora_up(lora_up: torch.Tensor) -> torch.Tensor:
    """Return the packed form [N, R] of lora_up [N, R]."""
    n, rank = lora_up.shape
    _check_fragments(n, rank)
    tiles = lora_up.reshape(n // 16, 2, 8, rank // 16, 2, 4, 2)
    # (nf, n2, nl, rf, k2, kl, e) -> (nf, rf, nl, kl, n2, k2, e)
    return tiles.permute(0, 3, 2, 5, 1, 4, 6).reshape(n, rank)


def _view_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return bytes in words of four, which all tiles keep together: four times as fast to move."""
    return tensor.contiguous().view(torch.int32)


def _check_multiple(name: str, size: int, multiple: int) -> None:
    if size % multiple:
        raise FormatError(f"{size} {name}: fragments come in multiples of {multiple}; pad first")


def _check_fragments(rows: int, rank: int) -> None:
    _check_multiple("rows", rows, FRAGMENT)
    _check_multiple("ranks", rank, FRAGMENT)
