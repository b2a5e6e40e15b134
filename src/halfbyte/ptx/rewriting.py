"""Operands and instructions with other names in them."""

from collections.abc import Mapping
from dataclasses import replace

from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    Element,
    Guard,
    Instruction,
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


def rename_operand(operand: Operand, names: Mapping[str, str]) -> Operand:
    """Return `operand` with every register and symbol in `names` renamed."""
    match operand:
        case Register() | Sink():
            return _rename_half(operand, names)
        case Symbol(name):
            return Symbol(names.get(name, name))
        case SymbolOffset(name=name):
            return replace(operand, name=names.get(name, name))
        case Negated(register):
            return Negated(_rename_register(register, names))
        case Element(register, component):
            return Element(_rename_register(register, names), component)
        case Pair(first, second):
            return Pair(_rename_half(first, names), _rename_half(second, names))
        case Address():
            return _rename_address(operand, names)
        case Vector(items):
            return Vector(tuple(rename_operand(item, names) for item in items))
        case ArgumentList(items):
            return ArgumentList(tuple(rename_operand(item, names) for item in items))
        case TensorAddress(tensor_map, coordinates, extra):
            return TensorAddress(
                _rename_address(tensor_map, names),
                rename_operand(coordinates, names),
                tuple(rename_operand(item, names) for item in extra),
            )
        case _:
            return operand


def rename_instruction(instruction: Instruction, names: Mapping[str, str]) -> Instruction:
    """Return `instruction` with its operands and guard renamed; line and text stay the source's."""
    guard = instruction.guard
    if guard is not None:
        guard = Guard(_rename_register(guard.register, names), guard.negated)
    operands = tuple(rename_operand(operand, names) for operand in instruction.operands)
    return replace(instruction, operands=operands, guard=guard)


def _rename_register(register: Register, names: Mapping[str, str]) -> Register:
    return Register(names.get(register.name, register.name))


def _rename_half(half: Register | Sink, names: Mapping[str, str]) -> Register | Sink:
    return half if isinstance(half, Sink) else _rename_register(half, names)


def _rename_address(address: Address, names: Mapping[str, str]) -> Address:
    target = address.target
    if isinstance(target, Register):
        return Address(_rename_register(target, names), address.offset, address.is_unified)
    if isinstance(target, Symbol):
        target = Symbol(names.get(target.name, target.name))
        return Address(target, address.offset, address.is_unified)
    return address
