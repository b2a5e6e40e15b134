"""Which registers and branches are the same in all lanes of a warp.

A register is uniform if at every instruction the lanes that run it together hold one value in it.
The analysis is conservative: what it does not know counts as divergent. It takes for granted that
lanes which a branch splits are together again at its immediate post-dominator; what they do in
between may differ, so a register written there and read where paths meet is divergent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.dominators import find_post_dominators
from halfbyte.ptx.liveness import Liveness, find_liveness, iterate_bits
from halfbyte.ptx.register_effects import EffectsOf, find_effects, list_registers
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import (
    Address,
    ArgumentList,
    Immediate,
    Instruction,
    Operand,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Vector,
)

# Special registers that all lanes of a warp read alike, without the axis.
_UNIFORM_SPECIAL_REGISTERS = (
    "%ntid %ctaid %nctaid %clusterid %nclusterid %cluster_ctaid %cluster_nctaid %warpid %nwarpid "
    "%smid %nsmid %gridid %cluster_ctarank %cluster_nctarank %is_explicit_cluster "
    "%total_smem_size %aggr_smem_size %dynamic_smem_size %current_graph_exec"
)
UNIFORM_SPECIAL_REGISTERS = frozenset(_UNIFORM_SPECIAL_REGISTERS.split())

# Results that depend on the operands alone.
_PURE_FAMILIES = (
    "abs add and bfe bfi bfind bmsk brev clz cnot copysign cos createpolicy cvt cvta div dp2a dp4a "
    "ex2 fma fns getctarank isspacep lg2 lop3 mad mad24 mapa max min mov mul mul24 neg not or popc "
    "prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct sqrt sub szext tanh testp xor"
)
PURE_FAMILIES = frozenset(_PURE_FAMILIES.split())

# One instruction of a warp reads one address for all lanes.
_LOADING_FAMILIES = frozenset(("ld", "ldu", "tex", "tld4", "suld"))

# Spaces of which every lane has its own.
_LANE_SPACES = ("local", "param")

# Results that are one value for the lanes named in the member mask, if the mask is one.
_AGREEING = ("vote.sync.", "redux.sync.", "match.all.sync.")
_SHUFFLE_WHOLE_WARP = 31  # the clamp of a shfl whose segment is the warp
_SHUFFLE_MASK = 0x1F1F


@dataclass(frozen=True, slots=True)
class Uniformity:
    """The result: names of divergent registers, instruction indices of divergent branches.

    A divergent branch is a `bra`, `brx` or way out that some lanes of a warp may take and others
    not.
    """

    divergent_registers: frozenset[str]
    divergent_branches: frozenset[int]

    def is_uniform(self, register: str) -> bool:
        """Return whether all lanes hold the same value in a register."""
        return register not in self.divergent_registers


def find_uniformity(
    body: FlatBody,
    flow: ControlFlow,
    liveness: Liveness | None = None,
    effects_of: EffectsOf = find_effects,
) -> Uniformity:
    """Return which registers and branches of a body may differ between the lanes of a warp."""
    if liveness is None:
        liveness = find_liveness(flow, effects_of)
    return _Analysis(body, flow, liveness).run()


class _Analysis:
    def __init__(self, body: FlatBody, flow: ControlFlow, liveness: Liveness) -> None:
        self.body = body
        self.flow = flow
        self.liveness = liveness
        self.post_dominators = find_post_dominators(flow).immediate
        self.bits = {name: bit for bit, name in enumerate(liveness.names)}
        self.divergent = 0
        self.branches: set[int] = set()
        self.blocks = flow.list_blocks()
        self.readers: dict[int, list[int]] = {}  # register -> instructions
        self.defined = [0] * flow.num_blocks  # registers a block writes
        for index, read in enumerate(liveness.reads):
            for bit in iterate_bits(read):
                self.readers.setdefault(bit, []).append(index)
            self.defined[self.blocks[index]] |= liveness.writes[index]

    def run(self) -> Uniformity:
        waiting = list(range(len(self.flow.instructions)))
        if self.flow.num_blocks:
            # read before written, or a parameter of a function: anything may be in there
            self._mark(self.liveness.live_in[0], waiting)
        while waiting:
            index = waiting.pop()
            self._visit(index, waiting)
        names = self.liveness.list_names(self.divergent)
        return Uniformity(frozenset(names), frozenset(self.branches))

    def _mark(self, registers: int, waiting: list[int]) -> None:
        for bit in iterate_bits(registers & ~self.divergent):
            waiting.extend(self.readers.get(bit, ()))
        self.divergent |= registers

    def _visit(self, index: int, waiting: list[int]) -> None:
        instruction = self.flow.instructions[index]
        written = self.liveness.writes[index]
        if written & ~self.divergent and not self._gives_one_value(index, instruction):
            self._mark(written, waiting)
        block = self.blocks[index]
        if index != self.flow.last_instruction(block) or len(self.flow.successors[block]) < 2:
            return
        is_split = self.liveness.reads[index] & self.divergent or self._reads_lanes(instruction)
        if is_split and index not in self.branches:
            self.branches.add(index)
            self._mark(self._find_meeting_registers(block), waiting)

    def _gives_one_value(self, index: int, instruction: Instruction) -> bool:
        if self._is_guard_divergent(instruction):
            return False
        opcode = instruction.opcode
        family = opcode.partition(".")[0]
        if opcode.startswith(_AGREEING):
            return self._is_one_value(instruction.operands[-1])
        if opcode == "activemask.b32" or family == "elect":
            return family != "elect"
        if opcode.startswith("shfl.sync.idx."):
            return self._is_broadcast(instruction.operands)
        if family in _LOADING_FAMILIES:
            if family == "ld" and ".local" in opcode:
                return False
        elif family not in PURE_FAMILIES:
            return False
        are_registers_uniform = not self.liveness.reads[index] & self.divergent
        return are_registers_uniform and not self._reads_lanes(instruction)

    def _is_guard_divergent(self, instruction: Instruction) -> bool:
        guard = instruction.guard
        return guard is not None and self._is_divergent(guard.register.name)

    def _is_divergent(self, register: str) -> bool:
        if register in self.bits:
            return bool(self.divergent >> self.bits[register] & 1)
        return register.split(".")[0] not in UNIFORM_SPECIAL_REGISTERS

    def _reads_lanes(self, instruction: Instruction) -> bool:
        """Whether an operand is a special register or a variable of which each lane has its own."""
        return any(map(self._is_of_lane, instruction.operands))

    def _is_of_lane(self, operand: Operand) -> bool:
        match operand:
            case Symbol(name) | SymbolOffset(name):
                variable = self.body.variables.get(name)
                return variable is not None and variable.space in _LANE_SPACES
            case Address(target) | TensorAddress(Address(target)):
                return self._is_of_lane(target)
            case Vector(items) | ArgumentList(items):
                return any(map(self._is_of_lane, items))
        return any(
            register not in self.bits and self._is_divergent(register)
            for register in list_registers(operand)
        )

    def _is_one_value(self, operand: Operand) -> bool:
        return not self._is_of_lane(operand) and not any(
            self._is_divergent(register) for register in list_registers(operand)
        )

    def _is_broadcast(self, operands: Sequence[Operand]) -> bool:
        if len(operands) != 5:  # d[|p], a, lane, clamp and segment, member mask
            return False
        lane, clamp, mask = operands[2:]
        is_whole = (
            isinstance(clamp, Immediate) and clamp.bits & _SHUFFLE_MASK == _SHUFFLE_WHOLE_WARP
        )
        return is_whole and self._is_one_value(lane) and self._is_one_value(mask)

    def _find_meeting_registers(self, block: int) -> int:
        """Return the registers that lanes split at `block` may bring along with other values.

        They are those live where two ways out of the block meet and written on the way there.
        """
        stop = self.post_dominators[block]
        ways = [self._list_reached(node, stop) for node in self.flow.successors[block]]
        seen: set[int] = set()
        meeting: set[int] = set()
        for way in ways:
            meeting |= seen & way
            seen |= way
        written = 0
        for node in seen - {stop}:
            if node < self.flow.num_blocks:
                written |= self.defined[node]
        live = 0
        for node in meeting:
            if node < self.flow.num_blocks:
                live |= self.liveness.live_in[node]
        return written & live

    def _list_reached(self, start: int, stop: int) -> set[int]:
        reached = {start}
        stack = [start] if start != stop else []
        while stack:
            node = stack.pop()
            for target in self.flow.successors[node] if node < self.flow.num_blocks else ():
                if target not in reached:
                    reached.add(target)
                    if target != stop:
                        stack.append(target)
        return reached
