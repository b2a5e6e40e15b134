"""Instructions of one thread alone: arithmetic, logic, comparisons, moves, conversions."""

from collections.abc import Callable

from halfbyte.errors import PtxError
from halfbyte.ptx.syntax import Instruction, Pair, Vector
from halfbyte.virtual.interpreter import conversions, floats, integers
from halfbyte.virtual.interpreter.machine import (
    OFFSET_BITS,
    WINDOW_BITS,
    WINDOWS,
    Thread,
    bits_of,
    split_opcode,
)
from halfbyte.virtual.interpreter.numbers import F32, FORMATS, decode, to_signed, wrap

Execute = Callable[[Thread, Instruction, tuple[str, ...]], None]
SCALAR: dict[str, Execute] = {}


def scalar(*names: str) -> Callable[[Execute], Execute]:
    """Return a decorator that enters a function under the first words of opcodes."""

    def enter(function: Execute) -> Execute:
        for name in names:
            SCALAR[name] = function
        return function

    return enter


def _read_all(thread: Thread, instruction: Instruction, kind: str) -> list[int]:
    return [thread.read(operand, kind) for operand in instruction.operands[1:]]


def _halves(word: int) -> list[int]:
    return [word & 0xFFFF, word >> 16]


def _apply_packed(opcode: tuple[str, ...], sources: list[int]) -> int:
    """Return a packed result: the one-half instruction on both halves."""
    single = (*opcode[:-1], opcode[-1][:-2])
    if single[-1] == "f32":
        raise ValueError("f32x2 is not modelled")
    low, high = zip(*map(_halves, sources), strict=True)
    results = []
    for half in (low, high):
        if single[-1] not in FORMATS:
            results.append(wrap(integers.arithmetic(single, list(half)), 16))
        elif opcode[0] in ("min", "max"):
            results.append(floats.apply_extreme(single, list(half)))
        elif opcode[0] in ("neg", "abs"):
            results.append(floats.apply_sign(single, half[0]))
        else:
            results.append(floats.apply_arithmetic(single, list(half)))
    return results[0] | results[1] << 16


