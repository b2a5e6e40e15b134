"""A QuantizedLinear as the tensors that the Blackwell kernels read; torch only, done once a layer.

The GEMM adds the 4-bit product P and the low-rank branch in one accumulator and has one factor a
column:

    y[m, n] = (P[m, n] + sum_r lora_act[m, r] * lora_up'[n, r]) * factor[n] * alpha + bias[n]

`factor` is the static global scales times channel_scale, alpha a dynamic activation scale (else
1). The low-rank branch is not scaled by any of them, so they are divided out of its operands:

    lora_up'[n, r] = lora_up[n, r] / factor[n] / 2^s                   here; float64, rounded once
    lora_act[m, r] = sum_k x[m, k] * lora_down[r, k] * 2^s / alpha     in the quantize kernel

2^s (`lora_act_scale`) keeps both in the range of their dtype; `halfbyte.kernels.gemm_w4a4.balance`
chooses it and proves the range. Where a factor is zero the 4-bit product of the column vanishes:
its block scales (E8M0 has no zero: its codes) are zeroed, the zero among its factors becomes 1, and
the column is the low-rank branch plus bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import pack_scales
from halfbyte.kernels.gemm_w4a4.balance import ActivationRange, LowRankRange, choose_exponent
from halfbyte.kernels.placed_bytes import count_bytes, count_shared_bytes

LORA_DTYPES: Final = (torch.float16, torch.bfloat16)
K_MULTIPLE: Final = 32  # codes: a row stride of 16 bytes, which TMA wants
RANK_MULTIPLE: Final = 8  # fp16 or bf16 numbers: 16 bytes
POINTER_BYTES: Final = 16  # TMA's alignment of a global address
SF_LAYOUT: Final = "swizzled_128x4"

# By (element, block scale): what the block-scaled MMA kinds of sm_100a and sm_103a multiply.
_KERNEL_FORMATS: Final = {("e2m1", "e4m3"): "nvfp4", ("e2m1", "e8m0"): "mxfp4"}
_CPU_RUNS_IT: Final = "the cpu backend runs it: .to('cpu')"
_LARGEST_SCALE_BYTE: Final = {"e4m3": 0x7E, "e8m0": 0xFE}  # above: NaN, or a sign that UE4M3 lacks
LARGEST_TWO_LEVEL: Final = 6.0 * 448.0  # largest E2M1 number times largest E4M3 scale
EXPECTED_ONE_LEVEL: Final = 64.0  # |x / smooth| where no global scale tells: see `balance`
_SMALLEST_FACTOR: Final = 2.0**-126  # float32's smallest normal number


@dataclass(frozen=True, eq=False)
class PlacedLinear:
    """The tensors of one linear in the layouts that the kernels read; all padding is zero.

    Attributes:
        block_format: "nvfp4" (E4M3 scales, blocks of 16) or "mxfp4" (E8M0, blocks of 32).
        activation: how x is quantized.
        columns: K, before padding to K_pad, a multiple of 32.
        rank: R, before padding to R_pad, a multiple of 8; 0 without a low-rank branch.
        weight_codes: [N, K_pad/2] uint8, the low nibble holding the even column; it is the record's
            own tensor where that has this layout already.
        weight_sf: flat uint8, block scales of [N, ceil(K/block)] as "swizzled_128x4".
        lora_down: [R_pad, K_pad] fp16 or bf16, of the raw x; None for rank 0.
        lora_up: [N, R_pad] of that dtype, divided by column_scale and lora_act_scale; or None.
        lora_act_scale: a power of two; what the quantize kernel multiplies x @ lora_down.T by.
        column_scale: [N] float32, static global scales times channel_scale; None for all ones.
        bias: [N] float32 or None.
        smooth: [K] float32 or None; x is divided by it before it is quantized.
        activation_global_scale: [1] float32, for a static activation format only.
        shared_bytes: bytes of `num_bytes` that are the record's own.
    """

    block_format: str
    activation: ActivationFormat
    columns: int
    rank: int
    weight_codes: torch.Tensor
    weight_sf: torch.Tensor
    lora_down: torch.Tensor | None
    lora_up: torch.Tensor | None
    lora_act_scale: float
    column_scale: torch.Tensor | None
    bias: torch.Tensor | None
    smooth: torch.Tensor | None
    activation_global_scale: torch.Tensor | None
    shared_bytes: int

    @property
    def out_features(self) -> int:
        """N."""
        return self.weight_codes.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, `shared_bytes` included."""
        return count_bytes(self)


