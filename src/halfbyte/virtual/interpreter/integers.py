"""Integer and bit instructions on Python integers: one function for each."""

from collections.abc import Callable

from halfbyte.virtual.interpreter.numbers import clamp, to_signed, wrap

ALL_ONES = 0xFFFFFFFF


def value_of(bits: int, kind: str) -> int:
    """Return the number a pattern stands for in an integer type such as `s32` or `b16`."""
    width = int(kind[1:])
    return to_signed(bits, width) if kind[0] == "s" else wrap(bits, width)


def limits(kind: str) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer type."""
    width = int(kind[1:])
    if kind[0] == "s":
        return -(1 << (width - 1)), (1 << (width - 1)) - 1
    return 0, (1 << width) - 1


def divide(a: int, b: int, kind: str) -> int:
    """Return the quotient towards zero; all ones where b is zero."""
    if b == 0:
        return -1
    quotient = abs(a) // abs(b)
    return -quotient if (a < 0) != (b < 0) else quotient


def remainder(a: int, b: int, kind: str) -> int:
    """Return a - b * quotient; all ones where b is zero."""
    return -1 if b == 0 else a - b * divide(a, b, kind)


def _multiply(opcode: tuple[str, ...], a: int, b: int, kind: str) -> int:
    product = value_of(a, kind) * value_of(b, kind)
    return product >> int(kind[1:]) if "hi" in opcode else product


def _saturate(value: int, opcode: tuple[str, ...], kind: str) -> int:
    return clamp(value, *limits(kind)) if "sat" in opcode else value


def arithmetic(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return the result, not yet wrapped, of an arithmetic instruction of one integer type."""
    kind = opcode[-1]
    name = opcode[0]
    values = [value_of(source, kind) for source in sources]
    simple: dict[str, Callable[[], int]] = {
        "add": lambda: _saturate(values[0] + values[1], opcode, kind),
        "sub": lambda: _saturate(values[0] - values[1], opcode, kind),
        "div": lambda: divide(values[0], values[1], kind),
        "rem": lambda: remainder(values[0], values[1], kind),
        "abs": lambda: abs(values[0]),
        "neg": lambda: -values[0],
        "min": lambda: max(min(values), 0) if "relu" in opcode else min(values),
        "max": lambda: max(*values, 0) if "relu" in opcode else max(values),
        "sad": lambda: values[2] + abs(values[0] - values[1]),
    }
    return simple[name]()


