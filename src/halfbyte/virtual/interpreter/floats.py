"""Floating-point arithmetic on numbers: sums, products, quotients, roots, minima."""

from fractions import Fraction

from halfbyte.virtual.interpreter.numbers import (
    F32,
    F64,
    FORMATS,
    NAN,
    Format,
    Number,
    compare,
    decode,
    encode,
    finite,
    square_root,
)

# The NaN of elements outside a tensor, of either sign: fma.oob gives zero for it (an H200).
OUT_OF_BOUNDS = 0x7FF7
ROUNDINGS = ("rn", "rz", "rm", "rp")


def add(a: Number, b: Number, rounding: str) -> Number:
    """Return the exact sum; a zero sum of opposite signs is -0 only in rounding mode rm."""
    if a.is_nan or b.is_nan:
        return NAN
    if a.kind == "infinity" or b.kind == "infinity":
        if a.kind == b.kind and a.is_negative != b.is_negative:
            return NAN
        return a if a.kind == "infinity" else b
    total = a.value + b.value
    if total == 0 and a.is_zero and b.is_zero and a.is_negative == b.is_negative:
        return finite(total, a.is_negative)
    return finite(total, rounding == "rm")


def multiply(a: Number, b: Number) -> Number:
    """Return the exact product."""
    if a.is_nan or b.is_nan:
        return NAN
    is_negative = a.is_negative != b.is_negative
    if "infinity" in (a.kind, b.kind):
        return NAN if a.is_zero or b.is_zero else Number("infinity", is_negative)
    return finite(a.value * b.value, is_negative)


def divide(a: Number, b: Number) -> Number:
    """Return the exact quotient; x / 0 is an infinity, 0 / 0 NaN."""
    if a.is_nan or b.is_nan or (a.kind == b.kind == "infinity") or (a.is_zero and b.is_zero):
        return NAN
    is_negative = a.is_negative != b.is_negative
    if a.kind == "infinity" or b.is_zero:
        return Number("infinity", is_negative)
    if b.kind == "infinity":
        return finite(Fraction(0), is_negative)
    return finite(a.value / b.value, is_negative)


def root(a: Number) -> Number:
    """Return the square root; that of -0 is -0, that of what is below NaN."""
    if a.is_nan or (a.is_negative and not a.is_zero):
        return NAN
    if a.kind == "infinity" or a.is_zero:
        return a
    return finite(square_root(a.value))


def negate(a: Number) -> Number:
    """Return -a."""
    return Number(a.kind, not a.is_negative, -a.value)


def extreme(a: Number, b: Number, is_max: bool) -> Number:
    """Return the smaller or larger of two numbers that are not NaN; -0 is below +0."""
    order = compare(a, b)
    if order == 0:
        return a if a.is_negative != is_max else b
    return a if (order == 1) == is_max else b


def saturate(a: Number) -> Number:
    """Return `a` moved into [0, 1]; NaN becomes +0."""
    if a.is_nan or a.is_negative or a.is_zero:
        return finite(Fraction(0))
    if a.kind == "infinity" or a.value > 1:
        return finite(Fraction(1))
    return a


MODIFIERS = {*ROUNDINGS, "ftz", "sat", "relu", "oob"}
EXTREME_MODIFIERS = {"ftz", "NaN", "xorsign", "abs"}


def check_modifiers(modifiers: tuple[str, ...], known: set[str]) -> None:
    """Raise ValueError for a word that would otherwise be passed over."""
    strange = set(modifiers) - known
    if strange:
        raise ValueError(f"{min(strange)} is not modelled")


def _list_operands(modifiers: tuple[str, ...], form: Format, sources: list[int]) -> list[Number]:
    return [decode(source, form, "ftz" in modifiers) for source in sources]


def _choose_nan(form: Format, sources: list[int]) -> int:
    """Return the NaN of a result: of f64 the quiet form of an operand, the second one first."""
    if form is F64:
        order = [1, 0, 2] if len(sources) > 1 else [0]
        for index in order:
            if index < len(sources) and decode(sources[index], form).is_nan:
                return sources[index] | 1 << 51
    return form.nan


