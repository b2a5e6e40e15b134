"""One kernel's syntax tree to the flat program of the core."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from halfbyte.errors import PtxError
from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import ArgumentList, Instruction, Label, Module, Operand, Symbol
from halfbyte.virtual.lowering.memory_layout import KernelLayout
from halfbyte.virtual.lowering.operands import (
    LoweredOperands,
    MismatchError,
    OperandLowering,
    Places,
    Step,
)
from halfbyte.virtual.lowering.pools import ArrayPool, ConstantPool, NamePool
from halfbyte.virtual.lowering.program import (
    ALWAYS_TRUE,
    CONVERGENCE,
    FIRST_PREDICATE,
    FIRST_TEMPORARY,
    INSTRUCTION_FIELDS,
    TEMPORARY_SLOTS,
    Program,
)
from halfbyte.virtual.lowering.registers import choose_slots

# Functions of the runtime that the core knows: the form of a call's arguments.
RUNTIME_FORMS = {
    "vprintf": InstructionForm("vprintf", "call", "b64 b64", "vprintf"),
    "__assertfail": InstructionForm("__assertfail", "call", "b64 b64 b32 b64 b64", "assertfail"),
}
# Registers of these have the width of the instruction's type; those of ld, st and cvt may be wider
# (PTX ISA, "Operand Size Exceeding Instruction-Type Size").
_EXACT_FAMILIES = (
    "abs add addc and bfe bfi bfind bmsk brev clz cnot copysign cos div dp2a dp4a ex2 fma lg2 "
    "lop3 mad mad24 madc match max min mov mul mul24 neg not or popc prmt rcp redux rem rsqrt "
    "sad selp set setp shf shfl shl shr sin slct sqrt sub subc szext tanh testp xor"
)
_EXACT = frozenset(_EXACT_FAMILIES.split())
_LONGEST_TEXT = 400  # of an instruction in a message
_UNSUPPORTED = InstructionForm("", "control", "", "unsupported")


def lower_kernel(
    module: Module, body: FlatBody, layout: KernelLayout, symbols: Mapping[str, int]
) -> Program:
    """Return the program of a kernel whose calls are already inlined.

    Args:
        module: the module the kernel stands in.
        body: the kernel, flat (`scopes.resolve`, `inline_calls`).
        layout: where its variables lie (`make_layout`).
        symbols: addresses of the module's global and constant variables.

    Raises PtxError for operands that an instruction's form does not allow and for labels that do
    not exist. Forms nobody knows lower to an instruction that faults when it is executed.
    """
    return _Lowering(module, body, layout, symbols).lower()


@dataclass(slots=True)
class _Row:
    handler: int
    guard: int
    operands: tuple[int, ...]
    attributes: tuple[int, ...]
    convergence: int
    membermask: int
    source: Instruction
    labels: list[tuple[int, str]] = field(default_factory=list)


class _Lowering:
    def __init__(
        self, module: Module, body: FlatBody, layout: KernelLayout, symbols: Mapping[str, int]
    ) -> None:
        self.module = module
        self.body = body
        self.layout = layout
        self.constants = ConstantPool()
        self.handlers = NamePool()
        self.rows: list[_Row] = []
        self.labels: dict[str, int] = {}
        self.missing: dict[str, None] = {}
        slots, self.register_slots = choose_slots(body, FIRST_TEMPORARY + TEMPORARY_SLOTS)
        predicates = [name for name, kind in body.registers.items() if kind == "pred"]
        self.places = Places(
            slots=slots,
            widths={n: TYPE_WIDTHS[k] for n, k in body.registers.items() if k != "pred"},
            predicates={name: FIRST_PREDICATE + i for i, name in enumerate(predicates)},
            constants_of_symbols={**symbols, **layout.local, **layout.parameter},
            shared=layout.shared,
        )
        self.operands = OperandLowering(self.places, self.constants)

    def lower(self) -> Program:
        """Lower every statement, then resolve labels and lay out the arrays."""
        for statement in self.body.statements:
            if isinstance(statement, Label):
                self.labels[statement.name] = len(self.rows)
            else:
                self._lower_instruction(statement)
        end = Instruction("exit", text="end of the kernel")
        self._add(_find_form("exit"), LoweredOperands(), ALWAYS_TRUE, end)
        return self._make_program()

    def _lower_instruction(self, instruction: Instruction) -> None:
        form = INSTRUCTION_FORMS.get(instruction.opcode)
        guard = self._find_guard(instruction)
        operands = instruction.operands
        if instruction.opcode.partition(".")[0] == "call":
            form, operands = _find_runtime_call(instruction)
        if form is None:
            self.missing[instruction.opcode] = None
            self._add(_UNSUPPORTED, LoweredOperands(), guard, instruction)
            return
        is_signed = _has_signed_result(instruction.opcode)
        is_exact = instruction.opcode.partition(".")[0] in _EXACT
        problems = []
        for shape in (form, *form.alternatives):
            try:
                lowered = self.operands.lower(operands, shape.patterns, is_signed, is_exact)
            except MismatchError as error:
                problems.append(str(error))
                continue
            self._add_with_steps(shape, lowered, guard, instruction)
            return
        raise PtxError(
            f"line {instruction.line}: {'; or '.join(problems)}: {_shorten(instruction.text)}",
            instruction.line,
        )

    def _find_guard(self, instruction: Instruction) -> int:
        guard = instruction.guard
        if guard is None:
            return ALWAYS_TRUE
        index = self.places.predicates.get(guard.register.name)
        if index is None:
            raise PtxError(
                f"line {instruction.line}: guard {guard.register.name} is no predicate: "
                f"{instruction.text}",
                instruction.line,
            )
        return ~index if guard.negated else index

    def _add_with_steps(
        self, form: InstructionForm, lowered: LoweredOperands, guard: int, source: Instruction
    ) -> None:
        for step in lowered.before:
            self._add_step(step, ALWAYS_TRUE, source)
        self._add(form, lowered, guard, source)
        for step in lowered.after:
            self._add_step(step, guard, source)

    def _add_step(self, step: Step, guard: int, source: Instruction) -> None:
        handler = self.handlers.find(step.handler)
        self.rows.append(_Row(handler, guard, step.operands, step.attributes, 0, 0, source))

    def _add(
        self, form: InstructionForm, lowered: LoweredOperands, guard: int, source: Instruction
    ) -> None:
        entries = lowered.entries
        membermask = 0
        if form.convergence == "membermask":
            membermask = entries[form.membermask_operand]
        self.rows.append(
            _Row(
                self.handlers.find(form.handler),
                guard,
                tuple(entries),
                form.attributes,
                CONVERGENCE[form.convergence],
                membermask,
                source,
                lowered.labels,
            )
        )

    def _resolve_labels(self, row: _Row) -> tuple[int, ...]:
        if not row.labels:
            return row.operands
        operands = list(row.operands)
        for position, name in reversed(row.labels):
            names = self.body.branch_tables.get(name, (name,))
            try:
                operands[position : position + 1] = [self.labels[label] for label in names]
            except KeyError as error:
                raise PtxError(
                    f"line {row.source.line}: label {error.args[0]!r} is not in this kernel: "
                    f"{row.source.text}",
                    row.source.line,
                ) from None
        return tuple(operands)

    def _make_program(self) -> Program:
        operands, attributes = ArrayPool(), ArrayPool()
        table = np.zeros((len(self.rows), len(INSTRUCTION_FIELDS)), np.int32)
        for position, row in enumerate(self.rows):
            entries = self._resolve_labels(row)
            table[position] = (
                row.handler,
                row.guard,
                operands.add(entries),
                len(entries),
                attributes.add(row.attributes),
                len(row.attributes),
                row.convergence,
                row.membermask,
            )
        layout = self.layout
        return Program(
            name=self.body.name,
            instructions=table,
            operands=np.array(operands.values or [0], np.int32),
            attributes=np.array(attributes.values or [0], np.int64),
            constants=self.constants.list_records(),
            handlers=self.handlers.list_names(),
            sources=tuple(row.source for row in self.rows),
            register_slots=self.register_slots,
            num_predicates=FIRST_PREDICATE + len(self.places.predicates),
            static_shared_end=layout.static_shared_end,
            local_bytes=layout.local_bytes,
            parameters=layout.parameters,
            parameter_bytes=layout.parameter_bytes,
            files=self.module.files,
            missing_forms=tuple(self.missing),
        )


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "..."


def _find_form(name: str) -> InstructionForm:
    return INSTRUCTION_FORMS[name]


def _find_runtime_call(
    instruction: Instruction,
) -> tuple[InstructionForm | None, tuple[Operand, ...]]:
    """Return the form and the arguments of a call that no `.func` of the module answers."""
    names = [o.name for o in instruction.operands if isinstance(o, Symbol)]
    lists = [o.items for o in instruction.operands if isinstance(o, ArgumentList)]
    return RUNTIME_FORMS.get(names[0] if names else ""), lists[-1] if lists else ()


def _has_signed_result(opcode: str) -> bool:
    """Return whether the result is signed: the first type of an opcode is its result's."""
    kinds = (word for word in opcode.split(".") if word in TYPE_WIDTHS)
    return next(kinds, "").startswith("s")
