"""Names made unique: a body with nested `{ }` scopes becomes one flat list of statements.

Inline assembly brings scopes with registers and labels of their own, often the same names again
and again. `resolve` gives every one its own name: the first keeps its spelling, further ones get
`$1`, `$2`, ... Vector registers become their components (`v` is `{v.x, v.y}`), and a name without
a percent sign becomes a Register where it is declared as one.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from halfbyte.errors import PtxError
from halfbyte.ptx.special_registers import is_special_register
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    BranchTargets,
    CallPrototype,
    CallTargets,
    Declaration,
    Directive,
    Element,
    Function,
    Guard,
    Instruction,
    Kernel,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Scope,
    Sink,
    Statement,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Variable,
    Vector,
)

_COMPONENTS = {"x": "x", "y": "y", "z": "z", "w": "w", "r": "x", "g": "y", "b": "z", "a": "w"}
_VECTOR_COMPONENTS = "xyzw"
_MAX_NUMBER_DIGITS = 10  # more registers than any body can have
_TRAILING_DIGITS = re.compile(r"\d+$", re.ASCII)


@dataclass(frozen=True, slots=True)
class FlatBody:
    """A kernel or function without scopes; every name is unique.

    Attributes:
        statements: instructions and labels in order.
        registers: type of each register that occurs, without special registers.
        variables: what the body declares in memory (`.shared`, `.local`, `.param`, ...), by name.
        branch_tables: labels of each `.branchtargets`.
        call_targets: functions of each `.calltargets`.
        prototypes: each `.callprototype`.
    """

    name: str
    statements: tuple[Instruction | Label, ...]
    registers: dict[str, str]
    variables: dict[str, Variable]
    parameters: tuple[Variable, ...] = ()
    returns: tuple[Variable, ...] = ()
    directives: tuple[Directive, ...] = ()
    branch_tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, CallPrototype] = field(default_factory=dict)


def resolve(item: Kernel | Function, reserved: Iterable[str] = ()) -> FlatBody:
    """Return the flat body of a kernel or function that has one.

    Args:
        item: what to flatten.
        reserved: names that renaming must avoid, besides those of the body.

    Raises PtxError for a register that no enclosing scope declares and for a name declared twice.
    """
    if item.body is None:
        raise PtxError(f"{item.name} has no body: it is defined in another module", item.line)
    return _Resolver(item, reserved).resolve_body(item.body)


@dataclass(frozen=True, slots=True)
class _Binding:
    name: str  # the unique name
    type: str = ""  # of a register; "" for anything else
    vector: int = 1


class _Names:
    """What one scope declares, and the scope around it."""

    def __init__(self, outer: "_Names | None") -> None:
        self.outer = outer
        self.bindings: dict[str, _Binding] = {}
        self.ranges: dict[str, tuple[int, str, int]] = {}  # prefix -> count, type, vector
        self.operands: dict[Operand, Operand] = {}

    def has(self, name: str) -> bool:
        """Whether this scope or one around it declares `name`."""
        scope: _Names | None = self
        while scope is not None:
            if name in scope.bindings or scope.find_range(name):
                return True
            scope = scope.outer
        return False

    def find_range(self, name: str) -> tuple[int, str, int] | None:
        """Return the `%r<100>` of this scope that `name` belongs to."""
        if not self.ranges:
            return None
        digits = _TRAILING_DIGITS.search(name)
        if digits is None:
            return None
        for split in range(digits.start(), len(name)):
            found = self.ranges.get(name[:split])
            number = name[split:]
            # numbers are written without leading zeros
            is_number = (number == "0" or number[0] != "0") and len(number) < _MAX_NUMBER_DIGITS
            if found and is_number and int(number) < found[0]:
                return found
        return None


class _Resolver:
    def __init__(self, item: Kernel | Function, reserved: Iterable[str]) -> None:
        self.item = item
        self.statements: list[Instruction | Label] = []
        self.registers: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self.branch_tables: dict[str, tuple[str, ...]] = {}
        self.call_targets: dict[str, tuple[str, ...]] = {}
        self.prototypes: dict[str, CallPrototype] = {}
        self.taken = set(reserved)
        self.declared: set[str] = set()
        self.prefixes: set[str] = set()

    def resolve_body(self, body: Scope) -> FlatBody:
        self._collect_declared(body)
        parameters = _Names(None)
        returns = self.item.returns if isinstance(self.item, Function) else ()
        for parameter in (*returns, *self.item.parameters):
            self.taken.add(parameter.name)
            register_type = parameter.type if parameter.space == "reg" else ""
            binding = _Binding(parameter.name, register_type, parameter.vector)
            parameters.bindings[parameter.name] = binding
        self._resolve_scope(body, parameters)
        return FlatBody(
            self.item.name,
            tuple(self.statements),
            self.registers,
            self.variables,
            self.item.parameters,
            returns,
            self.item.directives,
            self.branch_tables,
            self.call_targets,
            self.prototypes,
        )

    def _collect_declared(self, scope: Scope) -> None:
        for statement in scope.statements:
            if isinstance(statement, Scope):
                self._collect_declared(statement)
            elif isinstance(statement, Declaration):
                for declarator in statement.declarators:
                    names = self.declared if declarator.count is None else self.prefixes
                    names.add(declarator.name)
            elif isinstance(statement, Label | BranchTargets | CallTargets | CallPrototype):
                self.declared.add(statement.name)

    def _choose_name(self, name: str, outer: _Names | None) -> str:
        unique = name
        number = 0
        while unique in self.taken or (number == 0 and outer is not None and outer.has(name)):
            number += 1
            unique = f"{name}${number}"
            while unique in self.declared or unique.rstrip("0123456789") in self.prefixes:
                number += 1
                unique = f"{name}${number}"
        self.taken.add(unique)
        return unique

    def _resolve_scope(self, scope: Scope, outer: _Names) -> None:
        names = _Names(outer)
        for statement in scope.statements:
            self._declare(statement, names)
        for statement in scope.statements:
            self._resolve_statement(statement, names)

    def _declare(self, statement: Statement, names: _Names) -> None:
        if isinstance(statement, Label | BranchTargets | CallTargets | CallPrototype):
            self._bind(statement.name, statement.line, names)
        elif isinstance(statement, Declaration):
            register_type = statement.type if statement.space == "reg" else ""
            for declarator, variable in zip(statement.declarators, statement, strict=True):
                if declarator.count is not None:
                    if declarator.name in names.ranges:
                        _fail_twice(declarator.name, statement.line)
                    names.ranges[declarator.name] = (
                        declarator.count,
                        register_type,
                        statement.vector,
                    )
                    continue
                line, vector = statement.line, statement.vector
                if statement.linkage == "extern":  # the name is that of another module's variable
                    self._check_single(declarator.name, line, names)
                    unique = declarator.name
                    names.bindings[unique] = _Binding(unique)
                else:
                    unique = self._bind(declarator.name, line, names, register_type, vector)
                if statement.space != "reg":
                    self.variables[unique] = replace(variable, name=unique)

    def _bind(
        self, name: str, line: int, names: _Names, register_type: str = "", vector: int = 1
    ) -> str:
        self._check_single(name, line, names)
        unique = self._choose_name(name, names.outer)
        names.bindings[name] = _Binding(unique, register_type, vector)
        return unique

    def _check_single(self, name: str, line: int, names: _Names) -> None:
        if name in names.bindings:
            _fail_twice(name, line)

    def _find(self, name: str, names: _Names) -> _Binding | None:
        scope: _Names | None = names
        while scope is not None:
            binding = scope.bindings.get(name)
            if binding is not None:
                return binding
            found = scope.find_range(name)
            if found is not None:
                _, register_type, vector = found
                unique = self._choose_name(name, scope.outer)
                binding = _Binding(unique, register_type, vector)
                scope.bindings[name] = binding
                return binding
            scope = scope.outer
        return None

    def _resolve_statement(self, statement: Statement, names: _Names) -> None:
        match statement:
            case Instruction():
                self.statements.append(self._resolve_instruction(statement, names))
            case Label(name, line):
                self.statements.append(Label(self._rename(name, names), line))
            case Scope():
                self._resolve_scope(statement, names)
            case BranchTargets(name, labels):
                renamed = tuple(self._rename(label, names) for label in labels)
                self.branch_tables[self._rename(name, names)] = renamed
            case CallTargets(name, functions):
                self.call_targets[self._rename(name, names)] = functions
            case CallPrototype(name):
                self.prototypes[self._rename(name, names)] = statement

    def _rename(self, name: str, names: _Names) -> str:
        binding = self._find(name, names)
        return name if binding is None else binding.name

    def _resolve_instruction(self, instruction: Instruction, names: _Names) -> Instruction:
        known = names.operands
        try:
            operands = tuple(
                known.get(operand) or self._resolve_operand(operand, names)
                for operand in instruction.operands
            )
            guard = instruction.guard
            if guard is not None:
                register = self._resolve_register(guard.register, names)
                guard = Guard(register, guard.negated)
        except _UndeclaredError as error:
            line = instruction.line
            raise PtxError(
                f"line {line}: register {error.args[0]!r} is declared in no enclosing scope: "
                f"{instruction}",
                line,
            ) from None
        if operands == instruction.operands and guard == instruction.guard:
            return instruction
        return Instruction(
            instruction.opcode,
            operands,
            guard,
            instruction.line,
            instruction.location,
            instruction.text,
        )

    def _resolve_operand(self, operand: Operand, names: _Names) -> Operand:
        found = names.operands.get(operand)
        if found is None:
            found = self._make_operand(operand, names)
            names.operands[operand] = found
        return found

    def _make_operand(self, operand: Operand, names: _Names) -> Operand:
        match operand:
            case Register(name):
                return self._resolve_name(name, names, operand)
            case Symbol(name):
                return self._resolve_name(name, names, operand)
            case SymbolOffset(name=name):
                return replace(operand, name=self._rename(name, names))
            case Negated(register):
                return Negated(self._resolve_register(register, names))
            case Pair(first, second):
                return Pair(self._resolve_half(first, names), self._resolve_half(second, names))
            case Element():
                return self._resolve_element(operand, names)
            case Address():
                return self._resolve_address(operand, names)
            case Vector(items):
                return Vector(tuple(self._resolve_operand(item, names) for item in items))
            case ArgumentList(items):
                return ArgumentList(tuple(self._resolve_operand(item, names) for item in items))
            case TensorAddress(tensor_map, coordinates, extra):
                return TensorAddress(
                    self._resolve_address(tensor_map, names),
                    self._resolve_operand(coordinates, names),
                    tuple(self._resolve_operand(item, names) for item in extra),
                )
            case _:
                return operand

    def _resolve_name(self, name: str, names: _Names, operand: Register | Symbol) -> Operand:
        if type(operand) is Register and is_special_register(name):
            return operand
        binding = self._find(name, names)
        if binding is None:
            if type(operand) is Register:
                raise _UndeclaredError(name)
            return operand
        if not binding.type:
            return Symbol(binding.name)
        if binding.vector == 1:
            return self._use(binding.name, binding.type)
        axes = _VECTOR_COMPONENTS[: binding.vector]
        return Vector(tuple(self._use(f"{binding.name}.{axis}", binding.type) for axis in axes))

    def _use(self, name: str, register_type: str) -> Register:
        self.registers[name] = register_type
        return Register(name)

    def _resolve_register(self, register: Register, names: _Names) -> Register:
        resolved = self._resolve_operand(register, names)
        if not isinstance(resolved, Register):
            raise _UndeclaredError(register.name)
        return resolved

    def _resolve_half(self, half: Register | Sink, names: _Names) -> Register | Sink:
        return half if isinstance(half, Sink) else self._resolve_register(half, names)

    def _resolve_element(self, operand: Element, names: _Names) -> Register | Element:
        name = operand.register.name
        binding = self._find(name, names)
        if binding is None or not binding.type:
            raise _UndeclaredError(name)
        if binding.vector == 1:
            return Element(self._use(binding.name, binding.type), operand.component)
        axis = _COMPONENTS.get(operand.component)
        if axis is None or axis not in _VECTOR_COMPONENTS[: binding.vector]:
            raise _UndeclaredError(f"{name}.{operand.component}")
        return self._use(f"{binding.name}.{axis}", binding.type)

    def _resolve_address(self, operand: Address, names: _Names) -> Address:
        target = self._resolve_operand(operand.target, names)
        if target is operand.target:
            return operand
        if not isinstance(target, Register | Element | Symbol):
            raise _UndeclaredError(str(operand.target))
        return Address(target, operand.offset, operand.is_unified)


def _fail_twice(name: str, line: int) -> NoReturn:
    raise PtxError(f"line {line}: {name!r} is declared twice in one scope", line)


class _UndeclaredError(Exception):
    """A register without a declaration; `resolve` adds the line."""
