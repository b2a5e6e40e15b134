"""Bytes of every block-scaled format to float64, written from the formats' definitions.

A stored row is one little-endian bit stream: code i of a row takes bits [i*b, (i+1)*b) of it,
least significant bit first, where b is 4, 6 or 8. For b = 4 that is "the low nibble holds the
even column". The value of an element is `code value * block scale * global scale`.

Minifloats are S.E.M with exponent bias 2^(e-1) - 1 and subnormals. Specials: E4M3 (the "fn"
variant of OCP OFP8) has no infinity and NaN at S.1111.111; E5M2 follows IEEE 754; E2M1, E2M3 and
E3M2 have neither infinity nor NaN (OCP MX v1.0, section 5.3). E8M0 byte b is 2^(b - 127), 255 NaN.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor

Float64Array = npt.NDArray[np.float64]
ByteArray = npt.NDArray[np.uint8]

# (exponent bits, mantissa bits) of each minifloat element.
_MINIFLOATS: Final = {
    "e2m1": (2, 1),
    "e2m3": (2, 3),
    "e3m2": (3, 2),
    "e4m3": (4, 3),
    "e5m2": (5, 2),
}
_E8M0_BIAS: Final = 127  # OCP MX v1.0, section 5.4.1
_E8M0_NAN: Final = 255


def decode_minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Return the value of one S.E.M code, all codes finite: (-1)^S * 2^(E-bias) * (1 + M/2^m)."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:  # subnormal: no hidden one, the exponent of the smallest normal
        return float(sign * 2.0 ** (1 - bias) * fraction)
    return float(sign * 2.0 ** (exponent - bias) * (1.0 + fraction))


def _decode_element(element: str, code: int) -> float:
    if element == "int4":  # two's complement
        return float(code - 16 if code >= 8 else code)
    if element == "uint4":
        return float(code)
    exponent_bits, mantissa_bits = _MINIFLOATS[element]
    if element == "e4m3" and code & 0x7F == 0x7F:
        return float("nan")
    if element == "e5m2" and code & 0x7C == 0x7C:
        is_infinity = code & 0x03 == 0
        sign = -1.0 if code & 0x80 else 1.0
        return sign * float("inf") if is_infinity else float("nan")
    return decode_minifloat(code, exponent_bits, mantissa_bits)


def make_value_table(element: str) -> Float64Array:
    """Return the [2^bits] float64 values of every code of `element`, in code order.

    `element` is an element name of `formats.block_format`, or "e8m0" for the MX block scale.
    """
    if element == "e8m0":
        values = [2.0 ** (byte - _E8M0_BIAS) for byte in range(_E8M0_NAN)]
        return np.array([*values, np.nan], dtype=np.float64)
    bits = 4 if element in ("int4", "uint4") else 1 + sum(_MINIFLOATS[element])
    return np.array([_decode_element(element, code) for code in range(1 << bits)], dtype=np.float64)


def read_bytes(tensor: torch.Tensor) -> ByteArray:
    """Return the bytes of `tensor` in row-major order: [*shape[:-1], shape[-1] * itemsize] uint8.

    A scalar gives [itemsize]. This is the only door between torch tensors and this folder.
    """
    # a clone: contiguous() may leave any stride in a dimension of size 1, which view() refuses
    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if plain.ndim == 0:
        plain = plain.reshape(1)
    if plain.numel() == 0:
        width = plain.shape[-1] * plain.element_size()
        return np.empty((*plain.shape[:-1], width), dtype=np.uint8)
    return plain.view(torch.uint8).numpy()


def read_floats(tensor: torch.Tensor) -> Float64Array:
    """Return the exact float64 values of a float16, bfloat16 or float32 tensor, same shape.

    FormatError for any other dtype: a byte-wide float is read through its format's name.
    """
    raw = read_bytes(tensor)
    if tensor.dtype == torch.float32:
        values = raw.view(np.float32).astype(np.float64)
    elif tensor.dtype == torch.float16:
        values = raw.view(np.float16).astype(np.float64)
    elif tensor.dtype == torch.bfloat16:  # the upper half of a float32
        words = raw.view(np.uint16).astype(np.uint32) << np.uint32(16)
        values = words.view(np.float32).astype(np.float64)
    else:
        raise FormatError(f"dtype {tensor.dtype}: wanted float16, bfloat16 or float32")
    return values.reshape(tuple(tensor.shape))


def unpack_codes(data: ByteArray, element_bits: int) -> ByteArray:
    """Return the codes of packed rows: data [rows, bytes] uint8 -> [rows, bytes*8/bits] uint8."""
    rows, num_bytes = data.shape
    num_codes = num_bytes * 8 // element_bits
    bits = np.unpackbits(data, axis=1, bitorder="little")
    groups = bits.reshape(rows, num_codes, element_bits)
    weights = (1 << np.arange(element_bits)).astype(np.uint8)
    codes: ByteArray = (groups * weights).sum(axis=2, dtype=np.uint8)
    return codes


def decode_code_values(tensor: BlockScaledTensor) -> Float64Array:
    """Return the element values without scales, padding included: [rows, padded_columns] f64."""
    table = make_value_table(tensor.format.element)
    return table[unpack_codes(read_bytes(tensor.data), tensor.format.element_bits)]


def decode_scales(tensor: BlockScaledTensor) -> Float64Array:
    """Return the block scales times the global scale: [rows, num_blocks] float64."""
    if tensor.format.scale == "float":
        scales = read_floats(tensor.scales)
    else:
        scales = make_value_table(tensor.format.scale)[read_bytes(tensor.scales)]
    if tensor.global_scale is not None:
        scales = scales * read_floats(tensor.global_scale)
    return scales


def dequantize(tensor: BlockScaledTensor) -> Float64Array:
    """Return the logical [rows, columns] float64 matrix of a block-scaled tensor."""
    scales = np.repeat(decode_scales(tensor), tensor.format.block_size, axis=1)
    return (decode_code_values(tensor) * scales)[:, : tensor.columns]
