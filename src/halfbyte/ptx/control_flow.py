"""Basic blocks of a flat body and the edges between them.

Blocks are numbered in the order of the text, block 0 is the entry, and one more node, `exit`,
follows every way out (`ret`, `exit`, `trap`, the end of the text).
"""

from dataclasses import dataclass

from halfbyte.errors import PtxError
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import Instruction, Label, Symbol

_LEAVING = frozenset(("ret", "exit", "trap"))
_JUMPING = frozenset(("bra", "brx"))


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """The control-flow graph of a body.

    Attributes:
        instructions: the statements without labels; all indices below count these.
        labels: instruction index of each label; the number of instructions for one at the end.
        starts: first instruction of each block, ascending; one more entry closes the last block.
        successors: per block, the nodes that may follow, without repeats: for a guarded branch its
            target and then the next block.
        predecessors: per node, `exit` included, the blocks that lead to it.
    """

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    starts: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks, `exit` not counted."""
        return len(self.successors)

    @property
    def exit(self) -> int:
        """The node that stands for the end of the thread or the return of the function."""
        return len(self.successors)

    def block_range(self, block: int) -> range:
        """Return the instruction indices of a block."""
        return range(self.starts[block], self.starts[block + 1])

    def last_instruction(self, block: int) -> int:
        """Return the index of the instruction that ends a block."""
        return self.starts[block + 1] - 1

    def list_blocks(self) -> list[int]:
        """Return the block of each instruction."""
        return [block for block in range(self.num_blocks) for _ in self.block_range(block)]


def make_control_flow(body: FlatBody) -> ControlFlow:
    """Return the graph of `body`; PtxError for a branch to a label or table that is not there."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.statements:
        if isinstance(statement, Label):
            labels[statement.name] = len(instructions)
        else:
            instructions.append(statement)
    starts = _find_starts(instructions, labels)
    block_at = {start: block for block, start in enumerate(starts)}  # the end is node `exit`
    successors = []
    for block in range(len(starts) - 1):
        last = instructions[starts[block + 1] - 1]
        targets = [block_at[labels[label]] for label in find_targets(last, body, labels)]
        if is_leaving(last):
            targets.append(len(starts) - 1)
        if is_falling_through(last):
            targets.append(block + 1)
        successors.append(tuple(dict.fromkeys(targets)))
    predecessors: list[list[int]] = [[] for _ in starts]
    for block, targets_of_block in enumerate(successors):
        for target in targets_of_block:
            predecessors[target].append(block)
    return ControlFlow(
        tuple(instructions),
        labels,
        tuple(starts),
        tuple(successors),
        tuple(map(tuple, predecessors)),
    )


def _find_starts(instructions: list[Instruction], labels: dict[str, int]) -> list[int]:
    starts = {0, len(instructions), *labels.values()}
    for index, instruction in enumerate(instructions):
        family = find_family(instruction)
        if family in _LEAVING or family in _JUMPING:
            starts.add(index + 1)
    return sorted(starts)


def find_family(instruction: Instruction) -> str:
    """Return the opcode up to its first dot."""
    return instruction.opcode.partition(".")[0]


def is_leaving(instruction: Instruction) -> bool:
    """Return whether the instruction ends the thread or returns from the function."""
    return find_family(instruction) in _LEAVING


def is_falling_through(instruction: Instruction) -> bool:
    """Return whether the next instruction in the text may be the next one to run."""
    if instruction.guard is not None:
        return True
    family = find_family(instruction)
    return family not in _LEAVING and family not in _JUMPING


def find_targets(
    instruction: Instruction, body: FlatBody, labels: dict[str, int]
) -> tuple[str, ...]:
    """Return the labels that a `bra` or `brx.idx` names, () for anything else.

    Raises PtxError for a name that is no label of the body, or no table of branch targets.
    """
    family = find_family(instruction)
    if family not in _JUMPING:
        return ()
    position = 0 if family == "bra" else 1
    operands = instruction.operands
    name = operands[position] if len(operands) > position else None
    line = instruction.line
    if not isinstance(name, Symbol):
        raise PtxError(f"line {line}: a branch needs a label to go to: {instruction}", line)
    if family == "bra":
        targets: tuple[str, ...] = (name.name,)
    else:
        if name.name not in body.branch_tables:
            message = f"{name.name!r} is no table of `.branchtargets`: {instruction}"
            raise PtxError(f"line {line}: {message}", line)
        targets = body.branch_tables[name.name]
    for target in targets:
        if target not in labels:
            message = f"{target!r} is no label of {body.name}: {instruction}"
            raise PtxError(f"line {line}: {message}", line)
    return targets
