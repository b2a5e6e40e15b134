"""The operand set that published SVDQuant kernels take, as the tensors that this GEMM reads.

    y = (act * ascales) @ (wgt * wscales)^T * alpha * wcscales[n] + bias[n]
        + lora_act_in @ lora_up^T

Codes are packed two a byte, the low nibble first; block scales are transposed, [K/16, M] and
[K/16, N]. Published kernels disagree on whether wcscales reaches the low-rank branch. Here it does
not; for a source in which it does, pass lora_up already multiplied by it.
"""

from dataclasses import dataclass
from typing import Final, NoReturn

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.scale_layout import pack_scales, unpack_scales
from halfbyte.kernels.gemm_w4a4.balance import ActivationRange
from halfbyte.kernels.gemm_w4a4.placement import (
    LORA_DTYPES,
    RANK_MULTIPLE,
    SF_LAYOUT,
    GemmOperands,
    align,
    make_factors,
    place_lora_up,
    place_weight,
    round_up,
)

_BLOCK_SIZE: Final = 16
_INT4_BLOCK_SIZE: Final = 64
_LARGEST_SCALE_BYTE: Final = 0x7E  # E4M3's 448


@dataclass(frozen=True, eq=False)
class PublishedOperands:
    """One NVFP4 product as svdquant-kernels and vllm-omni's canonical files lay it out.

    Attributes:
        act: [M, K/2] uint8 or int8, E2M1 pairs, the low nibble holding the even column.
        wgt: [N, K/2], likewise.
        ascales: [K/16, M] float8_e4m3fn, or its bytes as uint8.
        wscales: [K/16, N], likewise.
        lora_act_in: [M, R] float32, float16 or bfloat16: raw x @ lora_down^T; None for rank 0.
        lora_up: [N, R] float; None for rank 0.
        wcscales: [N] float, or None for ones.
        bias: [N] float, or None.
        alpha: all global scales, multiplied.
    """

    act: torch.Tensor
    wgt: torch.Tensor
    ascales: torch.Tensor
    wscales: torch.Tensor
    lora_act_in: torch.Tensor | None = None
    lora_up: torch.Tensor | None = None
    wcscales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha: float = 1.0