@dataclass(frozen=True, eq=False)
class GemmOperands:
    """What one GEMM reads; K_pad is K rounded up to 32, R_pad R rounded up to 8.

    Attributes:
        block_format: "nvfp4" or "mxfp4".
        act_codes: [M, K_pad/2] uint8. act_sf: flat uint8, block scales as "swizzled_128x4".
        weight_codes: [N, K_pad/2] uint8. weight_sf: flat uint8, likewise.
        lora_act: [M, R_pad] fp16 or bf16, None for rank 0. lora_up: [N, R_pad] of that dtype.
        column_scale: [N] float32, static global scales times channel scale; None for all ones.
        alpha: [1] float32, a dynamic global scale; None where there is none.
        bias: [N] float32 or None.
        columns, rank: K and R, before padding.
    """

    block_format: str
    act_codes: torch.Tensor
    act_sf: torch.Tensor
    weight_codes: torch.Tensor
    weight_sf: torch.Tensor
    lora_act: torch.Tensor | None
    lora_up: torch.Tensor | None
    column_scale: torch.Tensor | None
    alpha: torch.Tensor | None
    bias: torch.Tensor | None
    columns: int
    rank: int


def place_linear(linear: QuantizedLinear, dtype: torch.dtype) -> PlacedLinear:
    """Return the tensors of `linear` as the Blackwell kernels read them, on its device.

    Args:
        linear: NVFP4 weights with NVFP4 activations, or MXFP4 with MXFP4.
        dtype: of x, lora_act, lora_down and lora_up: float16 or bfloat16.

    Raises:
        UnsupportedHardwareError: INT4, weight-only or mixed formats, with what runs them.
        FormatError: values that are not finite, negative or NaN block scales, and low-rank factors
            that leave the range of `dtype` or lose bits that the dtype itself would keep.
    """
    check_runs_on_blackwell(linear)
    if dtype not in LORA_DTYPES:
        raise FormatError(f"dtype {dtype}: the low-rank operands are float16 or bfloat16")
    assert linear.activation is not None  # check_runs_on_blackwell refused weight-only
    _check_values(linear)
    global_scales = (linear.weight.global_scale, linear.activation_global_scale)
    channel_scale = linear.channel_scale
    if channel_scale is None:
        channel_scale = torch.ones(linear.out_features, device=linear.weight.data.device)
    factor, is_zero = make_factors(global_scales, channel_scale)
    codes, sf = place_weight(linear.weight, is_zero)
    lora_down, lora_up, exponent = _place_low_rank(linear, factor, dtype)
    placed = PlacedLinear(
        block_format=_KERNEL_FORMATS[linear.weight.format.element, linear.weight.format.scale],
        activation=linear.activation,
        columns=linear.in_features,
        rank=linear.rank,
        weight_codes=codes,
        weight_sf=sf,
        lora_down=lora_down,
        lora_up=lora_up,
        lora_act_scale=2.0**exponent,
        column_scale=None if bool((factor == 1).all()) else factor,
        bias=_to_float32(linear.bias),
        smooth=_to_float32(linear.smooth),
        activation_global_scale=_to_scalar(linear.activation_global_scale),
        shared_bytes=0,
    )
    return replace(placed, shared_bytes=count_shared_bytes(placed, linear, linear.weight))


def replace_low_rank(
    placed: PlacedLinear, linear: QuantizedLinear, dtype: torch.dtype
) -> PlacedLinear:
    """Return `placed` with the low-rank branch of `linear`, which is else what it was made from.

    The weight is neither read nor packed: the cost is that of the two factors. Raises what
    `place_linear` raises for them.
    """
    for name in ("lora_down", "lora_up"):
        part = getattr(linear, name)
        if part is not None and not bool(torch.isfinite(part).all()):
            raise FormatError(f"{name}{_name_first(~torch.isfinite(part), part)}, wanted finite")
    factor = placed.column_scale
    if factor is None:
        factor = torch.ones(linear.out_features, device=placed.weight_codes.device)
    lora_down, lora_up, exponent = _place_low_rank(linear, factor, dtype)
    again = replace(
        placed,
        rank=linear.rank,
        lora_down=lora_down,
        lora_up=lora_up,
        lora_act_scale=2.0**exponent,
    )
    return replace(again, shared_bytes=count_shared_bytes(again, linear, linear.weight))


