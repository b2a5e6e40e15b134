"""Bit patterns as numbers and back: two's complement integers, IEEE formats as rationals."""

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

Rounding = str  # rn, rz, rm, rp, rna


def wrap(value: int, bits: int) -> int:
    """Return the low `bits` bits of `value`, not negative."""
    return value & ((1 << bits) - 1)


def to_signed(value: int, bits: int) -> int:
    """Return the two's complement value of a pattern of `bits` bits."""
    value = wrap(value, bits)
    return value - (1 << bits) if value >> (bits - 1) else value


def clamp(value: int, low: int, high: int) -> int:
    """Return the number of [low, high] nearest to `value`."""
    return max(low, min(high, value))


@dataclass(frozen=True)
class Format:
    """A binary floating-point format with subnormals, infinities and NaN."""

    exponent_bits: int
    mantissa_bits: int
    nan: int  # the pattern that arithmetic gives

    @property
    def bits(self) -> int:
        """Bits of a pattern."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """Pattern of +infinity."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive normal number."""
        return power_of_two(1 - self.bias)


F16 = Format(5, 10, 0x7FFF)
BF16 = Format(8, 7, 0x7FFF)
F32 = Format(8, 23, 0x7FFFFFFF)
F64 = Format(11, 52, 0xFFF8000000000000)
TF32 = Format(8, 10, 0x3FFFF)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


@dataclass(frozen=True)
class Number:
    """A floating-point value: finite ones are rationals, zeros keep their sign."""

    kind: str  # finite, infinity, nan
    is_negative: bool = False
    value: Fraction = Fraction(0)

    @property
    def is_nan(self) -> bool:
        """Whether this is no number."""
        return self.kind == "nan"

    @property
    def is_zero(self) -> bool:
        """Whether this is a zero of either sign."""
        return self.kind == "finite" and self.value == 0


NAN = Number("nan")


def power_of_two(exponent: int) -> Fraction:
    """Return 2**exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def decode(bits: int, form: Format, flushes: bool = False) -> Number:
    """Return the value of a pattern; with `flushes`, a subnormal counts as zero."""
    is_negative = bool(bits >> (form.bits - 1) & 1)
    exponent = bits >> form.mantissa_bits & ((1 << form.exponent_bits) - 1)
    mantissa = bits & ((1 << form.mantissa_bits) - 1)
    if exponent == (1 << form.exponent_bits) - 1:
        return Number("nan") if mantissa else Number("infinity", is_negative)
    if exponent == 0 and flushes:
        mantissa = 0
    significand = mantissa | ((1 << form.mantissa_bits) if exponent else 0)
    scale = power_of_two(max(exponent, 1) - form.bias - form.mantissa_bits)
    value = significand * scale
    return Number("finite", is_negative, -value if is_negative else value)


def finite(value: Fraction, zero_is_negative: bool = False) -> Number:
    """Return a finite number; the sign of a zero is given."""
    return Number("finite", value < 0 if value else zero_is_negative, value)


def _floor_log2(value: Fraction) -> int:
    """Return the exponent of the largest power of two that is not above a positive value."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if power_of_two(guess) <= value else guess - 1


def _round_integer(value: Fraction, is_negative: bool, rounding: Rounding) -> int:
    """Return a magnitude rounded to an integer; the sign decides for rm and rp."""
    whole, rest = divmod(value, 1)
    whole = int(whole)
    half = Fraction(1, 2)
    up = {
        "rn": rest > half or (rest == half and whole % 2 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": rest > 0 and is_negative,
        "rp": rest > 0 and not is_negative,
    }[rounding]
    return whole + int(up)


def round_to_integer(value: Fraction, rounding: Rounding) -> int:
    """Return a rational rounded to an integer."""
    magnitude = _round_integer(abs(value), value < 0, rounding)
    return -magnitude if value < 0 else magnitude


def encode(number: Number, form: Format, rounding: Rounding = "rn", flushes: bool = False) -> int:
    """Return the pattern of a value rounded once; NaN is the format's own.

    With `flushes`, what is below the normal numbers before rounding becomes zero.
    """
    if number.is_nan:
        return form.nan
    sign = int(number.is_negative) << (form.bits - 1)
    if number.kind == "infinity":
        return sign | form.infinity
    magnitude = abs(number.value)
    if magnitude == 0 or (flushes and magnitude < form.smallest_normal):
        return sign
    exponent = max(_floor_log2(magnitude), 1 - form.bias)
    unit = power_of_two(exponent - form.mantissa_bits)
    significand = _round_integer(magnitude / unit, number.is_negative, rounding)
    # A significand that reached the next power of two carries into the exponent field by itself.
    code = ((exponent + form.bias - 1) << form.mantissa_bits) + significand
    if code >= form.infinity:
        stays = rounding == "rz" or rounding == ("rp" if number.is_negative else "rm")
        code = form.infinity - 1 if stays else form.infinity
    return sign | code


def square_root(value: Fraction) -> Fraction:
    """Return a root exact, or close enough that any format here rounds it as the true one.

    An inexact root is known to 200 bits and lies strictly between two such multiples, so it is
    given as the one below plus half a unit: on no rounding boundary of any format.
    """
    scale = 400 - 2 * (_floor_log2(value) // 2) if value else 0
    scaled = value * power_of_two(scale)
    root = isqrt(int(scaled))
    is_exact = Fraction(root * root) == scaled
    result = Fraction(root) if is_exact else root + Fraction(1, 2)
    return result * power_of_two(-(scale // 2))


def compare(first: Number, second: Number) -> int | None:
    """Return -1, 0 or 1 as first is below, equal to or above second; None where one is NaN."""
    if first.is_nan or second.is_nan:
        return None
    keys = [_order_key(number) for number in (first, second)]
    return (keys[0] > keys[1]) - (keys[0] < keys[1])


def _order_key(number: Number) -> tuple[int, Fraction]:
    if number.kind == "infinity":
        return (-1 if number.is_negative else 1, Fraction(0))
    return (0, number.value)
