"""Instructions of several lanes: shfl, vote, match, redux, elect, bar.warp.sync.

A thread that comes to one waits until every lane of its membermask that has not exited stands
there too; then each lane is given its result.
"""

from collections.abc import Callable

from halfbyte.ptx.syntax import Instruction, Operand, Pair
from halfbyte.virtual.interpreter.integers import value_of
from halfbyte.virtual.interpreter.machine import Thread, split_opcode

NAMES = ("shfl", "vote", "match", "redux", "elect")

Give = Callable[[dict[int, Thread], Instruction, tuple[str, ...]], None]


def is_warp_wide(opcode: tuple[str, ...]) -> bool:
    """Return whether lanes must meet at the instruction."""
    return opcode[0] in NAMES or opcode[:3] == ("bar", "warp", "sync")


def read_mask(thread: Thread, instruction: Instruction) -> int:
    """Return the membermask: the last operand."""
    return thread.read(instruction.operands[-1], "b32")


def give_results(lanes: dict[int, Thread], instruction: Instruction) -> None:
    """Give every lane of a meeting its result."""
    opcode = split_opcode(instruction.opcode)
    if opcode[0] in GIVE:
        GIVE[opcode[0]](lanes, instruction, opcode)


def _targets(instruction: Instruction) -> tuple[Operand, Operand | None]:
    target = instruction.operands[0]
    return (target.first, target.second) if isinstance(target, Pair) else (target, None)


def _shuffle(lanes: dict[int, Thread], instruction: Instruction, opcode: tuple[str, ...]) -> None:
    target, predicate = _targets(instruction)
    values = {lane: t.read(instruction.operands[1], "b32") for lane, t in lanes.items()}
    sources = {}
    for lane, thread in lanes.items():
        amount = thread.read(instruction.operands[2], "b32")
        control = thread.read(instruction.operands[3], "b32")
        sources[lane] = _find_source(opcode[2], lane, amount & 31, control)
    for lane, thread in lanes.items():
        source, is_inside = sources[lane]
        thread.write(target, values.get(source, values[lane]), "b32")
        if predicate is not None:
            thread.write(predicate, int(is_inside), "pred")


def _find_source(mode: str, lane: int, amount: int, control: int) -> tuple[int, bool]:
    """Return the lane to read from and whether it lies in the segment (PTX ISA, "shfl.sync")."""
    limit, segment = control & 31, control >> 8 & 31
    highest = (lane & segment) | (limit & ~segment & 31)
    lowest = lane & segment
    if mode == "up":
        source = lane - amount
        is_inside = source >= highest
    elif mode == "idx":
        source = lowest | (amount & ~segment & 31)
        is_inside = source <= highest
    else:
        source = lane + amount if mode == "down" else lane ^ amount
        is_inside = source <= highest
    return (source if is_inside else lane), is_inside


def _vote(lanes: dict[int, Thread], instruction: Instruction, opcode: tuple[str, ...]) -> None:
    truths = {lane: t.read(instruction.operands[1], "pred") for lane, t in lanes.items()}
    results = {
        "all": int(all(truths.values())),
        "any": int(any(truths.values())),
        "uni": int(len(set(truths.values())) == 1),
        "ballot": sum(truth << lane for lane, truth in truths.items()),
    }
    kind = "b32" if opcode[2] == "ballot" else "pred"
    for thread in lanes.values():
        thread.write(instruction.operands[0], results[opcode[2]], kind)


def _match(lanes: dict[int, Thread], instruction: Instruction, opcode: tuple[str, ...]) -> None:
    target, predicate = _targets(instruction)
    values = {lane: t.read(instruction.operands[1], opcode[-1]) for lane, t in lanes.items()}
    all_lanes = sum(1 << lane for lane in lanes)
    is_same = len(set(values.values())) == 1
    for lane, thread in lanes.items():
        same = sum(1 << other for other in lanes if values[other] == values[lane])
        if opcode[1] == "all":
            same = all_lanes if is_same else 0
        thread.write(target, same, "b32")
        if predicate is not None:
            thread.write(predicate, int(is_same), "pred")


def _reduce(lanes: dict[int, Thread], instruction: Instruction, opcode: tuple[str, ...]) -> None:
    operation, kind = opcode[2], opcode[-1]
    values = [t.read(instruction.operands[1], "b32") for t in lanes.values()]
    result = values[0]
    for value in values[1:]:
        pair = (value_of(result, kind), value_of(value, kind))
        result = {
            "add": sum(pair),
            "min": min(pair),
            "max": max(pair),
            "and": result & value,
            "or": result | value,
            "xor": result ^ value,
        }[operation]
    for thread in lanes.values():
        thread.write(instruction.operands[0], result, "b32")


def _elect(lanes: dict[int, Thread], instruction: Instruction, opcode: tuple[str, ...]) -> None:
    target, predicate = _targets(instruction)
    leader = min(lanes)
    for lane, thread in lanes.items():
        thread.write(target, leader, "b32")
        if predicate is not None:
            thread.write(predicate, int(lane == leader), "pred")


GIVE: dict[str, Give] = {
    "shfl": _shuffle,
    "vote": _vote,
    "match": _match,
    "redux": _reduce,
    "elect": _elect,
}
