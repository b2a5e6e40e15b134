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

from halfbyte.checks.barrier_events import (
    WAITS,
    Arrival,
    FirstWait,
    comes_before,
    list_arrivals,
    list_first_waits,
)
from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.loops import order_blocks
from halfbyte.checks.register_values import (
    SHARED_OFFSET_BITS,
    RegisterValues,
    find_first_pass,
    find_lasting,
    find_reached_blocks,
)
from halfbyte.virtual.hang_report import HangReport

CHECK = "barrier-start"
_FILLS = ("expect_tx",)  # in the opcode of what arms a barrier with bytes to come
_READS = ("tcgen05.ld",)
_MOST_WARPS = 32


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
            if not ahead.parity and comes_before(kernel, ahead, arrival.index)
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
                and comes_before(kernel, wait, arrival.index)
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


def _fills_slot(kernel: KernelText, wait: FirstWait) -> bool:
    """Return whether what follows a wait in its role fills a slot with bytes."""
    return any(
        comes_before(kernel, wait, index)
        for index, instruction in kernel.list_instructions("mbarrier.")
        if any(word in instruction.opcode for word in _FILLS)
    )


def _find_early(
    lasting: RegisterValues, waits: Sequence[FirstWait], arrivals: Sequence[Arrival]
) -> Iterator[CheckFinding]:
    """Yield consumers that start at parity 1: of bytes to come, and of an MMA's result."""
    kernel = lasting.kernel
    instructions = kernel.flow.instructions
    # An arrival whose barrier is one of several is no proof for any of them.
    certain = [
        (arrival.first[0], instructions[arrival.index].opcode)
        for arrival in arrivals
        if len(arrival.first) == 1
    ]
    filled = {barrier for barrier, opcode in certain if any(word in opcode for word in _FILLS)}
    committed = {barrier for barrier, opcode in certain if opcode.startswith("tcgen05.commit")}
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
        comes_before(kernel, wait, index)
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
    for prefix in WAITS:
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
