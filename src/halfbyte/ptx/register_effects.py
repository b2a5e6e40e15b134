"""Which registers an instruction reads and writes.

The instruction forms say which operands are destinations. An instruction without a form counts as
reading and writing every register outside brackets: too much is live rather than too little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.instruction_form import choose_form
from halfbyte.ptx.special_registers import is_special_register
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    Element,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    TensorAddress,
    Vector,
)

# The accumulator is one operand, read and written (PTX ISA, "wgmma.mma_async").
_UPDATING = ("wgmma.mma_async",)


@dataclass(frozen=True, slots=True)
class RegisterEffects:
    """Names of the registers read (guard included) and written; special registers are left out.

    `is_killing` tells whether what was in the written registers is gone for sure: not so under a
    guard, nor where only a part of a register is written.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    is_killing: bool


EffectsOf: TypeAlias = Callable[[Instruction], RegisterEffects]


def find_effects(instruction: Instruction) -> RegisterEffects:
    """Return the effects of an instruction, by its form in `INSTRUCTION_FORMS`."""
    operands = instruction.operands
    form = INSTRUCTION_FORMS.get(instruction.opcode)
    is_call = instruction.opcode.partition(".")[0] == "call"
    is_known = form is not None or is_call
    if is_call:
        # only a list of results can stand first; a lone first operand is whom to call
        flags = [isinstance(operands[0], ArgumentList)] if operands else []
    elif form is None:
        flags = [True] * len(operands)
    else:
        patterns = choose_form(form, operands).patterns
        flags = [pattern.is_destination for pattern in patterns]
    flags += [False] * (len(operands) - len(flags))
    written: list[Operand] = []
    read: list[Operand] = []
    for operand, is_destination in zip(operands, flags, strict=False):
        is_written = is_destination and not isinstance(operand, Address | TensorAddress)
        (written if is_written else read).append(operand)
    is_partial = not is_known or instruction.opcode.startswith(_UPDATING)
    is_partial = is_partial or any(isinstance(operand, Element) for operand in written)
    reads = [name for operand in read for name in list_registers(operand)]
    writes = [name for operand in written for name in list_registers(operand)]
    if is_partial:
        reads.extend(writes)
    if instruction.guard is not None:
        reads.append(instruction.guard.register.name)
    return RegisterEffects(
        tuple(name for name in reads if not is_special_register(name)),
        tuple(writes),
        instruction.guard is None and not is_partial,
    )


def list_registers(operand: Operand) -> Iterator[str]:
    """Yield the name of every register in an operand, special ones included."""
    match operand:
        case Register(name):
            yield name
        case Element(register) | Negated(register):
            yield register.name
        case Pair(first, second):
            yield from list_registers(first)
            yield from list_registers(second)
        case Vector(items) | ArgumentList(items):
            for item in items:
                yield from list_registers(item)
        case Address(target):
            yield from list_registers(target)
        case TensorAddress(tensor_map, coordinates, extra):
            yield from list_registers(tensor_map)
            for item in (coordinates, *extra):
                yield from list_registers(item)
