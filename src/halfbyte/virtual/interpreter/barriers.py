"""Barriers between threads of a CTA: bar, barrier, mbarrier."""

from halfbyte.errors import PtxError
from halfbyte.ptx.syntax import Instruction, Operand, Sink
from halfbyte.virtual.interpreter.machine import WARP, Mbarrier, NamedBarrier, Thread

PHASE_SHIFT = 32  # of a state token: phase above the pending count


def named_barrier(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """bar/barrier .sync, .arrive, .red: waits until the count of threads has come."""
    mode = next(word for word in opcode[1:] if word in ("sync", "arrive", "red"))
    operands = list(instruction.operands)
    target: Operand = operands.pop(0) if mode == "red" else Sink()
    predicate = bool(thread.read(operands.pop(), "pred")) if mode == "red" else False
    number = thread.read(operands[0]) if operands else 0
    count = thread.read(operands[1]) if len(operands) > 1 else 0
    cta = thread.cta
    barrier = cta.barriers.setdefault(number, NamedBarrier())
    barrier.arrived += 1
    barrier.predicates.append(predicate)
    barrier.warps.add(thread.number // WARP)
    if mode == "arrive":
        release_if_full(thread, barrier, count)
        return
    generation = barrier.generation

    def is_ready() -> bool:
        release_if_full(thread, barrier, count)
        if barrier.generation == generation:
            return False
        if mode == "red":
            _write_reduction(thread, target, opcode, barrier.last)
        return True

    thread.is_ready = is_ready


def release_if_full(thread: Thread, barrier: NamedBarrier, count: int) -> None:
    """Begin the next round of a barrier when all have come; exited threads are not waited for."""
    live: dict[int, int] = {}
    for other in thread.cta.threads:
        live[other.number // WARP] = live.get(other.number // WARP, 0) + (not other.has_exited)
    wanted = sum(live.values())
    if count:
        # A warp that has come counts with all its lanes, those that have exited included.
        wanted = count - sum(WARP - live[warp] for warp in barrier.warps)
    if barrier.arrived >= wanted > 0:
        barrier.warps.clear()
        barrier.last, barrier.predicates = barrier.predicates, []
        barrier.arrived = 0
        barrier.generation += 1


def _write_reduction(
    thread: Thread, target: Operand, opcode: tuple[str, ...], predicates: list[bool]
) -> None:
    if "popc" in opcode:
        thread.write(target, sum(predicates), "u32")
    else:
        truth = all(predicates) if "and" in opcode else any(predicates)
        thread.write(target, int(truth), "pred")


def mbarrier(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    """mbarrier.init, .inval, .arrive, .expect_tx, .complete_tx, .test_wait, .try_wait, counts."""
    operands = list(instruction.operands)
    name = opcode[1]
    if name == "pending_count":
        thread.write(operands[0], thread.read(operands[1], "b64") & 0xFFFFF, "b32")
        return
    is_wait = name in ("test_wait", "try_wait")
    gives_state = name in ("arrive", "arrive_drop") or is_wait
    target: Operand = operands.pop(0) if gives_state else Sink()
    address = thread.find_address(operands.pop(0), "shared")
    table = thread.cta.mbarriers
    if name == "init":
        count = thread.read(operands[0])
        table[address] = Mbarrier(count, count)
        return
    if address not in table:
        raise PtxError(f"no mbarrier at {address:#x}", instruction.line)
    barrier = table[address]
    if name == "inval":
        del table[address]
    elif is_wait:
        _wait(thread, target, barrier, operands, opcode)
    else:
        _arrive(thread, target, barrier, operands, opcode)


def _arrive(
    thread: Thread,
    target: Operand,
    barrier: Mbarrier,
    operands: list[Operand],
    opcode: tuple[str, ...],
) -> None:
    amount = thread.read(operands[0]) if operands else 1
    if "expect_tx" in opcode:
        barrier.missing_bytes += amount
        amount = 0 if opcode[1] == "expect_tx" else 1
    elif opcode[1] == "complete_tx":
        barrier.missing_bytes -= amount
        amount = 0
    # The state before the arrival: pending_count counts this arrival too (seen on an H200).
    state = barrier.phase << PHASE_SHIFT | barrier.pending
    barrier.pending -= amount
    if opcode[1] == "arrive_drop":
        barrier.count -= amount
    barrier.settle()
    thread.write(target, state, "b64")


def _wait(
    thread: Thread,
    target: Operand,
    barrier: Mbarrier,
    operands: list[Operand],
    opcode: tuple[str, ...],
) -> None:
    if "parity" in opcode:
        is_over = barrier.phase % 2 != thread.read(operands[0]) % 2
    else:
        is_over = barrier.phase > thread.read(operands[0], "b64") >> PHASE_SHIFT
    thread.write(target, int(is_over), "pred")
