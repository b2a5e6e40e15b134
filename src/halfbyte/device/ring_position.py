"""A position in a ring of slots, as a value: slot index and the parity to wait for.

A slot has a `full` and an `empty` mbarrier. On a fresh barrier a wait for parity 1 passes at once
and a wait for parity 0 does not (PTX ISA, mbarrier.try_wait.parity), so a producer starts with
parity 1 (every slot is empty) and a consumer with parity 0. A wrong start hangs, or passes at once
and reads what nobody wrote; hence a position is made by naming its role, never from a literal.
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from halfbyte.device.traced_record import TracedRecord


class RingPosition:
    """Where one warp stands in a ring; loops carry it as two 32-bit values.

    Attributes:
        stages: slots of the ring, a compile-time constant.
        index: the slot, 0 to stages - 1.
        phase: the parity to wait for at this slot.
        first: the first slot, where several rings lie one behind the other.
    """

    def __init__(self, stages: int, index: Int32, phase: Int32, first: Any = 0) -> None:
        """Use `producer` or `consumer`; this is what loops rebuild a position with."""
        self.stages = stages
        self.index = index
        self.phase = phase
        self.first = first

    @staticmethod
    def producer(stages: int, first: Any = 0) -> "RingPosition":
        """Return the start of a warp that fills slots and waits for them to be empty."""
        return RingPosition(stages, Int32(first), Int32(1), first)

    @staticmethod
    def consumer(stages: int, first: Any = 0) -> "RingPosition":
        """Return the start of a warp that empties slots and waits for them to be full."""
        return RingPosition(stages, Int32(first), Int32(0), first)

    @cute.jit
    def next(self) -> "RingPosition":
        """Return the position one slot on; the parity flips where the ring starts again."""
        index = self.index + 1
        phase = self.phase
        if index == self.first + self.stages:
            index = Int32(self.first)
            phase = phase ^ 1
        return RingPosition(self.stages, index, phase, self.first)

    def __extract_mlir_values__(self) -> list[Any]:
        """Return the values that a dynamic loop carries."""
        return [self.index.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> "RingPosition":
        """Return the position of those values."""
        return RingPosition(self.stages, Int32(values[0]), Int32(values[1]), self.first)


class Ring(TracedRecord):
    """The barriers of a ring: `stages` full ones, then `stages` empty ones, in shared memory.

    Attributes:
        barriers: pointer to 2 * stages mbarriers.
        stages: slots.
    """

    def __init__(self, barriers: Any, stages: int) -> None:
        """Take `2 * stages` mbarriers from `barriers` on."""
        self.barriers = barriers
        self.stages = stages

    def full(self, position: RingPosition) -> Any:
        """Return the barrier that completes when the slot is filled."""
        return self.barriers + position.index

    def empty(self, position: RingPosition) -> Any:
        """Return the barrier that completes when the slot is free again."""
        return self.barriers + self.stages + position.index

    def init(self, full_arrivals: int, empty_arrivals: int) -> None:
        """Initialise all barriers; one thread calls it."""
        for slot in range(self.stages):
            cute.arch.mbarrier_init(self.barriers + slot, full_arrivals)
            cute.arch.mbarrier_init(self.barriers + self.stages + slot, empty_arrivals)

    def wait_full(self, position: RingPosition) -> None:
        """Wait until the slot is filled."""
        cute.arch.mbarrier_wait(self.full(position), position.phase)

    def wait_empty(self, position: RingPosition) -> None:
        """Wait until the slot is free."""
        cute.arch.mbarrier_wait(self.empty(position), position.phase)

    def has_full(self, position: RingPosition) -> Boolean:
        """Return whether the slot is filled, without waiting for long."""
        return cute.arch.mbarrier_try_wait(self.full(position), position.phase)
