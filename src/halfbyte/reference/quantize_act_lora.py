"""Activation quantization and the low-rank down projection, defined step by step.

For each row of x [M, K], all in float32 (one IEEE rounding per written operation):

    z     = x / smooth                     (x + shift) / smooth where the format has a shift
    z     = z padded with zeros to whole blocks
    amax  = max |z| of the block           uint4: max(z, 0)
    s     = amax / L                       L = 6 (E2M1), 7 (int4), 15 (uint4)
    store = e4m3(s / g), saturating at 448     NVFP4; g is the global scale, 1 where there is none
            float16(s), saturating at 65504    INT4, UINT4 (or the format's own scale dtype)
            2^(floor(log2 amax) - 2)           MXFP4 (OCP floor rule; 2 = exponent of 4.0)
    d     = store * g                      payload_divisor "stored"
            s                              payload_divisor "unrounded"
    code  = nearest of the element's values to z / d, ties to the even code, saturating

A zero block stores scale byte 0x00 and codes 0. A nonzero block whose scale rounds to zero is
`flushed`: codes 0. A float scale is never zero: both store 1.0 there. A block whose scale does not
fit is `saturated`. A dynamic g is amax(z) / 2688, at least 2^-126, and 1 for an all-zero z.

A block that holds a NaN or an infinity stores a NaN scale and codes 0, so that every output of its
row is NaN and no other row changes; a dynamic g is that of the finite elements.

The low-rank branch sees the raw x: lora_act[m, r] = sum_k x[m, k] * lora_down[r, k], in float64.

Sources: NVFP4 block scale and one-level activations as in nunchaku's gemm_w4a4 kernel
("unrounded"); two-level scales as in compressed-tensors and ModelOpt; OCP MX v1.0, section 6.3.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.activation import ActivationFormat
from halfbyte.formats.block_format import BlockFormat
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import ByteArray, Float64Array, make_value_table, read_floats

Float32Array = npt.NDArray[np.float32]

_LARGEST: Final = {"e2m1": 6.0, "int4": 7.0, "uint4": 15.0}
_E4M3_MAX: Final = 448.0
_TWO_LEVEL_MAX: Final = 6.0 * 448.0  # largest E2M1 value times largest E4M3 scale
_E2M1_MAX_EXPONENT: Final = 2  # 4.0 = 2^2 is E2M1's largest power of two
_SMALLEST_NORMAL: Final = np.float32(2.0**-126)  # below it float32 quotients lose bits
_FLOAT16_MAX: Final = 65504.0
_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_BFLOAT16_MAX: Final = 3.3895313892515355e38  # 0x7F7F


@dataclass(frozen=True)
class ReferenceActivation:
    """A quantized activation [M, K] with its low-rank part.

    Attributes:
        block_format: elements, block length and block scale.
        codes: [M, padded K] uint8, one unpacked code an element; padding holds code 0.
        scale_bytes: [M, blocks] uint8 for E4M3 and E8M0 scales, None for float scales.
        scales: [M, blocks] float64, the exact stored block scales, without the global scale.
        global_scale: the float32 multiplier as a float; 1.0 where the format has none.
        lora_act: [M, R] float64, or None for rank 0.
        columns: K.
        saturated: number of blocks whose scale was clamped to the largest one.
        flushed: number of nonzero blocks whose scale rounds to zero.
    """

    block_format: BlockFormat
    codes: ByteArray
    scale_bytes: ByteArray | None
    scales: Float64Array
    global_scale: float
    lora_act: Float64Array | None
    columns: int
    saturated: int
    flushed: int


def dequantize_activation(activation: ReferenceActivation) -> Float64Array:
    """Return the [M, K] float64 matrix that the 4-bit product sees."""
    values = make_value_table(activation.block_format.element)[activation.codes]
    scales = np.repeat(activation.scales, activation.block_format.block_size, axis=1)
    return (values * scales * activation.global_scale)[:, : activation.columns]


def quantize_act_lora(x: torch.Tensor, linear: QuantizedLinear) -> ReferenceActivation:
    """Return the quantized activation of x [M, K] (f16/bf16/f32) for `linear`.

    FormatError for a weight-only linear, or an x of a wrong shape or dtype.
    """
    if linear.activation is None:
        raise FormatError("linear is weight-only: it has no activation format to quantize x with")
    check_input(x, linear)
    raw = read_floats(x)
    lora_act = None
    if linear.lora_down is not None and linear.rank > 0:
        lora_act = raw @ read_floats(linear.lora_down).T
    return quantize_input(raw, InputRule.from_linear(linear), lora_act)


def quantize_input(
    x: Float64Array, rule: InputRule, lora_act: Float64Array | None = None
) -> ReferenceActivation:
    """Return x [M, K], exact values of its dtype, quantized by a linear's rule."""
    z = x.astype(np.float32)
    if rule.activation.shift != 0.0:  # not added where absent: -0.0 keeps its sign
        z = (z + np.float32(rule.activation.shift)).astype(np.float32)
    if rule.smooth is not None:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            z = (z / read_floats(rule.smooth).astype(np.float32)).astype(np.float32)
    global_scale = None
    if rule.global_scale is not None:
        global_scale = np.float32(read_floats(rule.global_scale).item())
    return quantize_rows(z, rule.activation, global_scale, lora_act)