def check_runs_on_blackwell(linear: QuantizedLinear) -> None:
    """Raise UnsupportedHardwareError for formats that tcgen05 has no block-scaled MMA for."""
    weight, activation = linear.weight.format, linear.activation
    if activation is None:
        raise UnsupportedHardwareError(
            f"weight-only {weight.name} (no activation format): the Blackwell kernel multiplies "
            f"two 4-bit operands; {_CPU_RUNS_IT}"
        )
    kinds = [(one.element, one.scale) for one in (weight, activation.block_format)]
    for name, kind in zip((weight.name, activation.name), kinds, strict=True):
        if kind not in _KERNEL_FORMATS:
            raise UnsupportedHardwareError(
                f"format {name!r}: Blackwell's tensor cores multiply NVFP4 or MXFP4 blocks, and "
                f"have no INT4 kind; {_CPU_RUNS_IT}"
            )
    if kinds[0] != kinds[1]:
        raise UnsupportedHardwareError(
            f"weight {weight.name!r} with activation {activation.name!r}: one MMA takes NVFP4 or "
            f"MXFP4 for both operands; {_CPU_RUNS_IT}"
        )


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


def check_parts(linear: QuantizedLinear) -> None:
    """Raise FormatError naming the first part beside codes and block scales that fits no product:
    one that is not finite, or a `smooth` that is not positive."""
    parts = {
        "weight_global_scale": linear.weight.global_scale,
        "activation_global_scale": linear.activation_global_scale,
        "channel_scale": linear.channel_scale,
        "smooth": linear.smooth,
        "lora_down": linear.lora_down,
        "lora_up": linear.lora_up,
        "bias": linear.bias,
    }
    for name, part in parts.items():
        if part is not None and not bool(torch.isfinite(part).all()):
            raise FormatError(f"{name}{_name_first(~torch.isfinite(part), part)}, wanted finite")
    if linear.smooth is not None and not bool((linear.smooth > 0).all()):
        wrong = _name_first(linear.smooth <= 0, linear.smooth)
        raise FormatError(f"smooth{wrong}, wanted positive: x is divided by it")


def _check_values(linear: QuantizedLinear) -> None:
    """Raise FormatError naming the first part with a value that no product survives."""
    check_parts(linear)
    static = linear.activation_global_scale
    if static is not None and float(static) < 0:
        raise FormatError(
            f"activation_global_scale is {float(static):g}, wanted positive: block scales of x, "
            "which it divides, have no sign on tensor cores"
        )
    scales = linear.weight.scales.view(torch.uint8)
    is_bad = scales > _LARGEST_SCALE_BYTE[linear.weight.format.scale]
    if bool(is_bad.any()):
        raise FormatError(
            f"weight_scales{_name_first(is_bad, scales)}: a NaN or negative "
            f"{linear.weight.format.scale} scale, and tensor cores read no sign; quantize it again"
        )


def _name_first(is_bad: torch.Tensor, part: torch.Tensor) -> str:
    """Return e.g. `[3, 7] is nan` of the first marked element."""
    index = tuple(torch.nonzero(is_bad)[0].tolist())
    place = str(list(index)) if index else ""
    return f"{place} is {part[index].item()}"