def convert_published_operands(published: PublishedOperands, dtype: torch.dtype) -> GemmOperands:
    """Return the operands of the same product for this package's GEMM, on the same device.

    Args:
        published: see PublishedOperands; codes of 16-bit values in other orders do not fit.
        dtype: of y, lora_act and lora_up: float16 or bfloat16. lora_act_in is rounded to it once.

    Raises:
        FormatError: the tensor that does not fit, what came and what was wanted; also values that
            are not finite and low-rank operands that leave the dtype's range.
        UnsupportedHardwareError: INT4 operands (float scales of 64 codes), with what runs them.
    """
    if dtype not in LORA_DTYPES:
        _fail("dtype", dtype, "torch.float16 or torch.bfloat16")
    _check_devices(published)
    m, n, k = _check_codes(published)
    _check_scales("ascales", published.ascales, (k // _BLOCK_SIZE, m))
    _check_scales("wscales", published.wscales, (k // _BLOCK_SIZE, n))
    _check_vector("wcscales", published.wcscales, n)
    _check_vector("bias", published.bias, n)
    rank = _check_low_rank(published, m, n)
    act_codes, act_sf = place_weight(
        _make_operand(published.act, published.ascales, k), _no_zeros(published.act)
    )
    channel = torch.ones(n, device=published.wgt.device)
    if published.wcscales is not None:
        channel = published.wcscales
    alpha = torch.tensor(published.alpha, dtype=torch.float64, device=published.wgt.device)
    factor, is_zero = make_factors((alpha,), channel)
    weight_codes, weight_sf = place_weight(
        _make_operand(published.wgt, published.wscales, k), is_zero
    )
    lora_act, lora_up = _place_low_rank(published, factor, dtype)
    return GemmOperands(
        block_format="nvfp4",
        act_codes=act_codes,
        act_sf=act_sf,
        weight_codes=weight_codes,
        weight_sf=weight_sf,
        lora_act=lora_act,
        lora_up=lora_up,
        column_scale=None if bool((factor == 1).all()) else factor,
        alpha=None,
        bias=None if published.bias is None else align(published.bias.float().contiguous()),
        columns=k,
        rank=rank,
    )


def publish_scales(sf: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return [K/16, rows] float8_e4m3fn of "swizzled_128x4" bytes: the way back.

    Args:
        sf: flat uint8, as in GemmOperands.
        rows: M or N.
        columns: K.
    """
    scales = unpack_scales(sf, SF_LAYOUT, rows, columns // _BLOCK_SIZE)
    return pack_scales(scales, "transposed").view(torch.float8_e4m3fn)


def _check_codes(published: PublishedOperands) -> tuple[int, int, int]:
    """Return (M, N, K) of the codes."""
    for name in ("act", "wgt"):
        codes = getattr(published, name)
        rows = "M" if name == "act" else "N"
        if codes.dtype not in (torch.uint8, torch.int8) or codes.ndim != 2:
            _fail(name, f"{codes.dtype} {tuple(codes.shape)}", f"uint8 [{rows}, K/2]")
    m, act_bytes = published.act.shape
    n, wgt_bytes = published.wgt.shape
    if act_bytes != wgt_bytes:
        _fail("act", f"K/2 = {act_bytes}", f"that of wgt, {wgt_bytes}: one K for both")
    if 2 * wgt_bytes % _BLOCK_SIZE:
        _fail("wgt", f"K = {2 * wgt_bytes}", "a multiple of 16, the codes of one block scale")
    return m, n, 2 * wgt_bytes


def _check_scales(name: str, scales: torch.Tensor, shape: tuple[int, int]) -> None:
    came = f"{scales.dtype} {tuple(scales.shape)}"
    if scales.dtype in FLOAT_DTYPES:
        raise UnsupportedHardwareError(
            f"{name}: {came}: float scales are INT4's, one for {_INT4_BLOCK_SIZE} codes, and "
            "Blackwell's tensor cores have no INT4 kind; the cpu backend runs INT4 (halfbyte.cpu)"
        )
    rows = "M" if name == "ascales" else "N"
    wanted = f"float8_e4m3fn or its bytes, [K/16, {rows}] = {list(shape)}"
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        _fail(name, came, wanted)
    if tuple(scales.shape) == shape[::-1] and shape[0] != shape[1]:
        _fail(name, came, f"{wanted}: pass {name}.t()")
    if tuple(scales.shape) != shape:
        _fail(name, came, wanted)
    if bool((scales.view(torch.uint8) > _LARGEST_SCALE_BYTE).any()):
        _fail(name, "a NaN or negative scale", "scales of 0 to 448; tensor cores read no sign")


def _check_vector(name: str, vector: torch.Tensor | None, n: int) -> None:
    if vector is None:
        return
    if vector.dtype not in FLOAT_DTYPES or tuple(vector.shape) != (n,):
        _fail(name, f"{vector.dtype} {tuple(vector.shape)}", f"a float [N] = [{n}]")
    if not bool(torch.isfinite(vector).all()):
        _fail(name, "NaN or infinite values", "finite numbers")


def _check_low_rank(published: PublishedOperands, m: int, n: int) -> int:
    """Return R."""
    lora_act, lora_up = published.lora_act_in, published.lora_up
    if lora_act is None and lora_up is None:
        return 0
    if lora_act is None or lora_up is None:
        missing = "lora_act_in" if lora_act is None else "lora_up"
        _fail(missing, "None", "lora_act_in and lora_up together, or neither")
    rank = lora_up.shape[1] if lora_up.ndim == 2 else -1
    for name, part, rows in (("lora_act_in", lora_act, m), ("lora_up", lora_up, n)):
        if part.dtype not in FLOAT_DTYPES or tuple(part.shape) != (rows, rank):
            label = "M" if name == "lora_act_in" else "N"
            came = f"{part.dtype} {tuple(part.shape)}"
            _fail(name, came, f"a float [{label}, R] with {label} = {rows} and one R for both")
    if not bool(torch.isfinite(lora_up).all()):
        _fail("lora_up", "NaN or infinite values", "finite numbers")
    return rank


def _check_devices(published: PublishedOperands) -> None:
    for name, part in vars(published).items():
        if name == "alpha":
            if not isinstance(part, float | int | torch.Tensor):
                _fail(name, type(part).__name__, "a number: all global scales, multiplied")
        elif isinstance(part, torch.Tensor):
            if part.layout != torch.strided:
                _fail(name, f"a {part.layout} tensor", "a dense one; convert it with to_dense()")
        elif part is not None or name in ("act", "wgt", "ascales", "wscales"):
            _fail(name, type(part).__name__, "a tensor")
    device = published.wgt.device
    for name, part in vars(published).items():
        if isinstance(part, torch.Tensor) and part.device != device:
            _fail(name, f"a tensor on {part.device}", f"{device}, where wgt is")


def _make_operand(codes: torch.Tensor, scales: torch.Tensor, k: int) -> BlockScaledTensor:
    data = codes.contiguous().view(torch.uint8)
    rows = scales.t().contiguous().view(torch.float8_e4m3fn)
    return BlockScaledTensor(get_format("nvfp4_one_level"), data, rows, None, k)


def _no_zeros(codes: torch.Tensor) -> torch.Tensor:
    return torch.zeros(codes.shape[0], dtype=torch.bool, device=codes.device)


def _place_low_rank(
    published: PublishedOperands, factor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (lora_act [M, R_pad], lora_up [N, R_pad]) in `dtype`.

    The balance knows lora_act here. A NaN or an infinity in it spoils its own row of y and is left
    out of the balance.
    """
    lora_act, lora_up = published.lora_act_in, published.lora_up
    if lora_act is None or lora_up is None or lora_up.shape[1] == 0:
        return None, None
    finite = torch.where(torch.isfinite(lora_act), lora_act, 0).abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    placed_up, exponent = place_lora_up(lora_up, factor, dtype, ActivationRange(largest, largest))
    m, rank = lora_act.shape
    shape = (m, round_up(rank, RANK_MULTIPLE))
    placed_act = torch.zeros(shape, dtype=dtype, device=lora_act.device)
    placed_act[:, :rank] = lora_act.float() * 2.0**exponent
    return placed_act, placed_up


def _fail(name: str, came: object, wanted: str) -> NoReturn:
    raise FormatError(f"{name}: got {came}, wanted {wanted}")
