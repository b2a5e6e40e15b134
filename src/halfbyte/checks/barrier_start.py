"""Check: rings start with the right parity.

A fresh barrier is in phase 0: a wait for parity 0 returns once that phase completes, a wait for
parity 1 returns at once. Whoever fills a ring's slots first (a producer) therefore starts at parity
1, whoever reads them (a consumer) at parity 0. The other way round the producer waits for a slot
that nobody gives back, for ever; or the consumer reads what has not come.

Both are decided from the first pass through every loop: which barriers are waited for with which
parity, and which waits stand before the arrivals at them. Where the text does not decide it, the
virtual GPU does: its deadlock report names the wait (`explain_hang`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.known_bits import KnownBits
from halfbyte.checks.loops import order_blocks
from halfbyte.checks.register_values import (
    SHARED_OFFSET_BITS,
    RegisterValues,
    find_first_pass,
    find_lasting,
    find_reached_blocks,
)
from halfbyte.ptx.syntax import Address, Instruction, Operand
from halfbyte.virtual.hang_report import HangReport

CHECK = "barrier-start"
_WAITS = ("mbarrier.try_wait.parity", "mbarrier.test_wait.parity")
_ARRIVALS = ("mbarrier.arrive", "tcgen05.commit", "cp.async.mbarrier.arrive")
_FILLS = ("expect_tx",)  # in the opcode of what arms a barrier with bytes to come
_READS = ("tcgen05.ld",)
_MOST_WARPS = 32
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


def check_barrier_start(kernel: KernelText) -> CheckReport:
    """Return rings whose producer or consumer starts with the wrong parity."""
    values = find_first_pass(kernel)
    waits, num_unknown = list_first_waits(values)
    lasting = find_lasting(kernel)
    arrivals = list_arrivals(values, lasting)
    findings = [
        *_find_stuck_producers(kernel, waits, arrivals),
        *_find_early(lasting, waits, arrivals),
    ]
    if num_unknown:
        message = (
            f"{num_unknown} waits whose barrier or first parity cannot be traced; the virtual GPU "
            "decides them"
        )
        place = kernel.short_name
        findings.append(CheckFinding(f"{CHECK}/unknown", Severity.UNDECIDED, place, message))
    evidence = tuple(
        Evidence(
            f"first wait on the barrier at shared+0x{wait.barriers[0]:x}: parity {wait.parity}",
            kernel.quote(wait.index),
        )
        for wait in waits
        if len(wait.barriers) == 1
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
        for prefix in _WAITS
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


def _find_stuck_producers(
    kernel: KernelText, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Iterator[CheckFinding]:
    """Yield waits of producers that no arrival ever answers."""
    certain = find_blocked(kernel, waits, arrivals, is_certain=True)
    likely = find_blocked(kernel, waits, arrivals, is_certain=False)
    for wait in waits:
        (barrier, *others) = wait.barriers
        if wait.parity or others or barrier not in likely or not _fills_slot(kernel, wait):
            continue
        needed = {
            other
            for arrival in arrivals
            if barrier in arrival.first
            for ahead in waits
            if not ahead.parity and _stands_before(kernel, ahead, arrival)
            for other in ahead.barriers
        }
        names = ", ".join(f"shared+0x{other:x}" for other in sorted(needed))
        message = (
            f"a producer starts at parity 0 on the fresh barrier at shared+0x{barrier:x} and waits "
            f"for ever: all arrivals there stand behind waits on {names}, which wait for it. A "
            "producer starts at parity 1"
        )
        severity = Severity.ERROR if barrier in certain else Severity.UNDECIDED
        if severity is Severity.UNDECIDED:
            message += "; an arrival whose barrier cannot be traced may answer it"
        place = kernel.describe(wait.index)
        yield CheckFinding(f"{CHECK}/producer-parity", severity, place, message)


def find_blocked(
    kernel: KernelText,
    waits: Sequence[FirstWait],
    arrivals: Sequence[Arrival],
    is_certain: bool,
) -> set[int]:
    """Return the barriers whose first phase never completes.

    The largest set in which every arrival at a barrier stands behind a wait for parity 0 on
    barriers of the set. An arrival that stands behind no such wait reaches every barrier that its
    address allows; with `is_certain` false, those of its first pass alone.
    """
    blocked = {b for wait in waits for b in wait.barriers} | {
        b for arrival in arrivals for b in arrival.first
    }
    dead = list(arrivals)
    is_changed = True
    while is_changed:
        is_changed = False
        for arrival in tuple(dead):
            is_behind = any(
                not wait.parity
                and blocked.issuperset(wait.barriers)
                and _stands_before(kernel, wait, arrival)
                for wait in waits
            )
            if not is_behind:
                dead.remove(arrival)
                reached = {
                    barrier
                    for barrier in blocked
                    if (arrival.may_reach(barrier) if is_certain else barrier in arrival.first)
                }
                blocked -= reached
                is_changed = True
    return blocked


def _stands_before(kernel: KernelText, wait: FirstWait, arrival: Arrival) -> bool:
    return _comes_before(kernel, wait, arrival.index)


def _comes_before(kernel: KernelText, wait: FirstWait, index: int) -> bool:
    block = kernel.blocks[index]
    if block == wait.block:
        return wait.index < index
    return kernel.dominators.dominates(wait.block, block)


def _fills_slot(kernel: KernelText, wait: FirstWait) -> bool:
    """Return whether what follows a wait in its role fills a slot with bytes."""
    return any(
        _comes_before(kernel, wait, index)
        for index, instruction in kernel.list_instructions("mbarrier.")
        if any(word in instruction.opcode for word in _FILLS)
    )


def _find_early(
    lasting: RegisterValues, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Iterator[CheckFinding]:
    """Yield consumers that start at parity 1: of bytes to come, and of an MMA's result."""
    kernel = lasting.kernel
    instructions = kernel.flow.instructions
    filled = {
        barrier
        for arrival in arrivals
        for barrier in arrival.first
        if any(word in instructions[arrival.index].opcode for word in _FILLS)
    }
    committed = {
        barrier
        for arrival in arrivals
        for barrier in arrival.first
        if instructions[arrival.index].opcode.startswith("tcgen05.commit")
    }
    rightly_started = {
        wait.block for wait in waits if not wait.parity and committed.issuperset(wait.barriers)
    }
    for wait in waits:
        if not wait.parity or len(wait.barriers) > 1:
            continue
        if _may_follow_another(kernel, wait, lasting):
            continue
        what = ""
        if wait.barriers[0] in filled:
            what = "the bytes of its first phase have come"
        elif wait.barriers[0] in committed and _reads_result(kernel, wait, rightly_started):
            what = "the first product is complete"
        if what:
            message = (
                "a consumer starts at parity 1 on the fresh barrier at "
                f"shared+0x{wait.barriers[0]:x} and passes at once, before {what}. A consumer "
                "starts at parity 0"
            )
            place = kernel.describe(wait.index)
            yield CheckFinding(f"{CHECK}/consumer-parity", Severity.ERROR, place, message)