def quantize_rows(
    z: Float32Array,
    activation: ActivationFormat,
    global_scale: np.float32 | None = None,
    lora_act: Float64Array | None = None,
) -> ReferenceActivation:
    """Return z [M, K] float32 (already shifted and smoothed) block-quantized by `activation`."""
    block_format = activation.block_format
    blocks = cut_blocks(z, block_format.block_size)
    is_spoilt = ~np.isfinite(blocks).all(axis=2)
    blocks[~np.isfinite(blocks)] = 0
    positive = np.maximum(blocks, np.float32(0)) if block_format.element == "uint4" else blocks
    amax = np.abs(positive).max(axis=2, initial=0)
    g = choose_global_scale(activation, amax, global_scale)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        unrounded = (amax / np.float32(_LARGEST[block_format.element])).astype(np.float32)
        scale_bytes, stored, saturated = _encode_scales(activation, amax, unrounded, g)
        flushed = (amax != 0) & (stored == 0)
        if block_format.scale == "float":
            stored[stored == 0] = 1.0
        divisor = (stored.astype(np.float32) * g).astype(np.float32)
        if activation.payload_divisor == "unrounded":
            divisor = unrounded
        scaled: Float32Array = np.divide(blocks, divisor[:, :, None], dtype=np.float32)
    is_zero = (amax == 0) | (stored.astype(np.float32) * g == 0)
    scaled[is_zero] = np.float32(0)
    codes = encode_nearest_even(scaled, block_format.element)
    codes[is_zero | is_spoilt] = 0  # -0.0 inside a zero block is code 0, not 8
    stored[is_spoilt] = np.nan
    if scale_bytes is not None:
        scale_bytes[is_spoilt] = {"e4m3": 0x7F, "e8m0": 0xFF}[block_format.scale]
    return ReferenceActivation(
        block_format=block_format,
        codes=codes.reshape(len(z), amax.shape[1] * block_format.block_size),
        scale_bytes=scale_bytes,
        scales=stored,
        global_scale=float(g),
        lora_act=lora_act,
        columns=z.shape[1],
        saturated=int(saturated.sum()),
        flushed=int(flushed.sum()),
    )


