"""E8M0, the power-of-two block scale of MX formats, and the four ways in use to choose it.

Byte b means 2**(b - 127); 0xFF is NaN; there is no zero (OCP MX v1.0, section 5.4.1).
"""

from typing import Literal, get_args

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.elements import ElementFormat, get_element

E8M0_BIAS = 127
E8M0_NAN = 0xFF
E8M0_MAX = 0xFE  # 2**127

E8M0Rounding = Literal["floor", "ceil", "even", "rceil"]
E8M0_ROUNDINGS: tuple[str, ...] = get_args(E8M0Rounding)

_F32_MANTISSA_BITS = 23
_F32_HALF_NORMAL = 1 << 22  # bits of 2**-127
_F32_MANTISSA_MASK = (1 << _F32_MANTISSA_BITS) - 1


def choose_e8m0(
    amax: torch.Tensor, element: ElementFormat | str, rounding: str = "floor"
) -> torch.Tensor:
    """Return the shared scale byte of each block: uint8, same shape as `amax`.

    With e = `element.max_exponent` and `max` the element's largest number, the exponent is
    floor: floor(log2(amax)) - e (OCP MX v1.0, 6.3: the largest may saturate);
    ceil: ceil(log2(amax)) - e;
    even: as floor, after rounding amax to the element's mantissa bits (half upwards);
    rceil: ceil(log2(amax / max)), amax / max in float32: nothing saturates.
    Exponents are clamped to [-127, 127]; a zero block gets byte 0; a NaN or infinite amax 0xFF.

    Args:
        amax: float32, the largest magnitude of each block.
        element: the element format or its name.
        rounding: "floor", "ceil", "even" or "rceil".

    Raises:
        FormatError: an unknown rounding, or `amax` is not float32.
    """
    element = get_element(element) if isinstance(element, str) else element
    if rounding not in E8M0_ROUNDINGS:
        known = ", ".join(E8M0_ROUNDINGS)
        raise FormatError(f"e8m0_rounding {rounding!r} is unknown; use one of: {known}")
    if amax.dtype != torch.float32:
        raise FormatError(f"amax: dtype {amax.dtype}, wanted torch.float32")
    value = amax / element.max_value if rounding == "rceil" else amax
    bits = value.contiguous().view(torch.int32)
    if rounding == "even":
        bits = bits + (1 << (_F32_MANTISSA_BITS - element.mantissa_bits - 1))
    exponents = (bits >> _F32_MANTISSA_BITS) & 0xFF
    if rounding in ("ceil", "rceil"):
        # A subnormal number up to 2**-127 stays below the smallest scale: nothing to round up.
        exponents = exponents + (((bits & _F32_MANTISSA_MASK) != 0) & (bits > _F32_HALF_NORMAL))
    if rounding != "rceil":
        exponents = exponents - element.max_exponent
    scales = exponents.clamp_(0, E8M0_MAX)
    scales.masked_fill_(~amax.isfinite(), E8M0_NAN)
    return scales.to(torch.uint8)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales that the bytes mean: float32, same shape; byte 0 is the subnormal 2**-127.

    Args:
        scales: uint8 or float8_e8m0fnu.

    Raises:
        FormatError: another dtype.
    """
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)
    if scales.dtype != torch.uint8:
        raise FormatError(f"scales: dtype {scales.dtype}, wanted uint8 or float8_e8m0fnu")
    bits = scales.to(torch.int32) << _F32_MANTISSA_BITS
    bits.masked_fill_(scales == 0, 1 << (_F32_MANTISSA_BITS - 1))
    bits.masked_fill_(scales == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)
