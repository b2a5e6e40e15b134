"""cvt between integers and floating-point formats, by way of exact numbers."""

from fractions import Fraction

from halfbyte.virtual.interpreter.floats import check_modifiers, saturate
from halfbyte.virtual.interpreter.integers import limits, value_of
from halfbyte.virtual.interpreter.numbers import (
    BF16,
    F32,
    F64,
    FORMATS,
    Format,
    Number,
    clamp,
    decode,
    encode,
    finite,
    round_to_integer,
    wrap,
)

INTEGER_ROUNDINGS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp")


def convert(opcode: tuple[str, ...], source: int) -> int:
    """Return the pattern of a conversion of one value.

    Args:
        opcode: the words, e.g. ("cvt", "rzi", "sat", "s32", "f32").
        source: the pattern of the operand, at least as wide as its type.
    """
    target, origin, modifiers = opcode[-2], opcode[-1], opcode[1:-2]
    check_modifiers(modifiers, {*FLOAT_ROUNDINGS, *INTEGER_ROUNDINGS, "ftz", "sat", "relu"})
    if origin not in FORMATS:
        value = value_of(source, origin)
        if target not in FORMATS:
            result = clamp(value, *limits(target)) if "sat" in modifiers else value
            return wrap(result, int(target[1:]))
        number = finite(Fraction(value))
        return _encode_result(number, modifiers, FORMATS[target])
    form = FORMATS[origin]
    source = wrap(source, form.bits)
    is_bfloat = origin == "bf16" and target == "f32"
    number = decode(source, form, "ftz" in modifiers and (form is F32 or is_bfloat))
    integral = next((INTEGER_ROUNDINGS[m] for m in modifiers if m in INTEGER_ROUNDINGS), None)
    if target not in FORMATS:
        return _to_integer(number, integral or "rz", target, form)
    if integral and number.kind == "finite":
        number = finite(Fraction(round_to_integer(number.value, integral)), number.is_negative)
    if number.is_nan and "sat" not in modifiers:
        return _convert_nan(source, form, FORMATS[target], "ftz" in modifiers)
    return _encode_result(number, modifiers, FORMATS[target])


def _encode_result(number: Number, modifiers: tuple[str, ...], form: Format) -> int:
    if "sat" in modifiers:
        number = saturate(number)
    if "relu" in modifiers and number.is_negative:
        number = finite(Fraction(0))
    rounding = next((word for word in modifiers if word in FLOAT_ROUNDINGS), "rn")
    return encode(number, form, rounding, "ftz" in modifiers and form is F32)


def _to_integer(number: Number, rounding: str, target: str, form: Format) -> int:
    low, high = limits(target)
    width = int(target[1:])
    if number.is_nan:
        return 1 << (width - 1) if form is F64 or width == 64 else 0
    if number.kind == "infinity":
        return wrap(low if number.is_negative else high, width)
    return wrap(clamp(round_to_integer(number.value, rounding), low, high), width)


def _convert_nan(source: int, form: Format, target: Format, flushes: bool) -> int:
    """Return the NaN of a conversion: f64 keeps sign and payload, other pairs are canonical."""
    if form is F64:
        payload = source & ((1 << 52) - 1)
        sign = source >> 63 << (target.bits - 1)
        quiet = 1 << (target.mantissa_bits - 1)
        return sign | target.infinity | quiet | payload >> (52 - target.mantissa_bits)
    if target is F64:
        pattern = F32.nan if flushes or form is not F32 else source
        sign = pattern >> 31 << 63
        return sign | F64.infinity | 1 << 51 | (pattern & 0x7FFFFF) << 29
    if form is BF16 and target is F32 and not flushes:
        return source << 16
    return target.nan


def pack(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return cvt.pack: b, then a, saturated to a narrow type from the lowest bits, then c."""
    kind = opcode[3]
    bits = int(kind[1:])
    a, b = (wrap(clamp(value_of(s, "s32"), *limits(kind)), bits) for s in sources[:2])
    rest = sources[2] if len(sources) > 2 else 0
    return wrap(b | a << bits | rest << (2 * bits), 32)