def multiply(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return mul or mad of .lo, .hi, .wide; the addend of .wide has twice the width."""
    kind = opcode[-1]
    result = _multiply(opcode, sources[0], sources[1], kind)
    if opcode[0] == "mad":
        wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in opcode else kind
        # .hi.sat clamps the sum; .lo may add before or after wrapping, the low bits agree.
        result = _saturate(result + value_of(sources[2], wide), opcode, kind)
    return result


def multiply_24(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return mul24 or mad24: the product of the low 24 bits, its low 32 or bits 16 to 47."""
    kind = opcode[-1]
    narrow = f"{kind[0]}24"
    product = value_of(sources[0], narrow) * value_of(sources[1], narrow)
    part = value_of(product >> 16 if "hi" in opcode else product, kind)
    if opcode[0] == "mul24":
        return part
    return _saturate(part + value_of(sources[2], kind), opcode, kind)


def logic(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return and, or, xor, not, cnot."""
    name = opcode[0]
    if name == "cnot":
        return int(sources[0] == 0)
    if name == "not":
        return ~sources[0]
    a, b = sources
    return {"and": a & b, "or": a | b, "xor": a ^ b}[name]


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Return bit by bit what the 8-bit table says for (a, b, c)."""
    result = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        result |= (table >> index & 1) << bit
    return result


def shift(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return shl or shr; amounts beyond the width shift everything out."""
    kind = opcode[-1]
    width = int(kind[1:])
    amount = min(sources[1] & ALL_ONES, width)
    if opcode[0] == "shl":
        return sources[0] << amount
    return value_of(sources[0], kind) >> amount


def funnel_shift(opcode: tuple[str, ...], a: int, b: int, amount: int) -> int:
    """Return shf: 32 bits of the 64-bit b:a, shifted left (from the top) or right."""
    count = amount & 31 if "wrap" in opcode else min(amount, 32)
    joined = b << 32 | a
    return joined << count >> 32 if "l" in opcode else joined >> count


def count_bits(opcode: tuple[str, ...], source: int) -> int:
    """Return popc, clz, brev or bfind."""
    kind = opcode[-1]
    width = int(kind[1:])
    name = opcode[0]
    if name == "popc":
        return source.bit_count()
    if name == "clz":
        return width - source.bit_length()
    if name == "brev":
        return int(f"{source:0{width}b}"[::-1], 2)
    value = value_of(source, kind)
    position = (~value if value < 0 else value).bit_length() - 1
    if position < 0:
        return ALL_ONES
    return width - 1 - position if "shiftamt" in opcode else position


def find_nth_set(mask: int, start: int, offset: int) -> int:
    """Return fns: the position of the offset-th set bit from `start` on, all ones if none is."""
    offset = to_signed(offset, 32)
    if offset == 0:
        return start if start < 32 and mask >> start & 1 else ALL_ONES
    step = 1 if offset > 0 else -1
    left, position = abs(offset), start
    while 0 <= position < 32:
        left -= mask >> position & 1
        if left == 0:
            return position
        position += step
    return ALL_ONES


def _bit_count(value: int, width: int) -> int:
    return value & 0xFF if width == 32 else value & ALL_ONES


def extract(opcode: tuple[str, ...], source: int, position: int, length: int) -> int:
    """Return bfe: `length` bits from `position`, extended by the sign where the type has one."""
    kind = opcode[-1]
    width = int(kind[1:])
    position, length = _bit_count(position, width), _bit_count(length, width)
    if length == 0:
        return 0
    extended = to_signed(source, width) if kind[0] == "s" else source
    field = (extended >> min(position, width)) & ((1 << min(length, width)) - 1)
    return to_signed(field, min(length, width)) if kind[0] == "s" else field


def insert(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return bfi: b with the low `length` bits of a put in at `position`."""
    width = int(opcode[-1][1:])
    a, b = sources[:2]
    position, length = _bit_count(sources[2], width), _bit_count(sources[3], width)
    if position >= width:
        return b
    field = ((1 << min(length, width)) - 1) << position
    return (b & ~field) | ((a << position) & field)


def permute(mode: str, a: int, b: int, selector: int) -> int:
    """Return prmt: four bytes of b:a, chosen by the selector or by a mode's table."""
    source = [(b << 32 | a) >> (8 * index) & 0xFF for index in range(8)]
    low = selector & 3
    tables = {
        "f4e": [(low + index) % 8 for index in range(4)],
        "b4e": [(low - index) % 8 for index in range(4)],
        "rc8": [low] * 4,
        "ecl": [max(index, low) for index in range(4)],
        "ecr": [min(index, low) for index in range(4)],
        "rc16": [0, 1, 0, 1] if low % 2 == 0 else [2, 3, 2, 3],
    }
    result = 0
    for index in range(4):
        choice = tables[mode][index] if mode in tables else selector >> (4 * index) & 15
        byte = source[choice & 7]
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * index)
    return result


def dot(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return dp4a or dp2a: products of four bytes, or of two halves and bytes, plus c."""
    kind_a, kind_b = opcode[-2], opcode[-1]
    total = value_of(sources[2], "s32" if "s" in kind_a[0] + kind_b[0] else "u32")
    if opcode[0] == "dp4a":
        for index in range(4):
            a = value_of(sources[0] >> (8 * index), f"{kind_a[0]}8")
            total += a * value_of(sources[1] >> (8 * index), f"{kind_b[0]}8")
        return total
    first = 2 if "hi" in opcode else 0
    for index in range(2):
        a = value_of(sources[0] >> (16 * index), f"{kind_a[0]}16")
        total += a * value_of(sources[1] >> (8 * (index + first)), f"{kind_b[0]}8")
    return total


def is_true(name: str, a: int, b: int, kind: str) -> bool:
    """Return the truth of an integer comparison; lo, ls, hi, hs are the unsigned spellings."""
    first, second = value_of(a, kind), value_of(b, kind)
    return {
        "eq": first == second,
        "ne": first != second,
        "lt": first < second,
        "lo": first < second,
        "le": first <= second,
        "ls": first <= second,
        "gt": first > second,
        "hi": first > second,
        "ge": first >= second,
        "hs": first >= second,
    }[name]
