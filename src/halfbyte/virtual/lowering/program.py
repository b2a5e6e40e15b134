"""A lowered kernel as flat arrays, in the layout that `machine/program.h` and `abi.cpp` read."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from halfbyte.ptx.syntax import Instruction

ABSENT = -(2**31)  # kAbsent: an optional operand that the text leaves out
ALWAYS_TRUE = 0  # predicate 0
PREDICATE_SINK = 1
CARRY = 2  # the carry flag of add.cc and its kin
FIRST_PREDICATE = CARRY + 1
SINK_SLOT = 0
FIRST_TEMPORARY = 4  # slots 0..3 are the sink of results that nobody wants
TEMPORARY_SLOTS = 64

CONVERGENCE = {"none": 0, "aligned": 1, "membermask": 2}

INSTRUCTION_FIELDS = (
    "handler",
    "guard",
    "first_operand",
    "num_operands",
    "first_attribute",
    "num_attributes",
    "convergence",
    "membermask",
)


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """One `.param` of a kernel: where its bytes lie in the parameter block."""

    name: str
    offset: int  # bytes
    size: int  # bytes
    type: str


@dataclass(frozen=True, eq=False)
class Program:
    """A kernel that the core can run.

    Attributes:
        name: the entry's name.
        instructions: int32 `[n, len(INSTRUCTION_FIELDS)]`.
        operands: int32, the operand lists of all instructions one after the other.
        attributes: int64, likewise.
        constants: (low 64 bits, high 64 bits, 32-bit words) of each constant.
        handlers: names that `instructions[:, 0]` counts.
        sources: the PTX instruction each lowered one comes from.
        missing_forms: full opcodes that no instruction form covers; they fault when executed.
    """

    name: str
    instructions: NDArray[np.int32]
    operands: NDArray[np.int32]
    attributes: NDArray[np.int64]
    constants: list[tuple[int, int, int]]
    handlers: tuple[str, ...]
    sources: tuple[Instruction, ...]
    register_slots: int
    num_predicates: int
    static_shared_end: int
    local_bytes: int
    parameters: tuple[KernelParameter, ...]
    parameter_bytes: int
    files: dict[int, str] = field(default_factory=dict)
    missing_forms: tuple[str, ...] = ()
