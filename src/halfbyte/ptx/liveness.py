"""Which registers hold a value that may still be read.

Sets of registers are Python integers: bit i stands for `Liveness.names[i]`. Liveness is a matter
of one lane: two registers that are never live together may share storage that every lane has of
its own, however the lanes of a warp diverge.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.ptx.control_flow import ControlFlow
from halfbyte.ptx.register_effects import EffectsOf, find_effects


@dataclass(frozen=True, slots=True)
class Liveness:
    """Live registers at the borders of the blocks, and what each instruction touches.

    `reads`, `writes`, `kills` are bit sets per instruction; `live_in` and `live_out` per block.
    """

    flow: ControlFlow
    names: tuple[str, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    kills: tuple[int, ...]
    live_in: tuple[int, ...]
    live_out: tuple[int, ...]

    def list_names(self, registers: int) -> tuple[str, ...]:
        """Return the names in a bit set."""
        return tuple(self.names[bit] for bit in iterate_bits(registers))

    def list_live_after(self, block: int) -> list[int]:
        """Return, for each instruction of a block, the registers that are live behind it."""
        live = self.live_out[block]
        behind = []
        for index in reversed(self.flow.block_range(block)):
            behind.append(live)
            live = (live & ~self.kills[index]) | self.reads[index]
        return behind[::-1]


def iterate_bits(value: int) -> Iterator[int]:
    """Yield the positions of the one bits of `value`, ascending."""
    while value:
        lowest = value & -value
        yield lowest.bit_length() - 1
        value ^= lowest


def find_liveness(flow: ControlFlow, effects_of: EffectsOf = find_effects) -> Liveness:
    """Return the liveness of all registers of a body.

    A write under a guard or of a part of a register leaves the old value alive.
    """
    names: dict[str, int] = {}
    reads: list[int] = []
    writes: list[int] = []
    kills: list[int] = []
    for instruction in flow.instructions:
        effects = effects_of(instruction)
        read = _make_set(effects.reads, names)
        written = _make_set(effects.writes, names)
        reads.append(read)
        writes.append(written)
        kills.append(written if effects.is_killing else 0)
    used, killed = _summarize_blocks(flow, reads, kills)
    live_in = [0] * (flow.num_blocks + 1)
    live_out = [0] * flow.num_blocks
    waiting = list(range(flow.num_blocks))
    is_waiting = [True] * flow.num_blocks
    while waiting:
        block = waiting.pop()
        is_waiting[block] = False
        live = 0
        for successor in flow.successors[block]:
            live |= live_in[successor]
        live_out[block] = live
        live = used[block] | (live & ~killed[block])
        if live != live_in[block]:
            live_in[block] = live
            for previous in flow.predecessors[block]:
                if not is_waiting[previous]:
                    is_waiting[previous] = True
                    waiting.append(previous)
    return Liveness(
        flow,
        tuple(names),
        tuple(reads),
        tuple(writes),
        tuple(kills),
        tuple(live_in[:-1]),
        tuple(live_out),
    )


def _make_set(registers: tuple[str, ...], names: dict[str, int]) -> int:
    bits = 0
    for name in registers:
        bits |= 1 << names.setdefault(name, len(names))
    return bits


def _summarize_blocks(
    flow: ControlFlow, reads: list[int], kills: list[int]
) -> tuple[list[int], list[int]]:
    """Return per block the registers read before they are overwritten, and those overwritten."""
    used = []
    killed = []
    for block in range(flow.num_blocks):
        read = written = 0
        for index in flow.block_range(block):
            read |= reads[index] & ~written
            written |= kills[index]
        used.append(read)
        killed.append(written)
    return used, killed


def live_ranges(liveness: Liveness) -> dict[str, range]:
    """Return for each register the instructions from its first to its last moment of life.

    The range holds every instruction that touches the register or has it live before or behind it.
    Registers whose ranges do not overlap may share storage; ranges that meet in one instruction,
    where one register is read last and the other written, do overlap here.
    """
    flow = liveness.flow
    moments: list[tuple[int, int]] = []  # instruction, registers alive or touched there
    for block in range(flow.num_blocks):
        moments.append((flow.starts[block], liveness.live_in[block]))
        for index in flow.block_range(block):
            moments.append((index, liveness.reads[index] | liveness.writes[index]))
        moments.append((flow.last_instruction(block), liveness.live_out[block]))
    first = _find_first_moments(moments)
    last = _find_first_moments(moments[::-1])
    return {liveness.names[bit]: range(first[bit], last[bit] + 1) for bit in sorted(first)}


def _find_first_moments(moments: list[tuple[int, int]]) -> dict[int, int]:
    first: dict[int, int] = {}
    seen = 0
    for index, registers in moments:
        for bit in iterate_bits(registers & ~seen):
            first[bit] = index
        seen |= registers
    return first
