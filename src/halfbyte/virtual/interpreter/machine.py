"""The state that instructions work on: threads, CTAs, memory of every space."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from halfbyte.errors import PtxError
from halfbyte.ptx.instruction_form import TYPE_WIDTHS
from halfbyte.ptx.scopes import FlatBody
from halfbyte.ptx.special_registers import is_special_register
from halfbyte.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    Symbol,
    SymbolOffset,
)
from halfbyte.virtual.interpreter.numbers import F32, F64, decode, encode, to_signed, wrap

# Generic addresses: a space's window above its own offsets; global addresses are as they are.
WINDOWS = {"shared": 1 << 60, "local": 2 << 60, "param": 3 << 60}
WINDOW_BITS = 15 << 60
OFFSET_BITS = (1 << 60) - 1
WARP = 32


@cache
def split_opcode(opcode: str) -> tuple[str, ...]:
    """Return the words of an opcode."""
    return tuple(opcode.split("."))


@cache
def bits_of(kind: str) -> int:
    """Return the bits of a value of a type: 32 of `u32` and `f16x2`, 1 of `pred`."""
    if kind == "pred":
        return 1
    count, _, parts = kind.lstrip("abcdefghijklmnopqrstuvwyz").partition("x")
    return int(count) * int(parts or 1)


@dataclass
class GlobalBuffer:
    """A range of global memory: device addresses from `address` on."""

    address: int
    data: memoryview


@dataclass
class Machine:
    """What all threads of a launch share."""

    body: FlatBody
    labels: dict[str, int]
    buffers: list[GlobalBuffer]
    symbols: dict[str, int]  # generic address of each variable and parameter
    parameters: bytearray
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass
class NamedBarrier:
    """Threads that have arrived at one `bar`; `results` gathers their predicates."""

    arrived: int = 0
    warps: set[int] = field(default_factory=set)
    predicates: list[bool] = field(default_factory=list)
    generation: int = 0
    last: list[bool] = field(default_factory=list)


@dataclass
class Mbarrier:
    """An mbarrier: arrivals and bytes that its phase still waits for."""

    count: int
    pending: int
    missing_bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        """Begin the next phase if nothing is missing any more."""
        if self.pending == 0 and self.missing_bytes == 0:
            self.pending = self.count
            self.phase += 1


@dataclass
class Cta:
    """One CTA: its shared memory and its barriers."""

    machine: Machine
    index: tuple[int, int, int]
    shared: bytearray
    threads: list["Thread"] = field(default_factory=list)
    barriers: dict[int, NamedBarrier] = field(default_factory=dict)
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)


@dataclass
class Meeting:
    """Why a thread stands still: it waits for the lanes of `mask` at the same instruction."""

    mask: int
    value: Any = None


@dataclass
class Thread:
    """One thread: registers by name, position, local memory.

    `meeting` is set while it waits for lanes of its warp; `is_ready` asks whether it may go on
    when it waits for anything else.
    """

    cta: Cta
    number: int
    local: bytearray
    registers: dict[str, int] = field(default_factory=dict)
    position: int = 0
    has_exited: bool = False
    carry: int = 0
    meeting: Meeting | None = None
    is_ready: Callable[[], bool] | None = None

    @property
    def lane(self) -> int:
        """The lane in the warp."""
        return self.number % WARP

    @property
    def warp(self) -> list["Thread"]:
        """The threads of the same warp."""
        start = self.number - self.lane
        return self.cta.threads[start : start + WARP]

    def width_of(self, name: str) -> int:
        """Return the bits of a register."""
        width = TYPE_WIDTHS[self.cta.machine.body.registers[name]]
        return 1 if width == "pred" else int(width[1:])

    def read(self, operand: Operand, kind: str = "b32") -> int:
        """Return the pattern of a source operand in the width of `kind`."""
        bits = bits_of(kind)
        if isinstance(operand, Register):
            return wrap(self._read_register(operand.name), bits)
        if isinstance(operand, Negated):
            return 1 - self.registers.get(operand.register.name, 0)
        if isinstance(operand, Immediate):
            return _immediate(operand, bits)
        if isinstance(operand, Symbol):
            return wrap(self._offset_of(operand.name, bits), bits)
        if isinstance(operand, SymbolOffset):
            return wrap(self._offset_of(operand.name, bits) + operand.offset, bits)
        raise PtxError(f"the interpreter cannot read {operand!r}")

    def _read_register(self, name: str) -> int:
        if is_special_register(name):
            return self._read_special(name)
        return self.registers.get(name, 0)

    def _offset_of(self, name: str, bits: int) -> int:
        address = self.cta.machine.symbols[name]
        return address & OFFSET_BITS if address & WINDOW_BITS else address

    def _read_special(self, name: str) -> int:
        word, _, axis = name[1:].partition(".")
        machine = self.cta.machine
        x, y, _ = machine.block
        if axis:
            tid = (self.number % x, self.number // x % y, self.number // (x * y))
            vectors = {"tid": tid, "ntid": machine.block, "ctaid": self.cta.index}
            vectors["nctaid"] = machine.grid
            return vectors[word]["xyz".index(axis)]
        lane = self.lane
        masks = {"eq": 1 << lane, "lt": (1 << lane) - 1, "le": (2 << lane) - 1}
        masks["gt"], masks["ge"] = ~masks["le"], ~masks["lt"]
        if word.startswith("lanemask_"):
            return wrap(masks[word[-2:]], 32)
        return {"laneid": lane, "warpid": self.number // WARP, "nwarpid": 1}[word]

    def write(self, operand: Operand, value: int, kind: str = "b32") -> None:
        """Put a value of a type into a register; a wider register takes its sign or zeros."""
        if isinstance(operand, Sink):
            return
        if not isinstance(operand, Register):
            raise PtxError(f"the interpreter cannot write {operand!r}")
        bits = bits_of(kind)
        number = to_signed(value, bits) if kind[0] == "s" else wrap(value, bits)
        self.registers[operand.name] = wrap(number, self.width_of(operand.name))

    def find_address(self, operand: Operand, space: str) -> int:
        """Return the generic address of `[operand]` in a space ("" is generic already)."""
        if not isinstance(operand, Address):
            raise PtxError(f"{operand!r} is no address")
        target = operand.target
        if isinstance(target, Symbol):
            return self.cta.machine.symbols[target.name] + operand.offset
        start = target.bits if isinstance(target, Immediate) else self.read(target, "b64")
        if not space:
            return wrap(start + operand.offset, 64)
        return WINDOWS.get(space, 0) | wrap(start + operand.offset, 60)

    def find_bytes(self, address: int, count: int) -> tuple[memoryview, int]:
        """Return the memory and the offset in it of a generic address; PtxError outside of it."""
        window, offset = address & WINDOW_BITS, address & OFFSET_BITS
        memories = {
            WINDOWS["shared"]: self.cta.shared,
            WINDOWS["local"]: self.local,
            WINDOWS["param"]: self.cta.machine.parameters,
        }
        if window:
            memory = memoryview(memories[window])
            if offset + count <= len(memory):
                return memory, offset
        for buffer in self.cta.machine.buffers:
            if not window and 0 <= address - buffer.address <= len(buffer.data) - count:
                return buffer.data, address - buffer.address
        raise PtxError(f"thread {self.number} has no {count} bytes at {address:#x}")

    def load(self, address: int, count: int) -> int:
        """Return `count` bytes as an integer, little endian."""
        memory, offset = self.find_bytes(address, count)
        return int.from_bytes(memory[offset : offset + count], "little")

    def store(self, address: int, value: int, count: int) -> None:
        """Write an integer as `count` bytes."""
        memory, offset = self.find_bytes(address, count)
        memory[offset : offset + count] = wrap(value, 8 * count).to_bytes(count, "little")


def _immediate(operand: Immediate, bits: int) -> int:
    if operand.float_bits == 64 and bits == 32:
        return encode(decode(operand.bits, F64), F32)
    return wrap(operand.bits, bits)


def read_guard(thread: Thread, instruction: Instruction) -> bool:
    """Return whether the guard lets the thread run the instruction."""
    guard = instruction.guard
    if guard is None:
        return True
    return bool(thread.registers.get(guard.register.name, 0)) != guard.negated