def make_factors(
    global_scales: Sequence[torch.Tensor | None], channel_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (factor [N] float32 without zeros, [N] bool: where the 4-bit product vanishes).

    A product below float32's smallest normal number counts as zero: what it would scale is below
    2^41 (two operands of at most 2688, K up to 2^18), the column below 2^-85.
    """
    channel = channel_scale.double()
    alpha = torch.ones((), dtype=torch.float64, device=channel.device)
    for part in global_scales:
        alpha = alpha if part is None else alpha * part.double()
    is_zero = (alpha * channel).abs() < _SMALLEST_FACTOR
    kept_alpha = torch.where(alpha.abs() < _SMALLEST_FACTOR, torch.ones_like(alpha), alpha)
    factor = torch.where(is_zero, kept_alpha, alpha * channel).float()
    if not bool(torch.isfinite(factor).all()):
        n_bad = int(torch.nonzero(~torch.isfinite(factor))[0])
        raise FormatError(
            f"channel_scale[{n_bad}] = {channel[n_bad].item():g} times the global scales "
            f"{alpha.item():g} leaves float32; divide the scales at the source"
        )
    return factor, is_zero


def place_weight(
    weight: BlockScaledTensor, is_zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, sf), zeroed where `is_zero` [N] says that the column's product vanishes."""
    n, k = weight.shape
    scales = weight.scales.view(torch.uint8)
    codes = weight.data
    row_bytes = round_up(k, K_MULTIPLE) // 2
    is_placed = codes.shape[1] == row_bytes and codes.is_contiguous() and k % K_MULTIPLE == 0
    if not is_placed or codes.data_ptr() % POINTER_BYTES:
        codes = torch.zeros((n, row_bytes), dtype=torch.uint8, device=weight.data.device)
        used = -(-k // 2)
        codes[:, :used] = weight.data[:, :used]
        if k % 2:
            codes[:, used - 1] &= 0x0F
    if bool(is_zero.any()):
        if weight.format.scale == "e4m3":
            scales = scales.masked_fill(is_zero[:, None], 0)
        else:  # E8M0 byte 0 is 2^-127
            codes = codes.masked_fill(is_zero[:, None], 0)
    return codes, pack_scales(scales, SF_LAYOUT).flatten()


def _place_low_rank(
    linear: QuantizedLinear, factor: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Return (lora_down, lora_up, the exponent of lora_act_scale)."""
    if linear.lora_down is None or linear.lora_up is None or linear.rank == 0:
        return None, None, 0
    shape = (round_up(linear.rank, RANK_MULTIPLE), round_up(linear.in_features, K_MULTIPLE))
    lora_down = place_lora_down(linear.lora_down, shape, dtype)
    largest, expected = _bound_act(linear)
    activation = bound_lora_act(linear, dtype, largest, expected)
    lora_up, exponent = place_lora_up(linear.lora_up, factor, dtype, activation)
    return lora_down, lora_up, exponent


def place_lora_down(
    lora_down: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return `lora_down` [R, K] in `dtype`, with zeros up to `shape`.

    Raises FormatError where a number does not fit the dtype.
    """
    rank, k = lora_down.shape
    placed = torch.zeros(shape, dtype=dtype, device=lora_down.device)
    placed[:rank, :k] = lora_down
    if not bool(torch.isfinite(placed).all()):
        largest = lora_down.abs().max().item()
        raise FormatError(
            f"lora_down: {lora_down.dtype} up to {largest:g} does not fit {dtype}; run the "
            "layer in torch.bfloat16"
        )
    return placed


def place_lora_up(
    lora_up: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, activation: ActivationRange
) -> tuple[torch.Tensor, int]:
    """Return (lora_up / factor / 2^s [N, R_pad] of `dtype`, s).

    Args:
        lora_up: [N, R] float.
        factor: [N] float32, what the kernel multiplies column n by; no zeros.
        dtype: float16 or bfloat16.
        activation: how large |lora_act| gets, before it is multiplied by 2^s.

    Raises FormatError where no s keeps both operands in range.
    """
    n, rank = lora_up.shape
    scaled = lora_up.double() / factor.double()[:, None]
    extent = LowRankRange(
        dtype=dtype,
        factor=factor.double().abs(),
        up_max=scaled.abs().amax(1),
        activation=activation,
    )
    exponent = choose_exponent(extent)
    placed = torch.zeros((n, round_up(rank, RANK_MULTIPLE)), dtype=dtype, device=lora_up.device)
    placed[:, :rank] = scaled * 2.0**-exponent
    return placed, exponent


def _bound_act(linear: QuantizedLinear) -> tuple[float, float]:
    """Return Z and Z' of `balance` (3) for 4-bit activations."""
    assert linear.activation is not None
    largest = LARGEST_TWO_LEVEL
    if linear.activation_global_scale is not None:
        largest *= float(linear.activation_global_scale)
    expected = EXPECTED_ONE_LEVEL if linear.activation.global_scale == "none" else largest
    return largest, expected


def bound_lora_act(
    linear: QuantizedLinear, dtype: torch.dtype, largest: float, expected: float
) -> ActivationRange:
    """Return the range of x @ lora_down.T / alpha by `balance` (3), lora_down rounded to `dtype`.

    Args:
        linear: with a low-rank branch.
        dtype: of lora_down in the kernel.
        largest: Z, what |x / smooth| / alpha is at most.
        expected: Z', what it is expected to be.
    """
    assert linear.lora_down is not None
    weights = linear.lora_down.to(dtype).double()
    if weights.numel() == 0:
        return ActivationRange(0.0, 0.0)
    if linear.smooth is not None:
        weights = weights * linear.smooth.double()
    return ActivationRange(
        bound=float(weights.abs().sum(1).max()) * largest,
        expected=float(weights.square().sum(1).max().sqrt()) * expected,
    )


def _to_float32(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else align(part.detach().float().contiguous())


def align(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy where it does not start at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % POINTER_BYTES else tensor


def _to_scalar(part: torch.Tensor | None) -> torch.Tensor | None:
    return None if part is None else part.detach().reshape(1)
