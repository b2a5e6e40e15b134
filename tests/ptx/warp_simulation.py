"""A warp that runs a few instruction forms, lanes together again at post-dominators.

Shares nothing with the analyses but the graph: it watches whether lanes that run an instruction
together read different values.
"""

from dataclasses import dataclass, field

from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.dominators import find_post_dominators
from halfbyte.ptx.syntax import Immediate, Instruction, Negated, Operand, Register

NUM_LANES = 4
SPECIAL = {
    "%ctaid.x": [3] * NUM_LANES,
    "%warpid": [1] * NUM_LANES,
    "%tid.x": list(range(NUM_LANES)),
}


@dataclass
class WarpSimulation:
    """Registers per lane, and what was found to differ between lanes that act together."""

    flow: ControlFlow
    registers: dict[str, list[int]] = field(default_factory=dict)
    differing_registers: set[str] = field(default_factory=set)
    differing_branches: set[int] = field(default_factory=set)
    steps: int = 0

    def run(self, max_steps: int = 400) -> None:
        """Run from the first block, as a stack of lane sets with their reconvergence points."""
        rejoin = find_post_dominators(self.flow).immediate
        stack = [(0, self.flow.exit, frozenset(range(NUM_LANES)))]  # block, stop there, lanes
        while stack and self.steps < max_steps:
            block, stop, lanes = stack.pop()
            if block == stop or not lanes:
                continue
            ways = self._run_block(block, lanes)
            ways = {target: group for target, group in ways.items() if target != self.flow.exit}
            if len(ways) == 1:
                ((target, group),) = ways.items()
                stack.append((target, stop, group))
                continue
            meeting = rejoin[block]
            alive = frozenset().union(*ways.values()) if ways else frozenset()
            stack.append((meeting, stop, alive if meeting != self.flow.exit else frozenset()))
            stack.extend((target, meeting, group) for target, group in ways.items())

    def _run_block(self, block: int, lanes: frozenset[int]) -> dict[int, frozenset[int]]:
        following = block + 1
        ways: dict[int, frozenset[int]] = {}
        for index in self.flow.block_range(block):
            self.steps += 1
            instruction = self.flow.instructions[index]
            active = lanes
            if instruction.guard is not None:
                values = self._read(instruction.guard.register, lanes)
                negated = instruction.guard.negated
                active = frozenset(lane for lane in lanes if bool(values[lane]) != negated)
            if instruction.opcode in ("bra", "ret", "exit"):
                target = self._find_target(instruction)
                if active not in (lanes, frozenset()) and target != following:
                    self.differing_branches.add(index)
                ways[target] = ways.get(target, frozenset()) | active
                lanes -= active
            else:
                self._execute(instruction, active, lanes)
        if lanes:
            ways[following] = ways.get(following, frozenset()) | lanes
        return {target: group for target, group in ways.items() if group}

    def _find_target(self, instruction: Instruction) -> int:
        if instruction.opcode != "bra":
            return self.flow.exit
        start = self.flow.labels[instruction.operands[0].name]  # type: ignore[union-attr]
        return self.flow.starts.index(start)

    def _read(self, operand: Operand, lanes: frozenset[int]) -> list[int]:
        if isinstance(operand, Immediate):
            return [operand.bits] * NUM_LANES
        if isinstance(operand, Negated):
            return [1 - value for value in self._read(operand.register, lanes)]
        assert isinstance(operand, Register)
        if operand.name in SPECIAL:
            return SPECIAL[operand.name]
        # what was never written differs from lane to lane
        values = self.registers.setdefault(operand.name, [17 * n + 5 for n in range(NUM_LANES)])
        if len({values[lane] for lane in lanes}) > 1:
            self.differing_registers.add(operand.name)
        return values

    def _execute(
        self, instruction: Instruction, active: frozenset[int], lanes: frozenset[int]
    ) -> None:
        target = instruction.operands[0]
        assert isinstance(target, Register)
        sources = [self._read(operand, lanes) for operand in instruction.operands[1:]]
        family = instruction.opcode.partition(".")[0]
        results = self.registers.setdefault(target.name, [17 * n + 5 for n in range(NUM_LANES)])
        for lane in active:
            first = sources[0][lane]
            if family == "add":
                results[lane] = (first + sources[1][lane]) % 11
            elif family == "setp":
                results[lane] = int(first < sources[1][lane])
            else:
                assert family == "mov"
                results[lane] = first
