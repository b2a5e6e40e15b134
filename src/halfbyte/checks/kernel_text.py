"""One kernel of a PTX module, ready for checks: flat body, control flow, loops, addresses."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from halfbyte.arch import Gpu, find_gpu
from halfbyte.checks.loops import Loop, find_loops
from halfbyte.errors import PtxError, UsageError
from halfbyte.ptx.control_flow import ControlFlow, make_control_flow
from halfbyte.ptx.dominators import DominatorTree, find_dominators
from halfbyte.ptx.inline_calls import inline_calls
from halfbyte.ptx.liveness import find_liveness
from halfbyte.ptx.parser import parse
from halfbyte.ptx.register_effects import RegisterEffects, find_effects
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import Instruction, Kernel, Module
from halfbyte.virtual.lowering import KernelLayout, make_layout

_SHOWN_NAME = 48


@dataclass(frozen=True, eq=False)
class KernelText:
    """A kernel with its calls inlined.

    Attributes:
        name: the entry's name.
        module: the PTX module it is in.
        gpu: the GPU whose layout of shared memory is assumed.
        body: the flat body.
        flow: its control-flow graph; instruction indices count `flow.instructions`.
        layout: addresses of shared variables and offsets of parameters, the virtual GPU's own.
    """

    name: str
    module: Module
    gpu: Gpu
    body: FlatBody
    flow: ControlFlow
    layout: KernelLayout

    @cached_property
    def dominators(self) -> DominatorTree:
        """The dominator tree of `flow`."""
        return find_dominators(self.flow)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Natural loops, smallest first."""
        return find_loops(self.flow, self.dominators)

    @cached_property
    def effects(self) -> tuple[RegisterEffects, ...]:
        """The registers that each instruction reads and writes."""
        return tuple(map(find_effects, self.flow.instructions))

    @cached_property
    def live_in(self) -> tuple[frozenset[str], ...]:
        """The registers that are read, from each block on, before they are written."""
        effects = dict(zip(map(id, self.flow.instructions), self.effects, strict=True))
        liveness = find_liveness(self.flow, lambda instruction: effects[id(instruction)])
        return tuple(frozenset(liveness.list_names(registers)) for registers in liveness.live_in)

    @cached_property
    def blocks(self) -> list[int]:
        """The block of each instruction."""
        return self.flow.list_blocks()

    def find_directive(self, name: str) -> tuple[int, ...] | None:
        """Return the integers of `.name` of the entry, None where it is absent."""
        return self.module.find_kernel(self.name).find_directive(name)

    def list_instructions(self, prefix: str) -> Iterator[tuple[int, Instruction]]:
        """Yield (index, instruction) of each opcode that starts with `prefix`."""
        for index, instruction in enumerate(self.flow.instructions):
            if instruction.opcode.startswith(prefix):
                yield index, instruction

    def list_loops_around(self, index: int) -> tuple[Loop, ...]:
        """Return the loops that an instruction is in, innermost first."""
        block = self.blocks[index]
        return tuple(loop for loop in self.loops if block in loop.blocks)

    def describe(self, index: int) -> str:
        """Return "kernel: PTX line 12", for findings."""
        return f"{self.short_name}: PTX line {self.flow.instructions[index].line}"

    def quote(self, index: int) -> str:
        """Return "PTX line 12: opcode operands", for evidence."""
        instruction = self.flow.instructions[index]
        return f"PTX line {instruction.line}: {instruction}"

    @property
    def short_name(self) -> str:
        """The name, cut: those that CuTe DSL makes have hundreds of characters."""
        return self.name if len(self.name) <= _SHOWN_NAME else self.name[: _SHOWN_NAME - 3] + "..."


def read_kernel(ptx: str | Module, name: str = "", gpu: str | Gpu = "b200") -> KernelText:
    """Return a kernel of a PTX text, the only one where `name` is empty.

    Raises PtxError for text that is no PTX, UsageError where the kernel cannot be chosen.
    """
    module = ptx if isinstance(ptx, Module) else parse(ptx.removesuffix("\0"))
    record = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    body = inline_calls(module, choose_kernel(module, name))
    layout = make_layout(module, body, record.reserved_shared_bytes)
    return KernelText(body.name, module, record, body, make_control_flow(body), layout)


def choose_kernel(module: Module, name: str) -> Kernel:
    """Return the entry `name`, or the only one; UsageError naming those there are."""
    kernels = [kernel for kernel in module.kernels if kernel.body is not None]
    if not kernels:
        raise PtxError("the module has no kernel with a body")
    chosen = [kernel for kernel in kernels if not name or kernel.name == name]
    if len(chosen) != 1:
        names = ", ".join(kernel.name for kernel in kernels)
        raise UsageError(f"kernel {name!r} is not the name of one kernel; the module has {names}")
    return chosen[0]
