"""Check: rings start with the right parity.

A fresh barrier is in phase 0: a wait for parity 0 returns once that phase completes, a wait for
parity 1 returns at once. Whoever fills a ring's slots first (a producer) therefore starts at parity
1, whoever reads them (a consumer) at parity 0. The other way round the producer waits for a slot
that nobody gives back, for ever; or the consumer reads what has not come.

Both are decided from the first pass through every loop: which barriers are waited for with which
parity, and which waits stand before the arrivals at them. Where the text does not decide it, the
virtual GPU does: its deadlock report names the wait (`explain_hang`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.register_values import RegisterValues, find_first_pass
from halfbyte.ptx.syntax import Instruction
from halfbyte.virtual.hang_report import HangReport

CHECK = "barrier-start"
_WAITS = ("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")
_ARRIVALS = ("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive")
_FILLS = ("expect_tx",)  # in the opcode of what arms a barrier with bytes to come
_READS = ("tcgen05.ld",)


@dataclass(frozen=True, slots=True)
class FirstWait:
    """The first wait of one role on one barrier.

    Attributes:
        index: of the instruction in the kernel's control flow.
        block: from which on the wait is over; where a `try_wait` ahead may have answered already,
            the block that branches around the wait.
        barrier: offset in shared memory.
        parity: in the first pass.
    """

    index: int
    block: int
    barrier: int
    parity: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """One instruction that arrives at a barrier; `barrier` None where it is not known."""

    index: int
    barrier: int | None


def check_barrier_start(kernel: KernelText) -> CheckReport:
    """Return rings whose producer or consumer starts with the wrong parity."""
    values = find_first_pass(kernel)
    waits, num_unknown = list_first_waits(values)
    arrivals = list_arrivals(values)
    findings = [*_find_cycles(kernel, waits, arrivals), *_find_early(kernel, waits, arrivals)]
    if num_unknown:
        message = (
            f"{num_unknown} waits whose barrier or first parity cannot be traced; the virtual GPU "
            "decides them"
        )
        place = kernel.short_name
        findings.append(CheckFinding(f"{CHECK}/unknown", Severity.UNDECIDED, place, message))
    evidence = tuple(
        Evidence(
            f"first wait on the barrier at shared+0x{wait.barrier:x}: parity {wait.parity}",
            kernel.quote(wait.index),
        )
        for wait in waits
    )
    return CheckReport(CHECK, tuple(findings), evidence, len(waits) + num_unknown)


def list_first_waits(values: RegisterValues) -> tuple[tuple[FirstWait, ...], int]:
    """Return the waits of which barrier and parity are known, and how many are not.

    Waits behind another wait on the same barrier are left out. Waits behind a loop whose number of
    passes is not known (a producer that drains its ring) are not counted as unknown.
    """
    kernel = values.kernel
    found: list[FirstWait] = []
    num_unknown = 0
    for prefix in _WAITS:
        for index, instruction in kernel.list_instructions(prefix):
            barrier, parity = _read_wait(values, index, instruction)
            if barrier is None or parity is None:
                num_unknown += not _stands_behind_loop(kernel, index)
            else:
                block = _find_wait_block(kernel, index)
                found.append(FirstWait(index, block, barrier, parity & 1))
    found.sort(key=lambda wait: wait.index)
    first = [
        wait
        for wait in found
        if not any(
            other.barrier == wait.barrier
            and other.index < wait.index
            and kernel.dominators.dominates(other.block, kernel.blocks[wait.index])
            for other in found
        )
    ]
    return tuple(first), num_unknown


def _read_wait(
    values: RegisterValues, index: int, instruction: Instruction
) -> tuple[int | None, int | None]:
    """Return barrier and parity of `try_wait.parity done, [barrier], parity{, limit}`."""
    barrier = values.read_shared_offset(index, instruction.operands[1])
    return barrier, values.read(index, instruction.operands[2]).read_field(0, 1)


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
        for prefix in _WAITS
        for position, _ in kernel.list_instructions(prefix)
    )
    return ahead[0] if is_answered else block


def list_arrivals(values: RegisterValues) -> tuple[Arrival, ...]:
    """Return what arrives at barriers, `expect_tx` and commits included."""
    found = []
    for prefix in _ARRIVALS:
        for index, instruction in values.kernel.list_instructions(prefix):
            position = 1 if prefix == "mbarrier.arrive" and len(instruction.operands) > 1 else 0
            operands = instruction.operands
            address = operands[position] if _is_address(operands[position]) else operands[0]
            found.append(Arrival(index, values.read_shared_offset(index, address)))
    return tuple(found)


def _is_address(operand: object) -> bool:
    return type(operand).__name__ == "Address"


def _find_cycles(
    kernel: KernelText, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Iterator[CheckFinding]:
    """Yield the producers' waits that close a cycle: each barrier waits for the next one."""
    needs = _find_needs(kernel, waits, arrivals)
    is_complete = all(arrival.barrier is not None for arrival in arrivals)
    for wait in waits:
        if wait.parity or not _fills_slot(kernel, wait):
            continue
        cycle = _find_cycle(needs, wait.barrier)
        if cycle is None:
            continue
        chain = " -> ".join(f"shared+0x{barrier:x}" for barrier in cycle)
        message = (
            f"a producer starts at parity 0 on a fresh barrier and waits for ever: {chain}, where "
            "all arrivals at one stand behind a wait on the next. A producer starts at parity 1"
        )
        severity = Severity.ERROR if is_complete else Severity.UNDECIDED
        if not is_complete:
            message += "; some arrivals cannot be traced and may break the cycle"
        place = kernel.describe(wait.index)
        yield CheckFinding(f"{CHECK}/producer-parity", severity, place, message)