def _reads_result(kernel: KernelText, wait: FirstWait, rightly_started: set[int]) -> bool:
    """Return whether tensor memory is read behind a wait and behind none that started rightly.

    `rightly_started` are the blocks behind waits for parity 0 on what commits arrive at.
    """
    return any(
        _comes_before(kernel, wait, index)
        and not any(
            kernel.dominators.dominates(block, kernel.blocks[index]) for block in rightly_started
        )
        for prefix in _READS
        for index, _ in kernel.list_instructions(prefix)
    )


def _may_follow_another(kernel: KernelText, wait: FirstWait, lasting: RegisterValues) -> bool:
    """Return whether another wait ahead in the same role may have been on the same barrier.

    Then this one need not be the first: a ring that was gone through in a loop before has other
    parities.
    """
    ahead = _find_blocks_ahead(kernel, wait) & _find_role(kernel, wait)
    (barrier,) = wait.barriers
    for prefix in _WAITS:
        for index, instruction in kernel.list_instructions(prefix):
            known = lasting.read(index, instruction.operands[1]).resize(SHARED_OFFSET_BITS)
            may_reach = barrier & known.mask == known.value
            if index != wait.index and kernel.blocks[index] in ahead and may_reach:
                return True
    return False


def _find_role(kernel: KernelText, wait: FirstWait) -> set[int]:
    """Return the blocks of the warps that come to a wait; all where their number is not known."""
    sizes = kernel.find_directive("reqntid") or kernel.find_directive("maxntid")
    if not sizes or sizes[0] > 32 * _MOST_WARPS:
        return set(range(kernel.flow.num_blocks))
    roles = (find_reached_blocks(kernel, warp) for warp in range(-(-sizes[0] // 32)))
    block = kernel.blocks[wait.index]
    return {other for role in roles if block in role for other in role}


def _find_blocks_ahead(kernel: KernelText, wait: FirstWait) -> set[int]:
    flow = kernel.flow
    position = {block: number for number, block in enumerate(order_blocks(flow))}
    ahead: set[int] = set()
    waiting = [kernel.blocks[wait.index]]
    while waiting:
        block = waiting.pop()
        for previous in flow.predecessors[block]:
            is_forward = position.get(previous, len(position)) < position.get(block, 0)
            if previous not in ahead and is_forward:
                ahead.add(previous)
                waiting.append(previous)
    return ahead


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
