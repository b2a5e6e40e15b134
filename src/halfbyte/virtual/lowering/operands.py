"""Operands of one instruction, matched against its form's pattern and lowered to integers.

A register or immediate becomes a slot, an address two entries (slot, byte offset), a vector one
entry per item, a pair two, a tensor address the map's two and one per coordinate. What the core
cannot read directly (special registers, addresses of shared variables, registers of another
width) goes through temporaries, filled by instructions before and emptied by instructions after.
"""

from dataclasses import dataclass, field

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, OperandPattern
from halfbyte.ptx.special_registers import SPECIAL_REGISTERS, is_special_register
from halfbyte.ptx.syntax import (
    Address,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Vector,
)
from halfbyte.virtual.lowering.pools import ConstantPool
from halfbyte.virtual.lowering.program import (
    ABSENT,
    ALWAYS_TRUE,
    FIRST_TEMPORARY,
    PREDICATE_SINK,
    SINK_SLOT,
    TEMPORARY_SLOTS,
)

_SPECIAL_NUMBERS = {name: number for number, name in enumerate(SPECIAL_REGISTERS)}
_SLOTS = {"b8": 1, "b16": 1, "b32": 1, "b64": 2, "b128": 4}
_NARROW_BITS = {"b8": 8, "b16": 16, "b32": 32}


class MismatchError(Exception):
    """An operand does not have the shape that the pattern asks for; `lower` adds line and text."""


@dataclass(frozen=True, slots=True)
class Step:
    """A small instruction that lowering adds: a handler of the core with operands, attributes."""

    handler: str
    operands: tuple[int, ...]
    attributes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Places:
    """Where names live: register slots and widths, predicates, symbols by space, code labels."""

    slots: dict[str, int]
    widths: dict[str, str]
    predicates: dict[str, int]
    constants_of_symbols: dict[str, int]  # address of global, const, local, param symbols
    shared: dict[str, int]  # offset of shared symbols


@dataclass(slots=True)
class LoweredOperands:
    """The entries of one instruction, and the steps around it."""

    entries: list[int] = field(default_factory=list)
    before: list[Step] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)
    labels: list[tuple[int, str]] = field(default_factory=list)  # entry position -> label
    temporary: int = FIRST_TEMPORARY