def _find_needs(
    kernel: KernelText, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Mapping[int, set[int]]:
    """Return, per barrier, those that must complete before any arrival at it."""
    needs: dict[int, set[int]] = {}
    for arrival in arrivals:
        if arrival.barrier is None:
            continue
        before = {
            wait.barrier
            for wait in waits
            if not wait.parity and _stands_before(kernel, wait, arrival)
        }
        known = needs.get(arrival.barrier)
        needs[arrival.barrier] = before if known is None else known & before
    return needs


def _stands_before(kernel: KernelText, wait: FirstWait, arrival: Arrival) -> bool:
    block = kernel.blocks[arrival.index]
    if block == wait.block:
        return wait.index < arrival.index
    return kernel.dominators.dominates(wait.block, block)


def _find_cycle(needs: Mapping[int, set[int]], start: int) -> tuple[int, ...] | None:
    """Return barriers from `start` back to it, each needing the next."""
    waiting: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    while waiting:
        path = waiting.pop(0)
        for barrier in sorted(needs.get(path[-1], ())):
            if barrier == start:
                return (*path, start)
            if barrier not in seen:
                seen.add(barrier)
                waiting.append((*path, barrier))
    return None


def _fills_slot(kernel: KernelText, wait: FirstWait) -> bool:
    """Return whether what follows a wait in its role fills a slot with bytes."""
    return any(
        _stands_before(kernel, wait, Arrival(index, None))
        for index, instruction in kernel.list_instructions("mbarrier.")
        if any(word in instruction.opcode for word in _FILLS)
    )


def _find_early(
    kernel: KernelText, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Iterator[CheckFinding]:
    """Yield consumers that start at parity 1: of bytes to come, and of an MMA's result."""
    instructions = kernel.flow.instructions
    filled = {
        arrival.barrier
        for arrival in arrivals
        if any(word in instructions[arrival.index].opcode for word in _FILLS)
    }
    committed = {
        arrival.barrier
        for arrival in arrivals
        if instructions[arrival.index].opcode.startswith("tcgen05.commit")
    }
    for wait in waits:
        if not wait.parity:
            continue
        what = ""
        if wait.barrier in filled:
            what = "the bytes of its first phase have come"
        elif wait.barrier in committed and _reads_result(kernel, wait):
            what = "the first product is complete"
        if what:
            message = (
                f"a consumer starts at parity 1 on the fresh barrier at shared+0x{wait.barrier:x} "
                f"and passes at once, before {what}. A consumer starts at parity 0"
            )
            place = kernel.describe(wait.index)
            yield CheckFinding(f"{CHECK}/consumer-parity", Severity.ERROR, place, message)


def _reads_result(kernel: KernelText, wait: FirstWait) -> bool:
    return any(
        _stands_before(kernel, wait, Arrival(index, None))
        for prefix in _READS
        for index, _ in kernel.list_instructions(prefix)
    )


def explain_hang(hang: HangReport) -> CheckReport:
    """Return what a deadlock of the virtual GPU has to do with starts of rings.

    Waits for parity 0 on several barriers at which nobody has arrived are what a producer that
    starts at parity 0 leaves behind: one of them is its own, the others wait for it.
    """
    fresh = hang.list_fresh_waits()
    findings: tuple[CheckFinding, ...] = ()
    if fresh:
        barriers = sorted({stop.facts["offset"] for stop in fresh})
        message = (
            "every wait is for the first phase of a fresh barrier, parity 0 with 0 phases "
            f"completed, on shared+{', '.join(map(hex, barriers))}, and nobody has arrived. A warp "
            "that fills slots, a producer, starts at parity 1"
        )
        place = "; ".join(f"{stop.place}, warp {stop.warp}" for stop in fresh)
        findings = (CheckFinding(f"{CHECK}/producer-parity", Severity.ERROR, place, message),)
    return CheckReport(CHECK, findings, num_examined=len(hang.waits))
