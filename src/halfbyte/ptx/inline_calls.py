"""Direct calls replaced by the body of the function they call.

What a later stage sees of a call: nothing. The callee's parameters are the caller's argument
variables, its statements stand where the call stood, and its `ret` is a branch behind them.
`.param` variables of calls are then registers moved by `mov`, or `.local` variables where their
address is taken or parts of elements are used (`call_parameters`); a body has no `.param` variables
of its own any more, only the kernel's parameters. Calls of functions without a body (`vprintf`,
`malloc`, ...) stay: `call (results), name, (arguments)`, where each item is a register, an
immediate, or the name of a `.local` variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.errors import PtxError
from halfbyte.ptx.call_parameters import lower_call_parameters, make_local_access
from halfbyte.ptx.instruction_form import TYPE_WIDTHS
from halfbyte.ptx.rewriting import rename_instruction
from halfbyte.ptx.scopes import FlatBody, resolve
from halfbyte.ptx.syntax import (
    Address,
    Alias,
    ArgumentList,
    CallPrototype,
    Function,
    Immediate,
    Instruction,
    Kernel,
    Label,
    Module,
    Operand,
    Register,
    Sink,
    Symbol,
    Variable,
)

MAX_STATEMENTS = 1_000_000  # of one kernel with everything it calls
MAX_CALL_DEPTH = 100
_STATIC_SPACES = ("shared", "global", "const")  # one variable however often the function is called


def inline_calls(module: Module, kernel: Kernel) -> FlatBody:
    """Return the flat body of `kernel` with every direct call replaced by its function's body.

    Raises PtxError for a recursive call, an indirect call, a call of an unknown function, and a
    call whose arguments do not fit the parameters; the message names the functions.
    """
    return lower_call_parameters(_Inliner(module, kernel).run())


@dataclass(frozen=True, slots=True)
class _Call:
    """A direct call: results and arguments as written."""

    instruction: Instruction
    function: str
    results: tuple[Operand, ...]
    arguments: tuple[Operand, ...]


class _Inliner:
    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.kernel = kernel
        self.functions: dict[str, Function] = {}
        for function in module.functions:
            # a prototype and its definition may both be there
            if function.body is not None or function.name not in self.functions:
                self.functions[function.name] = function
        self.aliases = {item.name: item.target for item in module.items if isinstance(item, Alias)}
        self.bodies: dict[str, FlatBody] = {}
        self.statics: dict[tuple[str, str], str] = {}
        self.reserved = {variable.name for variable in module.globals} | set(self.functions)
        self.taken = set(self.reserved)
        self.numbers: dict[str, int] = {}
        self.statements: list[Instruction | Label] = []
        self.registers: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self.branch_tables: dict[str, tuple[str, ...]] = {}
        self.prototypes: dict[str, CallPrototype] = {}

    def run(self) -> FlatBody:
        body = resolve(self.kernel, self.reserved)
        self.taken.update(_list_names(body))
        self.taken.update(parameter.name for parameter in body.parameters)
        self._add_names(body, {})
        self._check_size(body)
        self._add_statements(body, {}, (), "")
        return replace(
            body,
            statements=tuple(self.statements),
            registers=self.registers,
            variables=self.variables,
            branch_tables=self.branch_tables,
            prototypes=self.prototypes,
        )

    def _add_names(self, body: FlatBody, names: dict[str, str]) -> None:
        for name, register_type in body.registers.items():
            self.registers[names.get(name, name)] = register_type
        for name, variable in body.variables.items():
            unique = names.get(name, name)
            self.variables[unique] = replace(variable, name=unique)
        for name, labels in body.branch_tables.items():
            renamed = tuple(names.get(label, label) for label in labels)
            self.branch_tables[names.get(name, name)] = renamed
        for name, prototype in body.prototypes.items():
            self.prototypes[names.get(name, name)] = prototype

    def _add_statements(
        self, body: FlatBody, names: dict[str, str], callers: tuple[str, ...], behind: str
    ) -> None:
        """Append the renamed statements of `body`; `ret` goes to the label `behind`, if any."""
        last = body.statements[-1] if body.statements else None
        for statement in body.statements:
            if isinstance(statement, Label):
                self.statements.append(Label(names.get(statement.name, statement.name)))
                continue
            instruction = rename_instruction(statement, names) if names else statement
            family = instruction.opcode.partition(".")[0]
            if family == "call":
                self._add_call(instruction, callers)
            elif family == "ret" and behind:
                if statement is last and instruction.guard is None:
                    continue  # the label is next
                opcode = instruction.opcode.replace("ret", "bra", 1)
                self.statements.append(
                    replace(instruction, opcode=opcode, operands=(Symbol(behind),))
                )
            else:
                if callers:
                    instruction = make_local_access(instruction)
                self.statements.append(instruction)

    def _check_size(self, body: FlatBody) -> None:
        """Raise PtxError, before any work, where the calls would grow beyond all bounds."""
        sizes: dict[str, int] = {}

        def count(body: FlatBody, depth: int) -> int:
            size = len(body.statements)
            for statement in body.statements:
                name = self._find_callee(statement)
                if name and name not in sizes:
                    sizes[name] = 0  # recursion and depth are errors of their own, found later
                    if depth <= MAX_CALL_DEPTH:
                        sizes[name] = count(self._find_body(name), depth + 1)
                size += sizes.get(name, 0)
            return size

        if count(body, 0) > MAX_STATEMENTS:
            raise PtxError(
                f"{self.kernel.name} has over {MAX_STATEMENTS} instructions with the functions it "
                "calls put in their places"
            )

    def _find_callee(self, statement: Instruction | Label) -> str:
        """Return the function with a body that a statement calls, "" where there is none."""
        if isinstance(statement, Label) or statement.opcode.partition(".")[0] != "call":
            return ""
        names = [operand.name for operand in statement.operands if isinstance(operand, Symbol)]
        name = self.aliases.get(names[0], names[0]) if names else ""
        return name if name in self.functions and self.functions[name].body is not None else ""

    def _find_body(self, name: str) -> FlatBody:
        body = self.bodies.get(name)
        if body is None:
            body = self.bodies[name] = resolve(self.functions[name], self.reserved)
        return body

    def _add_call(self, instruction: Instruction, callers: tuple[str, ...]) -> None:
        call = self._read_call(instruction)
        function = self.functions[call.function]
        if function.body is None:
            self.statements.append(instruction)
            return
        line = instruction.line
        if call.function in callers:
            chain = " -> ".join((*callers[callers.index(call.function) :], call.function))
            raise PtxError(
                f"line {line}: recursive calls cannot be put in place: {chain}: {instruction}",
                line,
            )
        if len(callers) > MAX_CALL_DEPTH:
            chain = " -> ".join((*callers[-3:], call.function))
            raise PtxError(f"line {line}: calls nest over {MAX_CALL_DEPTH} deep: ... {chain}", line)
        pairs = (
            (call.arguments, function.parameters, "arguments"),
            (call.results, function.returns, "results"),
        )
        for given, wanted, what in pairs:
            if len(given) != len(wanted):
                message = f"{call.function} has {len(wanted)} {what}, the call {len(given)}"
                raise PtxError(f"line {line}: {message}: {instruction}", line)
        self._add_inlined(call, function, callers)

    def _add_inlined(self, call: _Call, function: Function, callers: tuple[str, ...]) -> None:
        body = self._find_body(call.function)
        names = {name: self._choose_name(name, function.name, body) for name in _list_names(body)}
        before = [
            move
            for parameter, argument in zip(function.parameters, call.arguments, strict=True)
            if (move := self._bind(call, parameter, argument, names, is_result=False))
        ]
        after = [
            move
            for parameter, result in zip(function.returns, call.results, strict=True)
            if (move := self._bind(call, parameter, result, names, is_result=True))
        ]
        guard = call.instruction.guard
        behind = self._make_name(f"behind_{function.name}")
        if guard is not None:
            opposite = replace(guard, negated=not guard.negated)
            skip = replace(
                call.instruction, opcode="bra", operands=(Symbol(behind),), guard=opposite
            )
            self.statements.append(skip)
        self.statements.extend(before)
        self._add_names(body, names)
        returned = behind
        if after and guard is not None:  # lanes that skip the call keep their old results
            returned = self._make_name(f"return_{function.name}")
        self._add_statements(body, names, (*callers, function.name), returned)
        if returned != behind:
            self.statements.append(Label(returned))
            self.statements.extend(after)
            self.statements.append(Label(behind))
        else:
            self.statements.append(Label(behind))
            self.statements.extend(after)

    def _bind(
        self,
        call: _Call,
        parameter: Variable,
        value: Operand,
        names: dict[str, str],
        *,
        is_result: bool,
    ) -> Instruction | None:
        """Tie a parameter to what the call gives for it; return the move this takes, if any."""
        is_variable = isinstance(value, Symbol) and value.name in self.variables
        if parameter.space == "param" and is_variable:
            assert isinstance(value, Symbol)
            names[parameter.name] = value.name
            return None
        if not is_variable and not isinstance(value, Register | Immediate | Sink):
            line = call.instruction.line
            message = f"{value} is no argument or result of a call: {call.instruction}"
            raise PtxError(f"line {line}: {message}", line)
        unique = self._make_name(parameter.name)
        names[parameter.name] = unique
        if parameter.space == "param":
            self.variables[unique] = replace(parameter, name=unique, pointer=None)
        else:
            self.registers[unique] = parameter.type
        if isinstance(value, Sink):
            return None
        return _make_move(call.instruction, parameter, unique, value, is_result)

    def _read_call(self, instruction: Instruction) -> _Call:
        line = instruction.line
        operands = list(instruction.operands)
        results: tuple[Operand, ...] = ()
        if operands and isinstance(first := operands[0], ArgumentList):
            results = first.items
            del operands[0]
        target = operands.pop(0) if operands else None
        if not isinstance(target, Symbol):
            raise PtxError(
                f"line {line}: indirect calls cannot be put in place; call the function by its "
                f"name: {instruction}",
                line,
            )
        name = self.aliases.get(target.name, target.name)
        if name not in self.functions:
            message = f"{target.name!r} is no function of the module: {instruction}"
            raise PtxError(f"line {line}: {message}", line)
        arguments: tuple[Operand, ...] = ()
        if operands and isinstance(operands[0], ArgumentList):
            arguments = operands[0].items
        return _Call(instruction, name, results, arguments)

    def _choose_name(self, name: str, function: str, body: FlatBody) -> str:
        variable = body.variables.get(name)
        if variable is None or variable.space not in _STATIC_SPACES:
            return self._make_name(name)
        if variable.linkage == "extern":
            return name
        key = (function, name)
        if key not in self.statics:
            self.statics[key] = self._make_name(name)
        return self.statics[key]

    def _make_name(self, name: str) -> str:
        unique = name
        while unique in self.taken:
            number = self.numbers[name] = self.numbers.get(name, 0) + 1
            unique = f"{name}${number}"
        self.taken.add(unique)
        return unique


def _list_names(body: FlatBody) -> list[str]:
    parameters = {parameter.name for parameter in (*body.parameters, *body.returns)}
    labels = [item.name for item in body.statements if isinstance(item, Label)]
    names = [*body.registers, *body.variables, *labels, *body.branch_tables, *body.prototypes]
    return [name for name in names if name not in parameters]


def _make_move(
    instruction: Instruction, parameter: Variable, name: str, value: Operand, is_result: bool
) -> Instruction:
    """Return the instruction that brings an argument in, or a result out."""
    operands: Sequence[Operand]
    if parameter.space == "param":  # the other side is a register or an immediate
        there: Operand = Address(Symbol(name))
        opcode = f"{'ld' if is_result else 'st'}.param.{parameter.type}"
    elif isinstance(value, Symbol):  # a register here, a variable there
        there, value = Register(name), Address(value)
        opcode = f"{'st' if is_result else 'ld'}.param.{parameter.type}"
    else:
        there = Register(name)
        opcode = f"mov.{_choose_move_type(parameter.type, value)}"
    operands = (value, there) if is_result else (there, value)
    return replace(instruction, opcode=opcode, operands=tuple(operands), guard=None)


def _choose_move_type(register_type: str, value: Operand) -> str:
    if isinstance(value, Immediate) and value.is_float:
        return register_type
    return TYPE_WIDTHS[register_type]