def apply_arithmetic(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return the pattern of add, sub, mul, fma, mad, div, rcp or sqrt of one format.

    Args:
        opcode: the instruction's words, e.g. ("add", "rn", "ftz", "f32").
        sources: patterns of the operands.
    """
    name, modifiers, form = opcode[0], opcode[1:-1], FORMATS[opcode[-1]]
    check_modifiers(modifiers, MODIFIERS)
    rounding = next((word for word in modifiers if word in ROUNDINGS), "rn")
    values = _list_operands(modifiers, form, sources)
    if "oob" in modifiers and any(source & 0x7FFF == OUT_OF_BOUNDS for source in sources[:2]):
        return 0
    if name in ("add", "sub"):
        second = values[1] if name == "add" else negate(values[1])
        result = add(values[0], second, rounding)
    elif name == "mul":
        result = multiply(values[0], values[1])
    elif name in ("fma", "mad"):
        result = add(multiply(values[0], values[1]), values[2], rounding)
    elif name == "div":
        result = divide(values[0], values[1])
    elif name == "rcp":
        result = divide(finite(Fraction(1)), values[0])
    else:
        result = root(values[0])
    if "relu" in modifiers and not result.is_nan and result.is_negative:
        result = finite(Fraction(0))
    if result.is_nan and "sat" not in modifiers:
        return _choose_nan(form, sources)
    flushes = "ftz" in modifiers
    if "sat" not in modifiers:
        return encode(result, form, rounding, flushes)
    rounded = decode(encode(result, form, rounding, flushes), form)
    return encode(saturate(rounded), form)


def apply_extreme(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return the pattern of min or max: one NaN loses against a number unless `.NaN` is said."""
    modifiers, form = opcode[1:-1], FORMATS[opcode[-1]]
    check_modifiers(modifiers, EXTREME_MODIFIERS)
    if "abs" in modifiers and "xorsign" not in modifiers:
        raise ValueError("abs is modelled with xorsign alone")
    a, b = _list_operands(modifiers, form, sources)
    sign = a.is_negative != b.is_negative
    raw_signs = [source >> (form.bits - 1) for source in sources]
    if "xorsign" in modifiers:
        sign = raw_signs[0] != raw_signs[1]
        a, b = (Number(n.kind, False, abs(n.value)) for n in (a, b))
    if (a.is_nan and b.is_nan) or ("NaN" in modifiers and (a.is_nan or b.is_nan)):
        return _choose_nan(form, sources)
    if a.is_nan or b.is_nan:
        result = b if a.is_nan else a
    else:
        result = extreme(a, b, opcode[0] == "max")
    if "xorsign" in modifiers:
        result = Number(result.kind, sign, -result.value if sign else result.value)
    return encode(result, form)


def apply_sign(opcode: tuple[str, ...], source: int) -> int:
    """Return the pattern of neg or abs; a NaN of 16 bits becomes canonical, of f64 quiet."""
    modifiers, form = opcode[1:-1], FORMATS[opcode[-1]]
    value = decode(source, form, "ftz" in modifiers)
    top = 1 << (form.bits - 1)
    if value.is_nan and form is not F32:
        return _choose_nan(form, [source])
    if not value.is_nan:
        source = encode(value, form)
    return source ^ top if opcode[0] == "neg" else source & ~top


COMPARISONS = {
    "eq": {0},
    "ne": {-1, 1},
    "lt": {-1},
    "le": {-1, 0},
    "gt": {1},
    "ge": {0, 1},
}


def is_true(name: str, a: Number, b: Number) -> bool:
    """Return the truth of a floating-point comparison; the `u` forms are true of NaN."""
    order = compare(a, b)
    if name in ("num", "nan"):
        return (order is not None) == (name == "num")
    if name in COMPARISONS:
        return order in COMPARISONS[name] if order is not None else False
    return order is None or order in COMPARISONS[name[:-1]]


def has_property(name: str, source: int, form: Format) -> bool:
    """Return the truth of testp: finite, infinite, number, notanumber, normal, subnormal."""
    value = decode(source, form)
    is_finite = value.kind == "finite"
    is_subnormal = is_finite and 0 < abs(value.value) < form.smallest_normal
    return {
        "finite": is_finite,
        "infinite": value.kind == "infinity",
        "number": not value.is_nan,
        "notanumber": value.is_nan,
        "normal": is_finite and not is_subnormal,
        "subnormal": is_subnormal,
    }[name]
