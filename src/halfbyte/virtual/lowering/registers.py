"""Which slot of a warp's register file each register of a kernel lives in.

Registers that are never live together share slots: a warp's file then stays in the host's caches.
A linear scan over live ranges (Poletto and Sarkar, "Linear Scan Register Allocation", TOPLAS 1999)
is enough, since slots are never spilled.
"""

import heapq
from collections.abc import Iterable

from halfbyte.ptx.control_flow import make_control_flow
from halfbyte.ptx.instruction_form import TYPE_WIDTHS
from halfbyte.ptx.liveness import find_liveness, live_ranges
from halfbyte.ptx.register_effects import list_registers
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.syntax import Instruction
from halfbyte.virtual.lowering.pools import WORDS

# Operands of these are read or written when the operation completes, not when it is issued: no
# other register may move into their slots in between.
_ASYNCHRONOUS = ("wgmma.mma_async",)


def choose_slots(body: FlatBody, first_slot: int) -> tuple[dict[str, int], int]:
    """Return the first slot of every register but predicates, and the number of slots in all."""
    words = {n: WORDS[TYPE_WIDTHS[kind]] for n, kind in body.registers.items() if kind != "pred"}
    alone = _list_asynchronous(body.statements)
    ranges = live_ranges(find_liveness(make_control_flow(body)))
    slots: dict[str, int] = {}
    end = first_slot
    free: dict[int, list[int]] = {1: [], 2: [], 4: []}
    active: list[tuple[int, int, int]] = []  # (last instruction, slot, words)
    named = [name for name in words if name in ranges]
    for name in sorted(named, key=lambda name: ranges[name].start):
        size = words[name]
        if name not in alone:
            while active and active[0][0] < ranges[name].start:
                _, slot, freed = heapq.heappop(active)
                heapq.heappush(free[freed], slot)
            if free[size]:
                slots[name] = heapq.heappop(free[size])
                heapq.heappush(active, (ranges[name].stop - 1, slots[name], size))
                continue
        end = -(-end // size) * size  # a wide register starts on a boundary of its own size
        slots[name] = end
        end += size
        if name not in alone:
            heapq.heappush(active, (ranges[name].stop - 1, slots[name], size))
    for name, size in words.items():  # never live: a slot of its own does no harm
        if name not in slots:
            end = -(-end // size) * size
            slots[name] = end
            end += size
    return slots, end


def _list_asynchronous(statements: Iterable[object]) -> set[str]:
    return {
        name
        for statement in statements
        if isinstance(statement, Instruction) and statement.opcode.startswith(_ASYNCHRONOUS)
        for operand in statement.operands
        for name in list_registers(operand)
    }