@scalar("add", "sub", "div", "rem", "min", "max", "sad", "rcp", "sqrt", "fma", "abs", "neg")
def arithmetic(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Arithmetic of one type: integers, floats, packed halves; `.cc` also sets the carry."""
    kind = opcode[-1]
    sources = _read_all(thread, instruction, kind)
    if kind.endswith("x2"):
        result = _apply_packed(opcode, sources)
    elif kind not in FORMATS:
        result = integers.arithmetic(opcode, sources)
        if "cc" in opcode:
            thread.carry = _carry_out(opcode[0], sources, 0, int(kind[1:]))
    elif opcode[0] in ("min", "max"):
        result = floats.apply_extreme(opcode, sources)
    elif opcode[0] in ("abs", "neg"):
        result = floats.apply_sign(opcode, sources[0])
    else:
        result = floats.apply_arithmetic(opcode, sources)
    thread.write(instruction.operands[0], result, kind)


def _carry_out(name: str, sources: list[int], carry: int, bits: int) -> int:
    a, b = sources[:2]
    if name.startswith("add"):
        return int(a + b + carry >= 1 << bits)
    return int(a - b - carry < 0)


@scalar("addc", "subc")
def with_carry(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """addc and subc: the carry of the last `.cc` goes in."""
    kind = opcode[-1]
    sources = _read_all(thread, instruction, kind)
    carry = thread.carry
    total = sum(sources) + carry if opcode[0] == "addc" else sources[0] - sources[1] - carry
    if "cc" in opcode:
        thread.carry = _carry_out(opcode[0], sources, carry, int(kind[1:]))
    thread.write(instruction.operands[0], total, kind)


@scalar("mul", "mad")
def multiply(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """mul and mad; .wide results and addends have twice the width."""
    kind = opcode[-1]
    if kind in FORMATS or kind.endswith("x2"):
        arithmetic(thread, instruction, opcode)
        return
    wide = f"{kind[0]}{2 * int(kind[1:])}" if "wide" in opcode else kind
    kinds = [kind, kind, wide]
    pairs = zip(instruction.operands[1:], kinds, strict=False)
    sources = [thread.read(operand, one) for operand, one in pairs]
    if "cc" in opcode:
        product = wrap(integers.multiply(("mul", *opcode[1:]), sources[:2]), int(wide[1:]))
        thread.carry = (product + sources[2]) >> int(wide[1:])
    thread.write(instruction.operands[0], integers.multiply(opcode, sources), wide)


@scalar("madc")
def multiply_with_carry(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """madc: the carry of the last `.cc` goes into the sum; `.cc` sets it anew."""
    kind = opcode[-1]
    bits = int(kind[1:])
    sources = _read_all(thread, instruction, kind)
    product = wrap(integers.multiply(("mul", *opcode[1:]), sources[:2]), bits)
    total = product + sources[2] + thread.carry
    if "cc" in opcode:
        thread.carry = total >> bits
    thread.write(instruction.operands[0], total, kind)


@scalar("mul24", "mad24")
def multiply_24(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Products of the low 24 bits."""
    sources = _read_all(thread, instruction, opcode[-1])
    thread.write(instruction.operands[0], integers.multiply_24(opcode, sources), opcode[-1])


@scalar("and", "or", "xor", "not", "cnot")
def logic(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Bitwise logic, on predicates too."""
    kind = opcode[-1]
    result = integers.logic(opcode, _read_all(thread, instruction, kind))
    thread.write(instruction.operands[0], result, kind)


@scalar("shl", "shr")
def shift(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Shifts; the amount has 32 bits."""
    kind = opcode[-1]
    sources = [thread.read(instruction.operands[1], kind), thread.read(instruction.operands[2])]
    thread.write(instruction.operands[0], integers.shift(opcode, sources), kind)


@scalar("shf", "prmt", "lop3", "fns", "bmsk", "szext", "dp4a", "dp2a")
def words(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Instructions whose operands and result are 32-bit words."""
    sources = _read_all(thread, instruction, "b32")
    name = opcode[0]
    if name == "shf":
        result = integers.funnel_shift(opcode, *sources)
    elif name == "prmt":
        result = integers.permute(opcode[-1], *sources)
    elif name == "lop3" and len(opcode) > 2:
        _look_up_with_predicate(thread, instruction, opcode[1])
        return
    elif name == "lop3":
        result = integers.lop3(*sources)
    elif name == "fns":
        result = integers.find_nth_set(*sources)
    elif name == "bmsk":
        result = _make_mask(opcode, *sources)
    elif name == "szext":
        result = _extend(opcode, *sources)
    else:
        result = integers.dot(opcode, sources)
    thread.write(instruction.operands[0], result, "b32")


def _look_up_with_predicate(thread: Thread, instruction: Instruction, combine: str) -> None:
    """lop3.or / .and d|p, a, b, c, table, q: p is whether d is not zero, combined with q."""
    targets, *operands, other = instruction.operands
    result = integers.lop3(*(thread.read(operand) for operand in operands))
    truth = integers.logic((combine,), [int(result != 0), thread.read(other, "pred")])
    assert isinstance(targets, Pair)
    thread.write(targets.first, result)
    thread.write(targets.second, truth, "pred")


def _make_mask(opcode: tuple[str, ...], position: int, count: int) -> int:
    if "wrap" in opcode:
        return ((1 << (count & 31)) - 1) << (position & 31)
    return ((1 << min(count, 32)) - 1) << min(position, 32)


def _extend(opcode: tuple[str, ...], source: int, count: int) -> int:
    count = count & 31 if "wrap" in opcode else min(count, 32)
    if count == 0:
        return 0
    return to_signed(source, count) if opcode[-1][0] == "s" else wrap(source, count)


@scalar("popc", "clz", "brev", "bfind")
def count_bits(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Counts and positions have 32 bits; brev has the type's."""
    kind = opcode[-1]
    result = integers.count_bits(opcode, thread.read(instruction.operands[1], kind))
    thread.write(instruction.operands[0], result, kind if opcode[0] == "brev" else "u32")


@scalar("bfe", "bfi")
def bit_fields(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """Bit fields; positions and lengths have 32 bits."""
    kind = opcode[-1]
    data = 1 if opcode[0] == "bfe" else 2
    operands = instruction.operands[1:]
    sources = [thread.read(o, kind if k < data else "b32") for k, o in enumerate(operands)]
    insert = opcode[0] == "bfi"
    result = integers.insert(opcode, sources) if insert else integers.extract(opcode, *sources)
    thread.write(instruction.operands[0], result, kind)


def _compare(name: str, kind: str, sources: list[int], flushes: bool) -> bool:
    if kind in FORMATS:
        form = FORMATS[kind]
        a, b = (decode(source, form, flushes) for source in sources)
        return floats.is_true(name, a, b)
    return integers.is_true(name, sources[0], sources[1], kind)


@scalar("setp", "set")
def compare(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """setp p|q and set: a comparison, combined with a predicate where one is given."""
    kind, name = opcode[-1], opcode[1]
    operands = instruction.operands
    combine = next((word for word in opcode[2:-1] if word in ("and", "or", "xor")), "")
    sources = [thread.read(operand, kind) for operand in operands[1:3]]
    truth = int(_compare(name, kind, sources, "ftz" in opcode))
    results = [truth, 1 - truth]
    if combine:
        other = thread.read(operands[3], "pred")
        results = [integers.logic((combine,), [value, other]) for value in results]
    if opcode[0] == "set":
        target = opcode[-2]
        ones = FORMATS[target].bias << FORMATS[target].mantissa_bits if target in FORMATS else -1
        thread.write(operands[0], ones if results[0] else 0, target)
    elif isinstance(operands[0], Pair):
        thread.write(operands[0].first, results[0], "pred")
        thread.write(operands[0].second, results[1], "pred")
    else:
        thread.write(operands[0], results[0], "pred")


@scalar("testp")
def test_property(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """testp: finite, normal, notanumber and so on."""
    source = thread.read(instruction.operands[1], opcode[-1])
    truth = floats.has_property(opcode[1], source, FORMATS[opcode[-1]])
    thread.write(instruction.operands[0], int(truth), "pred")


@scalar("selp")
def select(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """selp: a where the predicate is true, else b."""
    kind = opcode[-1]
    target, a, b, predicate = instruction.operands
    chosen = a if thread.read(predicate, "pred") else b
    thread.write(target, thread.read(chosen, kind), kind)


@scalar("slct")
def select_by_sign(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """slct: a where c is not below zero, else b; NaN chooses b."""
    kind, selector = opcode[-2], opcode[-1]
    target, a, b, c = instruction.operands
    word = thread.read(c, "b32")
    if selector == "f32":
        number = decode(word, F32, "ftz" in opcode)
        takes_a = not number.is_nan and (number.is_zero or not number.is_negative)
    else:
        takes_a = to_signed(word, 32) >= 0
    thread.write(target, thread.read(a if takes_a else b, kind), kind)


@scalar("copysign")
def copy_sign(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """copysign: b with the sign of a."""
    top = 1 << (FORMATS[opcode[-1]].bits - 1)
    a, b = _read_all(thread, instruction, opcode[-1])
    thread.write(instruction.operands[0], (a & top) | (b & ~top), opcode[-1])


@scalar("cvt")
def convert(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """cvt of one value, or of two into a packed pair (the first into the upper half)."""
    operands = instruction.operands
    if opcode[1] == "pack":
        words = [thread.read(operand) for operand in operands[1:]]
        thread.write(operands[0], conversions.pack(opcode, words), "b32")
        return
    target, origin = opcode[-2], opcode[-1]
    if target.endswith("x2"):
        single = (*opcode[:-2], target[:-2], origin)
        high, low = (conversions.convert(single, thread.read(o, origin)) for o in operands[1:3])
        thread.write(operands[0], high << 16 | low, "b32")
        return
    narrow = origin if bits_of(origin) > 8 else "b16"
    source = thread.read(operands[1], narrow)
    thread.write(operands[0], conversions.convert(opcode, source), target)


@scalar("mov")
def move(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """mov of a value, an address, or between a register and the vector of its parts."""
    kind = opcode[-1]
    target, source = instruction.operands
    bits = bits_of(kind)
    if isinstance(source, Vector):
        part = bits // len(source.items)
        joined = 0
        for index, item in enumerate(source.items):
            joined |= thread.read(item, f"b{part}") << (part * index)
        thread.write(target, joined, kind)
    elif isinstance(target, Vector):
        part = bits // len(target.items)
        whole = thread.read(source, kind)
        for index, item in enumerate(target.items):
            thread.write(item, whole >> (part * index), f"b{part}")
    else:
        thread.write(target, thread.read(source, kind), kind)


@scalar("cvta")
def convert_address(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """cvta between a space's addresses and generic ones."""
    target, source = instruction.operands
    space = next(word for word in opcode[1:] if word != "to").split("::")[0]
    window = WINDOWS.get(space, 0)
    value = thread.read(source, "b64")
    to_space = "to" in opcode
    thread.write(target, value & OFFSET_BITS if to_space and window else value | window, "b64")


@scalar("isspacep")
def test_space(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """isspacep: whether a generic address lies in a space."""
    value = thread.read(instruction.operands[1], "b64")
    space = opcode[1].split("::")[0]
    truth = value & WINDOW_BITS == WINDOWS.get(space, 0)
    thread.write(instruction.operands[0], int(truth), "pred")


def run_scalar(thread: Thread, instruction: Instruction) -> None:
    """Run an instruction of this module; PtxError for one it does not know."""
    opcode = split_opcode(instruction.opcode)
    function = SCALAR.get(opcode[0])
    try:
        if function is not None:
            function(thread, instruction, opcode)
            return
    except (KeyError, ValueError) as error:  # a type or a modifier that no table holds
        message = f"the interpreter does not know {instruction.opcode} ({error})"
        raise PtxError(message, instruction.line) from error
    raise PtxError(f"the interpreter does not know {instruction.opcode}", instruction.line)