class OperandLowering:
    """Lowers operands against patterns; one per kernel."""

    def __init__(self, places: Places, constants: ConstantPool) -> None:
        """Keep where names live, and the pool that immediates go to."""
        self.places = places
        self.constants = constants
        self._is_exact = False

    def lower(
        self,
        operands: tuple[Operand, ...],
        patterns: tuple[OperandPattern, ...],
        is_signed: bool,
        is_exact: bool = False,
    ) -> LoweredOperands:
        """Return the entries of `operands`.

        Args:
            operands: as parsed.
            patterns: of the instruction's form.
            is_signed: how a narrow result widens.
            is_exact: registers must have the width of the pattern.

        Raises MismatchError saying which operand does not fit.
        """
        out = LoweredOperands()
        self._is_exact = is_exact
        if len(operands) > len(patterns):
            raise MismatchError(f"{len(operands)} operands where at most {len(patterns)} are known")
        rest = list(operands)
        for position, pattern in enumerate(patterns):
            # An optional operand takes part when more are left than the following ones need.
            needed = sum(not later.is_optional for later in patterns[position + 1 :])
            if rest and (not pattern.is_optional or len(rest) > needed):
                self._lower_operand(out, rest.pop(0), pattern, is_signed)
            elif pattern.is_optional:
                out.entries.extend([ABSENT] * _count_entries(pattern))
            else:
                raise MismatchError(f"operand {position + 1} is missing")
        return out

    def _lower_operand(
        self, out: LoweredOperands, operand: Operand, pattern: OperandPattern, is_signed: bool
    ) -> None:
        match pattern.kind, operand:
            case "value", _:
                self._lower_value(out, operand, pattern, is_signed)
            case "pair", Pair(first, second):
                self._add_result(out, first, pattern.width, is_signed)
                self._add_result(out, second, pattern.second_width, is_signed)
            case "pair", Register() | Sink():
                self._add_result(out, operand, pattern.width, is_signed)
                sink = PREDICATE_SINK if pattern.second_width == "pred" else SINK_SLOT
                out.entries.append(sink)
            case "address", Address():
                self._add_address(out, operand, pattern.width)
            case "tensor_address", TensorAddress():
                self._add_tensor_address(out, operand, pattern)
            case "label", Symbol(name):
                out.labels.append((len(out.entries), name))
                out.entries.append(0)
            case "imm", Immediate(bits=bits):
                if not -(2**31) <= bits < 2**32:
                    raise MismatchError(f"immediate {operand.text} does not fit 32 bits")
                out.entries.append(bits if bits < 2**31 else bits - 2**32)
            case _:
                raise MismatchError(
                    f"{_describe(operand)} where {_describe_pattern(pattern)} is wanted"
                )

    def _lower_value(
        self, out: LoweredOperands, operand: Operand, pattern: OperandPattern, is_signed: bool
    ) -> None:
        items: tuple[Operand, ...] = (operand,)
        if isinstance(operand, Vector):
            if not pattern.is_vector:
                raise MismatchError(f"a vector where {_describe_pattern(pattern)} is wanted")
            items = operand.items
        elif pattern.is_vector and pattern.count > 1:
            raise MismatchError(f"{_describe(operand)} where a vector is wanted")
        if len(items) != pattern.count:
            raise MismatchError(f"a vector of {len(items)} where {pattern.count} are wanted")
        for item in items:
            if pattern.is_destination:
                self._add_result(out, item, pattern.width, is_signed)
            else:
                out.entries.append(self._find_source(out, item, pattern.width))

    def _add_result(
        self, out: LoweredOperands, operand: Operand, width: str, is_signed: bool
    ) -> None:
        if isinstance(operand, Sink):
            out.entries.append(PREDICATE_SINK if width == "pred" else SINK_SLOT)
            return
        if not isinstance(operand, Register):
            raise MismatchError(f"{_describe(operand)} where a result register is wanted")
        if width == "pred":
            out.entries.append(self._find_predicate(operand))
            return
        slot, own_width = self._find_register(operand, width)
        if _SLOTS[own_width] == _SLOTS[width]:
            out.entries.append(slot)
            if is_signed and _NARROW_BITS.get(own_width, 0) > _NARROW_BITS.get(width, 64):
                both = (_NARROW_BITS[width], _NARROW_BITS[own_width])
                out.after.append(Step("extend.b32", (slot, slot), both))
        elif own_width == "b64" and width in _NARROW_BITS:
            temporary = self._take_temporary(out, width)
            bits = _NARROW_BITS[width]
            out.after.append(Step("widen.b32", (slot, temporary), (bits, int(is_signed))))
            out.entries.append(temporary)
        else:
            raise MismatchError(f"a {own_width} register {operand.name} for a {width} result")

    def _find_source(self, out: LoweredOperands, operand: Operand, width: str) -> int:
        match operand:
            case Negated(register) if width == "pred":
                return ~self._find_predicate(register)
            case Register(name) if is_special_register(name):
                return self._read_special_register(out, name, width)
            case Register() if width == "pred":
                return self._find_predicate(operand)
            case Register():
                slot, own_width = self._find_register(operand, width)
                return self._adapt(out, slot, own_width, width)
            case Immediate(bits=bits) if width == "pred":
                return ALWAYS_TRUE if bits else ~ALWAYS_TRUE
            case Immediate(bits=bits, float_bits=float_bits):
                if float_bits == 64 and width == "b32":
                    raise MismatchError(f"64-bit constant {operand.text} where 32 bits are wanted")
                return self.constants.find_operand(bits, width)
            case Symbol(name):
                return self._find_symbol(out, name, 0, width)
            case SymbolOffset(name=name, offset=offset):
                return self._find_symbol(out, name, offset, width)
            case Sink():
                return SINK_SLOT
            case _:
                raise MismatchError(f"{_describe(operand)} where a {width} value is wanted")

    def _find_symbol(self, out: LoweredOperands, name: str, offset: int, width: str) -> int:
        shared = self.places.shared.get(name)
        if shared is not None:
            wanted = "b64" if width == "b64" else "b32"
            temporary = self._take_temporary(out, wanted)
            out.before.append(Step(f"shared_address.{wanted}", (temporary,), (shared + offset,)))
            return temporary
        address = self.places.constants_of_symbols.get(name)
        if address is None:
            raise MismatchError(f"symbol {name!r} is not declared in this module")
        return self.constants.find_operand(address + offset, width)

    def _add_address(self, out: LoweredOperands, address: Address, width: str) -> None:
        target = address.target
        if isinstance(target, Immediate):
            out.entries.append(self.constants.find_operand(target.bits, width))
        else:
            out.entries.append(self._find_source(out, target, width))
        out.entries.append(_check_offset(address.offset, width))

    def _add_tensor_address(
        self, out: LoweredOperands, operand: TensorAddress, pattern: OperandPattern
    ) -> None:
        self._add_address(out, operand.tensor_map, pattern.width)
        coordinates = operand.coordinates
        items = coordinates.items if isinstance(coordinates, Vector) else (coordinates,)
        if len(items) != pattern.count or operand.extra:
            raise MismatchError(f"{len(items)} coordinates where {pattern.count} are wanted")
        for item in items:
            out.entries.append(self._find_source(out, item, pattern.second_width))

    def _read_special_register(self, out: LoweredOperands, name: str, width: str) -> int:
        if name not in _SPECIAL_NUMBERS:
            raise MismatchError(f"{name} is a vector: name a component, e.g. {name}.x")
        kind = SPECIAL_REGISTERS[name]
        if kind == "pred":
            raise MismatchError(f"{name} is a predicate")
        own_width = TYPE_WIDTHS[kind]
        temporary = self._take_temporary(out, own_width)
        number = _SPECIAL_NUMBERS[name]
        out.before.append(Step("mov.sreg", (temporary,), (number,)))
        return self._adapt(out, temporary, own_width, width)

    def _adapt(self, out: LoweredOperands, slot: int, own_width: str, width: str) -> int:
        if _SLOTS[own_width] == _SLOTS[width]:
            return slot
        if own_width == "b64" and width in _NARROW_BITS:
            temporary = self._take_temporary(out, width)
            out.before.append(Step("narrow.b64", (temporary, slot)))
            return temporary
        if width == "b64" and own_width in _NARROW_BITS:
            temporary = self._take_temporary(out, width)
            bits = _NARROW_BITS[own_width]
            out.before.append(Step("widen.b32", (temporary, slot), (bits, 0)))
            return temporary
        raise MismatchError(f"a {own_width} register where {width} is wanted")

    def _find_register(self, register: Register, width: str) -> tuple[int, str]:
        slot = self.places.slots.get(register.name)
        if slot is None:
            kind = "a predicate" if register.name in self.places.predicates else "not declared"
            raise MismatchError(f"register {register.name} is {kind}")
        own_width = self.places.widths[register.name]
        # The parts of a mov's vector of bytes may lie in 16-bit registers.
        if self._is_exact and own_width != width and width != "b8":
            raise MismatchError(f"a {own_width} register {register.name} where {width} is wanted")
        return slot, own_width

    def _find_predicate(self, register: Register) -> int:
        index = self.places.predicates.get(register.name)
        if index is None:
            raise MismatchError(f"{register.name} is no predicate")
        return index

    def _take_temporary(self, out: LoweredOperands, width: str) -> int:
        slot = out.temporary
        count = _SLOTS[width]
        out.temporary += count
        if out.temporary > FIRST_TEMPORARY + TEMPORARY_SLOTS:
            raise MismatchError("too many operands need a temporary")
        return slot


def _check_offset(offset: int, width: str) -> int:
    if not -(2**31) <= offset < (2**31 if width == "b64" else 2**32):
        raise MismatchError(f"address offset {offset} does not fit 32 bits")
    return offset if offset < 2**31 else offset - 2**32


def _count_entries(pattern: OperandPattern) -> int:
    match pattern.kind:
        case "pair" | "address":
            return 2
        case "tensor_address":
            return 2 + pattern.count
        case _:
            return pattern.count


def _describe(operand: Operand) -> str:
    name = getattr(operand, "name", "") or getattr(operand, "text", "")
    return f"{type(operand).__name__.lower()} {name}".strip()


def _describe_pattern(pattern: OperandPattern) -> str:
    if pattern.kind in ("address", "tensor_address"):
        return f"an address with a {pattern.width} register"
    if pattern.kind == "value":
        return (
            f"{pattern.count} x {pattern.width}"
            if pattern.is_vector
            else f"a {pattern.width} value"
        )
    return f"a {pattern.kind}"