def cut_blocks(z: Float32Array, block_size: int) -> Float32Array:
    """Return z [M, K] as [M, blocks, block_size], the last block padded with zeros."""
    rows, columns = z.shape
    num_blocks = -(-columns // block_size)
    padded = np.zeros((rows, num_blocks * block_size), dtype=np.float32)
    padded[:, :columns] = z
    return padded.reshape(rows, num_blocks, block_size)


def choose_global_scale(
    activation: ActivationFormat, amax: Float32Array, static_scale: np.float32 | None
) -> np.float32:
    """Return g in float32: 1, the calibrated one, or amax(z) / 2688 (see the module's formulas).

    Raises FormatError for a static activation without its calibrated scale.
    """
    if activation.global_scale == "none":
        return np.float32(1)
    if activation.global_scale == "static":
        if static_scale is None:
            raise FormatError(f"activation {activation.name!r} needs activation_global_scale")
        return static_scale
    largest = amax.max(initial=0)
    if largest == 0:
        return np.float32(1)
    return max(np.float32(largest / np.float32(_TWO_LEVEL_MAX)), _SMALLEST_NORMAL)


def encode_nearest_even(values: Float32Array, element: str) -> ByteArray:
    """Return the code of the table value nearest to each float32 value, same shape, uint8.

    Ties go to the even code, values beyond the largest saturate. E2M1 is sign and magnitude and
    keeps the sign of a zero (-0.0 and -0.2 are code 8); int4 is two's complement in [-8, 7].
    """
    exact = values.astype(np.float64)
    if element in ("int4", "uint4"):
        low, high = (-8, 7) if element == "int4" else (0, 15)
        rounded = np.clip(np.rint(exact), low, high).astype(np.int64)
        return (rounded & 0xF).astype(np.uint8)
    table = make_value_table(element)
    sign_bit = len(table) // 2
    magnitude = encode_nearest_magnitude(np.abs(exact), table[:sign_bit])
    return np.where(np.signbit(exact), magnitude + sign_bit, magnitude).astype(np.uint8)


def encode_nearest_magnitude(magnitudes: Float64Array, table: Float64Array) -> ByteArray:
    """Return the index of the nearest entry of the ascending `table`; ties to the even index.

    An even index is an even mantissa, because mantissa bits are the low bits of a code. NaN at
    the end of the table (E4M3) is never chosen: magnitudes above the largest number saturate.
    """
    finite = table[np.isfinite(table)]
    clamped = np.minimum(magnitudes, finite[-1])
    distance = np.abs(clamped[..., None] - finite)
    nearest = distance.argmin(axis=-1)  # the lower index of a tie
    above = np.minimum(nearest + 1, len(finite) - 1)
    is_tie = (
        np.take_along_axis(distance, above[..., None], -1)[..., 0]
        == np.take_along_axis(distance, nearest[..., None], -1)[..., 0]
    )
    is_odd = nearest % 2 == 1
    indices: ByteArray = np.where(is_tie & is_odd, above, nearest).astype(np.uint8)
    return indices


def _encode_scales(
    activation: ActivationFormat, amax: Float32Array, unrounded: Float32Array, g: np.float32
) -> tuple[ByteArray | None, Float64Array, npt.NDArray[np.bool_]]:
    """Return (scale bytes or None, exact stored scales, which blocks are saturated)."""
    scale = activation.block_format.scale
    if scale == "float":
        stored, saturated = _round_float_scale(unrounded, activation.scale_dtype or "float32")
        return None, stored, saturated
    if scale == "e8m0":
        _, exponent = np.frexp(amax)  # amax = m * 2^exponent with m in [0.5, 1)
        biased = exponent - 1 - _E2M1_MAX_EXPONENT + 127
        scale_bytes = np.where(amax == 0, 0, np.clip(biased, 0, 254)).astype(np.uint8)
        return scale_bytes, make_value_table("e8m0")[scale_bytes], biased > 254
    wanted = (unrounded / g).astype(np.float32)
    table = make_value_table("e4m3")
    scale_bytes = encode_nearest_magnitude(wanted.astype(np.float64), table[:128])
    return scale_bytes, table[scale_bytes], wanted > np.float32(_E4M3_MAX)


def _round_float_scale(
    unrounded: Float32Array, dtype: str
) -> tuple[Float64Array, npt.NDArray[np.bool_]]:
    """Return (scales rounded to `dtype` to nearest even and saturating, which ones saturated)."""
    largest = {"float16": _FLOAT16_MAX, "bfloat16": _BFLOAT16_MAX, "float32": _FLOAT32_MAX}[dtype]
    saturated = unrounded > np.float32(largest)
    clamped = np.minimum(unrounded, np.float32(largest))
    if dtype == "float16":
        rounded = clamped.astype(np.float16).astype(np.float64)
    elif dtype == "bfloat16":  # keep the upper 16 bits, round half to even on the lower ones
        words = clamped.view(np.uint32)
        words = words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))
        rounded = (words & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    else:
        rounded = clamped.astype(np.float64)
    return rounded, saturated


def check_input(x: torch.Tensor, linear: QuantizedLinear) -> None:
    """Raise FormatError unless x is [M, linear.in_features]."""
    if x.ndim != 2 or x.shape[1] != linear.in_features:
        raise FormatError(f"x: shape {tuple(x.shape)}, wanted [M, {linear.in_features}]")
