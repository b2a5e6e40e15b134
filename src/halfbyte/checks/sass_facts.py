"""Check: the machine code has the tensor instructions that were meant and spills nothing."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.checks.cubin import CubinKernel
from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.sass import SassInstruction, SassKernel

CHECK = "sass"
_TENSOR_LOAD = "UTMALDG"
_LOCAL_FAMILIES = ("LDL", "STL")
_TARGET = re.compile(r"0x([0-9a-f]+)$")


@dataclass(frozen=True, slots=True)
class SassExpectation:
    """What the machine code of a kernel should have.

    Attributes:
        required: opcodes with the modifiers that must be among theirs, e.g. "UTCOMMA.2CTA.4X".
        loads_per_stage: TMA instructions that a loop body may have: one per operand of a stage. A
            kernel whose ring carries blocks of several kinds has a number for each kind; None
            checks nothing.
        max_registers: per thread.
    """

    required: tuple[str, ...] = ()
    loads_per_stage: tuple[int, ...] | None = None
    max_registers: int = 255


def check_sass_facts(
    kernel: SassKernel, expectation: SassExpectation, cubin: CubinKernel | None = None
) -> CheckReport:
    """Return what is wrong with a kernel's machine code, and its facts.

    Args:
        kernel: from `sass.disassemble`.
        expectation: what is meant.
        cubin: the same kernel's record of `cubin.read_cubin`, for registers and stack.
    """
    check = _Check(kernel, expectation, cubin)
    findings = (*check.find_missing(), *check.find_local_traffic(), *check.find_extra_loads())
    return CheckReport(
        CHECK,
        (*findings, *check.find_register_pressure()),
        tuple(check.list_evidence()),
        len(kernel.instructions),
    )


@dataclass(frozen=True)
class _Check:
    kernel: SassKernel
    wanted: SassExpectation
    cubin: CubinKernel | None

    def _make(
        self, rule: str, message: str, at: SassInstruction | None, severity: Severity
    ) -> CheckFinding:
        place = self.kernel.name[:48] if at is None else str(at)
        return CheckFinding(f"{CHECK}/{rule}", severity, place, message)

    def find_missing(self) -> Iterator[CheckFinding]:
        for pattern in self.wanted.required:
            if any(instruction.matches(pattern) for instruction in self.kernel.instructions):
                continue
            family = pattern.partition(".")[0]
            seen = sorted({i.opcode for i in self.kernel.instructions if i.family == family})
            message = f"no {pattern}; of {family} there is {', '.join(seen) or 'nothing'}"
            yield self._make("missing-instruction", message, None, Severity.ERROR)

    def find_local_traffic(self) -> Iterator[CheckFinding]:
        local = [i for i in self.kernel.instructions if i.family in _LOCAL_FAMILIES]
        if local:
            counts = ", ".join(
                f"{sum(i.family == family for i in local)} {family}" for family in _LOCAL_FAMILIES
            )
            message = f"{counts}: registers or arrays in local memory, where none are wanted"
            yield self._make("local-memory", message, local[0], Severity.ERROR)

    def find_extra_loads(self) -> Iterator[CheckFinding]:
        allowed = self.wanted.loads_per_stage
        if allowed is None:
            return
        loops = group_by_loop(self.kernel.instructions, _TENSOR_LOAD)
        if not loops:
            message = f"no loop with {_TENSOR_LOAD} was found"
            yield self._make("tensor-loads", message, None, Severity.UNDECIDED)
        for loads in loops:
            if len(loads) not in allowed:
                wanted = " or ".join(map(str, allowed))
                message = (
                    f"{len(loads)} {_TENSOR_LOAD} in one pass of a loop, {wanted} wanted: one per "
                    "operand of a stage"
                )
                yield self._make("tensor-loads", message, loads[0], Severity.ERROR)

    def find_register_pressure(self) -> Iterator[CheckFinding]:
        if self.cubin is None:
            return
        if self.cubin.num_registers > self.wanted.max_registers:
            message = (
                f"{self.cubin.num_registers} registers per thread, at most "
                f"{self.wanted.max_registers} are wanted"
            )
            yield self._make("registers", message, None, Severity.ERROR)
        if self.cubin.frame_bytes:
            message = f"a stack of {self.cubin.frame_bytes} bytes per thread in local memory"
            yield self._make("local-memory", message, None, Severity.ERROR)

    def list_evidence(self) -> Iterator[Evidence]:
        for pattern in self.wanted.required:
            found = [i for i in self.kernel.instructions if i.matches(pattern)]
            if found:
                yield Evidence(f"{len(found)} {pattern}", str(found[0]))
        for loads in group_by_loop(self.kernel.instructions, _TENSOR_LOAD):
            yield Evidence(f"{len(loads)} {_TENSOR_LOAD} per pass of a loop", str(loads[0]))
        if self.cubin is not None:
            fact = f"{self.cubin.num_registers} registers per thread"
            yield Evidence(fact, f"EIATTR_REGCOUNT of {self.kernel.name[:48]}")


def group_by_loop(
    instructions: Sequence[SassInstruction], family: str
) -> tuple[tuple[SassInstruction, ...], ...]:
    """Return the instructions of a family by the innermost loop around them.

    A loop is what lies between a branch backwards and its target; instructions in none are left
    out.
    """
    loops = sorted(_list_loops(instructions), key=lambda loop: loop[1] - loop[0])
    groups: dict[tuple[int, int], list[SassInstruction]] = {}
    for instruction in instructions:
        if instruction.family != family:
            continue
        around = (loop for loop in loops if loop[0] <= instruction.offset <= loop[1])
        innermost = next(around, None)
        if innermost is not None:
            groups.setdefault(innermost, []).append(instruction)
    return tuple(tuple(group) for group in groups.values())


def _list_loops(instructions: Sequence[SassInstruction]) -> Iterator[tuple[int, int]]:
    for instruction in instructions:
        target = _TARGET.search(instruction.operands)
        if instruction.family == "BRA" and target is not None:
            start = int(target[1], 16)
            if start < instruction.offset:
                yield start, instruction.offset
