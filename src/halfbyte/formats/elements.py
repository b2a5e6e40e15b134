"""Element codecs: float32 numbers to stored codes and back, bit-exact, in plain torch.

Layouts of the codes: OCP Microscaling Formats (MX) v1.0, section 5.3, and OCP 8-bit floating point
(OFP8) v1.0. Rounding is to nearest, ties to the even code; finite values and infinities beyond the
largest number saturate; the sign of zero is kept.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from halfbyte.errors import FormatError

_F32_MANTISSA_BITS = 23
_F32_BIAS = 127


@dataclass(frozen=True)
class ElementFormat:
    """One stored element: its bits and the numbers they mean.

    Attributes:
        name: the name used by `BlockFormat.element`.
        kind: "float" (sign, exponent, mantissa), "int" (two's complement) or "uint".
        bits: all bits of one code.
        exponent_bits: exponent field of a float, else 0.
        mantissa_bits: mantissa field of a float, else 0.
        bias: exponent bias of a float, else 0.
        max_value: the largest finite number.
        nan_code: the positive code that encoding a NaN gives, or None where there is no NaN.
        inf_code: the positive infinity (decoded, never encoded), or None.
    """

    name: str
    kind: Literal["float", "int", "uint"]
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    nan_code: int | None = None
    inf_code: int | None = None

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest power of two that is a finite number (2 for E2M1)."""
        return int(self.max_value).bit_length() - 1

    @property
    def min_value(self) -> float:
        """The most negative number."""
        if self.kind == "int":
            return -self.max_value - 1
        return 0.0 if self.kind == "uint" else -self.max_value


_ELEMENTS = (
    ElementFormat("e2m1", "float", 4, 2, 1, 1, 6.0),
    ElementFormat("e2m3", "float", 6, 2, 3, 1, 7.5),
    ElementFormat("e3m2", "float", 6, 3, 2, 3, 28.0),
    ElementFormat("e4m3", "float", 8, 4, 3, 7, 448.0, nan_code=0x7F),
    ElementFormat("e5m2", "float", 8, 5, 2, 15, 57344.0, nan_code=0x7E, inf_code=0x7C),
    ElementFormat("int4", "int", 4, 0, 0, 0, 7.0),
    ElementFormat("uint4", "uint", 4, 0, 0, 0, 15.0),
)
ELEMENTS: dict[str, ElementFormat] = {record.name: record for record in _ELEMENTS}


def get_element(name: str) -> ElementFormat:
    """Return the element format called `name`; FormatError lists the known names."""
    try:
        return ELEMENTS[name]
    except KeyError:
        known = ", ".join(ELEMENTS)
        raise FormatError(f"element {name!r} is unknown; use one of: {known}") from None


def encode_elements(values: torch.Tensor, element: ElementFormat | str) -> torch.Tensor:
    """Return the codes of `values`: uint8, same shape, one code a byte (not packed).

    Args:
        values: float32, any shape and strides, already divided by their scale.
        element: the element format or its name.

    Raises:
        FormatError: `values` is not float32, or holds a NaN that the element cannot say.
    """
    element = get_element(element) if isinstance(element, str) else element
    if values.dtype != torch.float32:
        raise FormatError(f"values: dtype {values.dtype}, wanted torch.float32")
    if element.nan_code is None:
        num_nan = int(values.isnan().sum())
        if num_nan:
            raise FormatError(f"values: {num_nan} NaN, but {element.name} has no NaN; remove them")
    if element.kind == "float":
        return _encode_float(values, element)
    codes = values.round().clamp_(element.min_value, element.max_value)
    return codes.to(torch.int8).view(torch.uint8).bitwise_and_(0x0F)


def _encode_float(values: torch.Tensor, element: ElementFormat) -> torch.Tensor:
    magnitude = values.abs().clamp_(max=element.max_value)  # clamp keeps NaN
    bits = magnitude.view(torch.int32)
    # Below the smallest normal number the codes are equally spaced: adding a power of two whose
    # own spacing equals theirs lets the float32 adder round to nearest even.
    magic_exponent = _F32_MANTISSA_BITS + 1 - element.bias - element.mantissa_bits
    subnormal = (magnitude + 2.0**magic_exponent).view(torch.int32)
    subnormal -= (magic_exponent + _F32_BIAS) << _F32_MANTISSA_BITS
    # Elsewhere: drop mantissa bits, ties to even, and move the exponent bias.
    shift = _F32_MANTISSA_BITS - element.mantissa_bits
    codes = bits >> shift
    codes &= 1
    codes += bits
    codes += (1 << (shift - 1)) - 1
    codes >>= shift
    codes -= (_F32_BIAS - element.bias) << element.mantissa_bits
    codes = torch.where(magnitude < 2.0 ** (1 - element.bias), subnormal, codes)
    if element.nan_code is not None:
        codes.masked_fill_(values.isnan(), element.nan_code)
    codes |= values.signbit().to(torch.int32) << (element.bits - 1)
    return codes.to(torch.uint8)


def decode_elements(codes: torch.Tensor, element: ElementFormat | str) -> torch.Tensor:
    """Return the numbers that `codes` mean: float32, same shape.

    Args:
        codes: uint8, any shape, one code a byte; bits above `element.bits` must be zero.
        element: the element format or its name.

    Raises:
        FormatError: `codes` is not uint8 or holds a byte that is no code of the element.
    """
    element = get_element(element) if isinstance(element, str) else element
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes: dtype {codes.dtype}, wanted torch.uint8")
    if element.bits < 8 and codes.numel() and int(codes.max()) >= 1 << element.bits:
        raise FormatError(
            f"codes: byte {int(codes.max()):#04x} is no {element.bits}-bit {element.name} code; "
            "unpack the tensor first"
        )
    return decode_table(element.name).to(codes.device)[codes.to(torch.int32)]


@cache
def encode_scalar(value: float, element: ElementFormat | str) -> int:
    """Return the code of one number (first rounded to float32)."""
    return int(encode_elements(torch.tensor([value], dtype=torch.float32), element)[0])


def decode_scalar(code: int, element: ElementFormat | str) -> float:
    """Return the number that one code means."""
    return float(decode_elements(torch.tensor([code], dtype=torch.uint8), element)[0])


@cache
def decode_table(name: str) -> torch.Tensor:
    """Return all numbers of an element by code: [2**bits] float32. Do not write into it."""
    element = get_element(name)
    return torch.tensor([_decode_one(code, element) for code in range(1 << element.bits)])


def _decode_one(code: int, element: ElementFormat) -> float:
    if element.kind == "uint":
        return float(code)
    sign_bit = 1 << (element.bits - 1)
    if element.kind == "int":
        return float(code - 2 * (code & sign_bit))
    sign = -1.0 if code & sign_bit else 1.0
    magnitude = code & (sign_bit - 1)
    if element.inf_code is not None and magnitude >= element.inf_code:
        return sign * (float("inf") if magnitude == element.inf_code else float("nan"))
    if element.nan_code is not None and magnitude >= element.nan_code:
        return float("nan")
    exponent = magnitude >> element.mantissa_bits
    mantissa = magnitude & ((1 << element.mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - element.bias - element.mantissa_bits)
    fraction = 1 + mantissa / (1 << element.mantissa_bits)
    return float(sign * fraction * 2.0 ** (exponent - element.bias))
