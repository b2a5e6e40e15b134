"""The `.param` variables of calls, as registers where possible and as `.local` memory otherwise.

A `.param` variable declared in a body stages one argument or result. If every access is an
`ld.param`/`st.param` of whole elements that fit together, its elements become registers and the
accesses become `mov`; in the argument list of a call that stays a call, the register stands in its
place. Any other becomes a `.local` variable, accessed by `ld.local`/`st.local`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from halfbyte.ptx.instruction_form import TYPE_WIDTHS, WIDTHS
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    Immediate,
    Instruction,
    Label,
    Operand,
    Register,
    Sink,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Variable,
    Vector,
)

_PARAMETER_SPACES = ("param", "param::func")
_NO_REGISTERS = ("b8", "u8", "s8", "b128")  # types that `mov` of one register does not have


@dataclass(slots=True)
class _Staged:
    """What is known of one `.param` variable while reading its uses."""

    variable: Variable
    is_addressed: bool = False
    elements: dict[int, str] = field(default_factory=dict)  # byte offset -> type first met
    registers: dict[int, str] = field(default_factory=dict)  # byte offset -> register


@dataclass(frozen=True, slots=True)
class _Access:
    """An `ld.param`/`st.param` of a staged variable: first byte, element type, values."""

    name: str
    offset: int
    type: str
    values: tuple[Operand, ...]
    is_store: bool

    def list_offsets(self) -> range:
        """Return the byte offset of each element."""
        size = WIDTHS[TYPE_WIDTHS[self.type]] // 8
        return range(self.offset, self.offset + size * len(self.values), size)


def lower_call_parameters(body: FlatBody) -> FlatBody:
    """Return `body` without `.param` variables of its own: they are registers or `.local` now."""
    staged = {
        name: _Staged(variable)
        for name, variable in body.variables.items()
        if variable.space == "param"
    }
    if not staged:
        return body
    for statement in body.statements:
        if isinstance(statement, Instruction):
            _note_uses(statement, body, staged)
    registers = dict(body.registers)
    variables = dict(body.variables)
    for name, item in staged.items():
        if _choose_registers(item, registers):
            del variables[name]
        else:
            variables[name] = replace(item.variable, space="local")
    statements: list[Instruction | Label] = []
    for statement in body.statements:
        if isinstance(statement, Instruction):
            statements.extend(_rewrite(statement, staged))
        else:
            statements.append(statement)
    return replace(body, statements=tuple(statements), registers=registers, variables=variables)


def _find_access(instruction: Instruction, staged: dict[str, _Staged]) -> _Access | None:
    parts = instruction.opcode.split(".")
    operands = instruction.operands
    is_store = parts[0] == "st"
    if parts[0] not in ("ld", "st") or len(operands) != 2 or len(parts) < 3:
        return None
    if parts[1] not in _PARAMETER_SPACES:
        return None
    address, value = operands if is_store else operands[::-1]
    if not isinstance(address, Address) or not isinstance(address.target, Symbol):
        return None
    if address.target.name not in staged or parts[-1] not in TYPE_WIDTHS:
        return None
    values = value.items if isinstance(value, Vector) else (value,)
    return _Access(address.target.name, address.offset, parts[-1], values, is_store)


def _note_uses(instruction: Instruction, body: FlatBody, staged: dict[str, _Staged]) -> None:
    access = _find_access(instruction, staged)
    if access is not None:
        _note_access(access, body, staged[access.name])
        return
    is_call = instruction.opcode.partition(".")[0] == "call"
    for operand in instruction.operands:
        if is_call and isinstance(operand, ArgumentList):
            for item in operand.items:
                if isinstance(item, Symbol) and item.name in staged:
                    _note_argument(staged[item.name])
        else:
            for name in _list_symbols(operand):
                if name in staged:
                    staged[name].is_addressed = True


def _note_access(access: _Access, body: FlatBody, item: _Staged) -> None:
    width = TYPE_WIDTHS[access.type]
    is_whole = access.type not in _NO_REGISTERS
    for value in access.values:
        if isinstance(value, Register):
            # a narrower access would need the extension that ld and st make
            is_whole &= TYPE_WIDTHS.get(body.registers.get(value.name, "")) == width
        else:
            is_whole &= isinstance(value, Immediate | Sink | Symbol | SymbolOffset)
    if not is_whole:
        item.is_addressed = True
    for offset in access.list_offsets():
        known = item.elements.setdefault(offset, access.type)
        if TYPE_WIDTHS[known] != width:
            item.is_addressed = True


def _note_argument(item: _Staged) -> None:
    variable = item.variable
    if variable.dimensions or variable.vector > 1 or variable.type in _NO_REGISTERS:
        item.is_addressed = True
        return
    known = item.elements.setdefault(0, variable.type)
    if TYPE_WIDTHS[known] != TYPE_WIDTHS[variable.type]:
        item.is_addressed = True


def _list_symbols(operand: Operand) -> Iterator[str]:
    match operand:
        case Symbol(name) | SymbolOffset(name=name):
            yield name
        case Address(target):
            yield from _list_symbols(target)
        case Vector(items) | ArgumentList(items):
            for item in items:
                yield from _list_symbols(item)
        case TensorAddress(tensor_map, coordinates, extra):
            yield from _list_symbols(tensor_map)
            for item in (coordinates, *extra):
                yield from _list_symbols(item)


def _choose_registers(item: _Staged, registers: dict[str, str]) -> bool:
    """Give each element a register if all elements fit together; return whether they do."""
    end = 0
    for offset in sorted(item.elements):
        if offset < end:
            item.is_addressed = True
        end = offset + WIDTHS[TYPE_WIDTHS[item.elements[offset]]] // 8
    if item.is_addressed or end > item.variable.size_bytes:
        return False
    for offset, element_type in item.elements.items():
        name = f"{item.variable.name}.{offset}"  # a dot: no name of a text can be this
        item.registers[offset] = name
        registers[name] = TYPE_WIDTHS[element_type]
    return True


def _rewrite(instruction: Instruction, staged: dict[str, _Staged]) -> Iterator[Instruction]:
    access = _find_access(instruction, staged)
    if access is not None:
        item = staged[access.name]
        if item.registers:
            yield from _make_moves(instruction, access, item)
        else:
            yield replace(instruction, opcode=_make_local(instruction.opcode))
        return
    if instruction.opcode.partition(".")[0] != "call":
        yield instruction
        return
    operands = []
    for operand in instruction.operands:
        if isinstance(operand, ArgumentList):
            operand = ArgumentList(tuple(_rewrite_argument(item, staged) for item in operand.items))
        operands.append(operand)
    yield replace(instruction, operands=tuple(operands))


def _rewrite_argument(argument: Operand, staged: dict[str, _Staged]) -> Operand:
    if isinstance(argument, Symbol) and argument.name in staged:
        registers = staged[argument.name].registers
        return Register(registers[0]) if registers else argument
    return argument


def _make_moves(instruction: Instruction, access: _Access, item: _Staged) -> Iterator[Instruction]:
    for offset, value in zip(access.list_offsets(), access.values, strict=True):
        if isinstance(value, Sink):
            continue
        register = Register(item.registers[offset])
        operands = (register, value) if access.is_store else (value, register)
        # the types of ld and st that mov lacks have the same width as a `.b`
        yield replace(instruction, opcode=f"mov.{_choose_move_type(access)}", operands=operands)


def _choose_move_type(access: _Access) -> str:
    is_float = any(isinstance(value, Immediate) and value.is_float for value in access.values)
    return access.type if is_float else TYPE_WIDTHS[access.type]


def _make_local(opcode: str) -> str:
    parts = opcode.split(".")
    return ".".join((parts[0], "local", *parts[2:]))


def make_local_access(instruction: Instruction) -> Instruction:
    """Return an access of a function through a register into `.param`, as one into `.local`.

    A function cannot reach the kernel's parameters this way, only its own, which a call stages.
    """
    parts = instruction.opcode.split(".")
    if parts[1:2] != ["param"] and parts[1:2] != ["param::func"]:
        return instruction
    is_indirect = parts[0] == "cvta" or any(
        isinstance(operand, Address) and isinstance(operand.target, Register)
        for operand in instruction.operands
    )
    is_access = parts[0] in ("ld", "st", "cvta") and is_indirect
    return (
        replace(instruction, opcode=_make_local(instruction.opcode)) if is_access else instruction
    )
