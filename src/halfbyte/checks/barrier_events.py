"""Waits on mbarriers and arrivals at them, as the first pass through the loops meets them."""

from dataclasses import dataclass

from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.known_bits import KnownBits
from halfbyte.checks.register_values import SHARED_OFFSET_BITS, RegisterValues
from halfbyte.ptx.syntax import Address, Instruction, Operand

WAITS = ("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")
_ARRIVALS = ("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive")
_MOST_UNKNOWN_BITS = 3  # of an address: a ring position behind a loop that may not run


@dataclass(frozen=True, slots=True)
class FirstWait:
    """The first wait of one role on one barrier.

    Attributes:
        index: of the instruction in the kernel's control flow.
        block: from which on the wait is over; where a `try_wait` ahead may have answered already,
            the block that branches around the wait.
        barriers: the offsets in shared memory that it may have in the first pass, mostly one.
        parity: in the first pass.
    """

    index: int
    block: int
    barriers: tuple[int, ...]
    parity: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One instruction that arrives at a barrier.

    Attributes:
        index: of the instruction in the kernel's control flow.
        first: the offsets that it may have in the first pass; () where they are not known.
        lasting: what is known of the offset in every pass.
    """

    index: int
    first: tuple[int, ...]
    lasting: KnownBits

    def may_reach(self, barrier: int) -> bool:
        """Return whether it arrives at this barrier in some pass."""
        return barrier & self.lasting.mask == self.lasting.value


def list_first_waits(values: RegisterValues) -> tuple[tuple[FirstWait, ...], int]:
    """Return the waits of which barrier and parity are known, and how many are not.

    Waits behind another wait on the same barrier are left out. Waits behind a loop whose number of
    passes is not known (a producer that drains its ring) are not counted as unknown.
    """
    kernel = values.kernel
    found: list[FirstWait] = []
    num_unknown = 0
    for prefix in WAITS:
        for index, instruction in kernel.list_instructions(prefix):
            barriers, parity = _read_wait(values, index, instruction)
            if not barriers or parity is None:
                num_unknown += not _stands_behind_loop(kernel, index)
            else:
                block = _find_wait_block(kernel, index)
                found.append(FirstWait(index, block, barriers, parity))
    found.sort(key=lambda wait: wait.index)
    first = [
        wait
        for wait in found
        if not any(
            other.barriers == wait.barriers
            and other.index < wait.index
            and kernel.dominators.dominates(other.block, kernel.blocks[wait.index])
            for other in found
        )
    ]
    return tuple(first), num_unknown


def _read_wait(
    values: RegisterValues, index: int, instruction: Instruction
) -> tuple[tuple[int, ...], int | None]:
    """Return barriers and parity of `try_wait.parity done, [barrier], parity{, limit}`."""
    barriers = list_offsets(values, index, instruction.operands[1])
    return barriers, values.read(index, instruction.operands[2]).read_field(0, 1)


def list_offsets(values: RegisterValues, index: int, operand: Operand) -> tuple[int, ...]:
    """Return the offsets in shared memory that an address may have, () where they are too many."""
    address = values.read(index, operand).resize(SHARED_OFFSET_BITS)
    unknown = [bit for bit in range(SHARED_OFFSET_BITS) if not address.mask >> bit & 1]
    if len(unknown) > _MOST_UNKNOWN_BITS:
        return ()
    offsets = [address.value]
    for bit in unknown:
        offsets += [offset | 1 << bit for offset in offsets]
    return tuple(offsets)


def _stands_behind_loop(kernel: KernelText, index: int) -> bool:
    """Return whether an arrival or a wait in a loop comes before this wait on every path."""
    block = kernel.blocks[index]
    spins = {loop.header for loop in kernel.loops if block in loop.blocks}
    return any(
        loop.header not in spins
        and block not in loop.blocks
        and len(loop.blocks) > 2  # not the spin of another wait
        and _can_follow(kernel, loop.blocks, block)
        for loop in kernel.loops
    )


def _can_follow(kernel: KernelText, blocks: frozenset[int], target: int) -> bool:
    seen = set(blocks)
    waiting = list(blocks)
    while waiting:
        for following in kernel.flow.successors[waiting.pop()]:
            if following == target:
                return True
            if following != kernel.flow.exit and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _find_wait_block(kernel: KernelText, index: int) -> int:
    """Return the block behind which a wait is over.

    `@done bra behind; wait` with `done` from an earlier `try_wait` skips a wait that is over.
    """
    flow, block = kernel.flow, kernel.blocks[index]
    spins = [loop for loop in kernel.list_loops_around(index) if len(loop.blocks) <= 2]
    entry = spins[0].header if spins else block
    ahead = [b for b in flow.predecessors[entry] if not spins or b not in spins[0].blocks]
    while len(ahead) == 1 and len(flow.successors[ahead[0]]) == 1:
        ahead = list(flow.predecessors[ahead[0]])
    if len(ahead) != 1:
        return block
    branch = flow.instructions[flow.last_instruction(ahead[0])]
    if branch.guard is None or branch.guard.negated:
        return block
    guard = branch.guard.register.name
    is_answered = any(
        guard in kernel.effects[position].writes
        for prefix in WAITS
        for position, _ in kernel.list_instructions(prefix)
    )
    return ahead[0] if is_answered else block


def list_arrivals(values: RegisterValues, lasting: RegisterValues) -> tuple[Arrival, ...]:
    """Return what arrives at barriers, `expect_tx` and commits included.

    Args:
        values: of the first pass.
        lasting: of every pass.
    """
    found = []
    for prefix in _ARRIVALS:
        for index, instruction in values.kernel.list_instructions(prefix):
            address = next(o for o in instruction.operands if isinstance(o, Address))
            known = lasting.read(index, address).resize(SHARED_OFFSET_BITS)
            found.append(Arrival(index, list_offsets(values, index, address), known))
    return tuple(found)


def comes_before(kernel: KernelText, wait: FirstWait, index: int) -> bool:
    """Return whether every path to an instruction goes through a wait."""
    block = kernel.blocks[index]
    if block == wait.block:
        return wait.index < index
    return kernel.dominators.dominates(wait.block, block)
