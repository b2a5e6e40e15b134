"""ld, st, atom and red: every type, vectors, every space."""

from collections.abc import Callable
from functools import cache

from halfbyte.ptx.syntax import TYPE_BYTES, Instruction, Operand, Sink, Vector
from halfbyte.virtual.interpreter import floats
from halfbyte.virtual.interpreter.integers import value_of
from halfbyte.virtual.interpreter.machine import Thread
from halfbyte.virtual.interpreter.numbers import F32, F64, FORMATS, decode, encode

# The word that an atomic leaves: of the old one, its operands, the type, the state space.
Combine = Callable[[int, list[int], str, str], int]
SPACES = ("global", "shared", "local", "param", "const")


@cache
def find_space(opcode: tuple[str, ...]) -> str:
    """Return the state space an opcode names, "" for generic."""
    return next((w.split("::")[0] for w in opcode if w.split("::")[0] in SPACES), "")


def load(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """ld: one value or a vector of them."""
    kind = opcode[-1]
    target, source = instruction.operands[:2]
    size = TYPE_BYTES[kind]
    address = thread.find_address(source, find_space(opcode))
    items = target.items if isinstance(target, Vector) else (target,)
    values = [thread.load(address + size * index, size) for index in range(len(items))]
    for item, value in zip(items, values, strict=True):
        thread.write(item, value, kind)


def store(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """st: one value or a vector of them."""
    kind = opcode[-1]
    target, source = instruction.operands[:2]
    size = TYPE_BYTES[kind]
    address = thread.find_address(target, find_space(opcode))
    items = source.items if isinstance(source, Vector) else (source,)
    for index, item in enumerate(items):
        thread.store(address + size * index, thread.read(item, f"b{8 * size}"), size)


def atomic(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """atom and red: read, combine, write, and for atom give the old value."""
    kind = opcode[-1]
    size = TYPE_BYTES[kind]
    operands = list(instruction.operands)
    target = operands.pop(0) if opcode[0] == "atom" else Sink()
    space = find_space(opcode)
    address = thread.find_address(operands[0], space)
    if isinstance(operands[1], Vector):
        results = target.items if isinstance(target, Vector) else [target] * len(operands[1].items)
        for index, (item, result) in enumerate(zip(operands[1].items, results, strict=True)):
            _combine_one(thread, opcode, address + size * index, [item], result)
    else:
        _combine_one(thread, opcode, address, operands[1:], target)


def _combine_one(
    thread: Thread, opcode: tuple[str, ...], address: int, operands: list[Operand], target: Operand
) -> None:
    kind, space = opcode[-1], find_space(opcode)
    if kind == "noftz":  # .v2.f16x2.noftz
        kind = opcode[-2]
    size = TYPE_BYTES[kind]
    sources = [thread.read(operand, f"b{8 * size}") for operand in operands]
    old = thread.load(address, size)
    operation = next(word for word in opcode[1:] if word in OPERATIONS)
    thread.store(address, OPERATIONS[operation](old, sources, kind, space), size)
    thread.write(target, old, kind)


def _add(old: int, sources: list[int], kind: str, space: str) -> int:
    if kind not in FORMATS and not kind.endswith("x2"):
        return old + sources[0]
    if kind.endswith("x2"):
        low = _add(old & 0xFFFF, [sources[0] & 0xFFFF], kind[:-2], space)
        return low | _add(old >> 16, [sources[0] >> 16], kind[:-2], space) << 16
    form = FORMATS[kind]
    flushes = form is F32 and space != "shared"  # PTX ISA, "atom"
    numbers = [decode(bits, form, flushes) for bits in (old, sources[0])]
    if form is F64:  # a NaN passes as it is
        for bits, number in zip((old, sources[0]), numbers, strict=True):
            if number.is_nan:
                return bits
    return encode(floats.add(numbers[0], numbers[1], "rn"), form, "rn", flushes)


def _extreme(old: int, sources: list[int], kind: str, is_max: bool) -> int:
    if kind in FORMATS:
        return floats.apply_extreme(("max" if is_max else "min", kind), [old, sources[0]])
    values = sorted((old, sources[0]), key=lambda bits: value_of(bits, kind))
    return values[1] if is_max else values[0]


def _minimum(old: int, sources: list[int], kind: str, space: str) -> int:
    return _extreme(old, sources, kind, False)


def _maximum(old: int, sources: list[int], kind: str, space: str) -> int:
    return _extreme(old, sources, kind, True)


def _apply_bits(name: str) -> Combine:
    def combine(old: int, sources: list[int], kind: str, space: str) -> int:
        value = sources[0]
        return {
            "and": old & value,
            "or": old | value,
            "xor": old ^ value,
            "exch": value,
            "cas": sources[-1] if old == value else old,
            "inc": 0 if old >= value else old + 1,
            "dec": value if old == 0 or old > value else old - 1,
        }[name]

    return combine


OPERATIONS: dict[str, Combine] = {
    "add": _add,
    "min": _minimum,
    "max": _maximum,
    **{name: _apply_bits(name) for name in ("and", "or", "xor", "exch", "cas", "inc", "dec")},
}
