"""Rounding of exact rational numbers into binary formats, from the definition.

Nothing here looks like the core: values are fractions, and every result is found by dividing by the
last place and comparing the remainder. Slow, and meant to be.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

NAN = "nan"
INFINITY = "inf"
NEGATIVE_INFINITY = "-inf"


@dataclass(frozen=True)
class Format:
    """A binary format with IEEE infinities and NaN; `nan` is what a NaN result looks like."""

    exponent_bits: int
    mantissa_bits: int
    nan: int

    @property
    def bias(self) -> int:
        """The exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """The code of +infinity."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        """The sign bit alone."""
        return 1 << (self.exponent_bits + self.mantissa_bits)


F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
TF32 = Format(8, 10, 0x3FFFF)
F32 = Format(8, 23, 0x7FFFFFFF)
F64 = Format(11, 52, 0xFFF8000000000000)


def decode(code: int, form: Format) -> Fraction | str:
    """Return the value of a code: a fraction, or NAN, INFINITY, NEGATIVE_INFINITY."""
    magnitude = code & (form.sign_bit - 1)
    sign = -1 if code & form.sign_bit else 1
    if magnitude > form.infinity:
        return NAN
    if magnitude == form.infinity:
        return INFINITY if sign > 0 else NEGATIVE_INFINITY
    exponent = magnitude >> form.mantissa_bits
    mantissa = magnitude & ((1 << form.mantissa_bits) - 1)
    if exponent:
        mantissa += 1 << form.mantissa_bits
    power = max(exponent, 1) - form.bias - form.mantissa_bits
    return sign * mantissa * Fraction(2) ** power


def is_negative(code: int, form: Format) -> bool:
    """Return whether the sign bit is set."""
    return bool(code & form.sign_bit)


def round_nonzero(value: Fraction, form: Format, mode: str) -> int:
    """Return the code of a value that is not zero, rounded by `mode` (rn rz rm rp rna)."""
    negative = value < 0
    magnitude = abs(value)
    smallest = 1 - form.bias
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent += 0 if magnitude >= Fraction(2) ** exponent else -1
    last_place = Fraction(2) ** (max(exponent, smallest) - form.mantissa_bits)
    quotient = magnitude / last_place
    kept = math.floor(quotient)
    rest = quotient - kept
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and kept % 2 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    code = kept + up + ((max(exponent, smallest) - smallest) << form.mantissa_bits)
    if code >= form.infinity:
        stays = mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
        code = form.infinity - 1 if stays else form.infinity
    return code | (form.sign_bit if negative else 0)


def encode(value: Fraction | str, form: Format, mode: str, zero_is_negative: bool = False) -> int:
    """Return the code of any value; the sign of an exact zero is the caller's to know."""
    if value == NAN:
        return form.nan
    if value in (INFINITY, NEGATIVE_INFINITY):
        return form.infinity | (form.sign_bit if value == NEGATIVE_INFINITY else 0)
    assert isinstance(value, Fraction)
    if value == 0:
        return form.sign_bit if zero_is_negative else 0
    return round_nonzero(value, form, mode)


def fma_code(a: int, b: int, c: int, form: Format, mode: str, sources: Format | None = None) -> int:
    """Return a * b + c of three codes, rounded once; `sources` is the format of a and b."""
    first = sources or form
    x, y, z = decode(a, first), decode(b, first), decode(c, form)
    product_negative = is_negative(a, first) != is_negative(b, first)
    if NAN in (x, y, z):
        return form.nan
    infinite = (INFINITY, NEGATIVE_INFINITY)
    if x in infinite or y in infinite:
        if x == 0 or y == 0:
            return form.nan
        product: Fraction | str = NEGATIVE_INFINITY if product_negative else INFINITY
        if z in infinite and z != product:
            return form.nan
        return encode(product, form, mode)
    if z in infinite:
        return encode(z, form, mode)
    assert isinstance(x, Fraction)
    assert isinstance(y, Fraction)
    assert isinstance(z, Fraction)
    total = x * y + z
    if total == 0 and product_negative == is_negative(c, form):
        return form.sign_bit if product_negative else 0  # both addends are zeros of one sign,
    return encode(total, form, mode, zero_is_negative=mode == "rm")  # or cancel


def add_code(a: int, b: int, form: Format, mode: str) -> int:
    """Return a + b of two codes, rounded once."""
    one = form.bias << form.mantissa_bits
    return fma_code(a, one, b, form, mode)


def mul_code(a: int, b: int, form: Format, mode: str) -> int:
    """Return a * b of two codes, rounded once."""
    zero = form.sign_bit if is_negative(a, form) != is_negative(b, form) else 0
    return fma_code(a, b, zero, form, mode)


def div_code(a: int, b: int, form: Format, mode: str) -> int:
    """Return a / b of two codes, rounded once."""
    x, y = decode(a, form), decode(b, form)
    negative = is_negative(a, form) != is_negative(b, form)
    sign = form.sign_bit if negative else 0
    infinite = (INFINITY, NEGATIVE_INFINITY)
    if NAN in (x, y) or (x in infinite and y in infinite) or (x == 0 and y == 0):
        return form.nan
    if x in infinite or y == 0:
        return form.infinity | sign
    if y in infinite or x == 0:
        return sign
    assert isinstance(x, Fraction)
    assert isinstance(y, Fraction)
    return round_nonzero(x / y, form, mode)


def sqrt_code(a: int, form: Format, mode: str) -> int:
    """Return the square root of a code, rounded once."""
    x = decode(a, form)
    if x in (NAN, NEGATIVE_INFINITY) or (x != 0 and is_negative(a, form)):
        return form.nan
    if x in (0, INFINITY):
        return a
    assert isinstance(x, Fraction)
    # Enough bits that the floor of the root, marked when inexact, rounds as the root does.
    shift = 2 * (form.mantissa_bits + 8) + 2 * max(0, form.bias)
    scaled = x * (1 << (2 * shift))
    root = math.isqrt(math.floor(scaled))
    is_exact = Fraction(root * root) == scaled
    return round_nonzero(Fraction(2 * root + (not is_exact), 2 << shift), form, mode)


def flush_code(code: int, form: Format) -> int:
    """Return the code with a subnormal replaced by the zero of its sign."""
    magnitude = code & (form.sign_bit - 1)
    return code & form.sign_bit if magnitude < 1 << form.mantissa_bits else code


def saturate_code(code: int, form: Format) -> int:
    """Return the code of the value moved into [0, 1]; NaN becomes +0."""
    value = decode(code, form)
    if value in (NAN, NEGATIVE_INFINITY) or is_negative(code, form):
        return 0
    one = form.bias << form.mantissa_bits
    return min(code, one)
