"""Values of registers, as far as a kernel's text and its launch decide them.

`find_first_pass` tells what they are when every loop is in its first pass, which is what a fresh
barrier, the first stage of a ring and the first k-block meet: it leaves out the edges that go back
into a loop. `find_lasting` tells what they are in every pass. Both keep, bit by bit, what holds on
all paths. The values are those of the grid's first CTA, rank 0 of its cluster, unless asked
otherwise. Variables have addresses: shared ones where the virtual GPU puts them, tensor memory at
column 0 (where a kernel that is alone on its SM gets it), parameters at numbers from
`PARAMETER_START` on, which `find_parameter` turns back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halfbyte.checks import known_bits
from halfbyte.checks.instruction_values import Results, find_results
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.known_bits import KnownBits, make_constant, make_unknown
from halfbyte.checks.loops import order_blocks
from halfbyte.ptx.register_effects import list_registers
from halfbyte.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Symbol,
    SymbolOffset,
    Vector,
)

PARAMETER_START = 1 << 40  # no address of shared memory comes near it
SHARED_OFFSET_BITS = 24  # the CTA rank stands above them in shared::cluster addresses
# Special registers of a CTA of the grid's first cluster: its rank, and zero.
_RANKS = frozenset(("%cluster_ctarank", "%ctaid.x", "%cluster_ctaid.x"))
_ZEROS = frozenset(
    f"%{name}.{axis}" for name in ("ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"
)
_ELEMENT_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
_State = dict[str, KnownBits]


@dataclass(frozen=True, eq=False)
class RegisterValues:
    """The values before each instruction.

    Attributes:
        kernel: the kernel.
        states: per instruction, what is known of the registers that it reads; None where no path
            comes.
    """

    kernel: KernelText
    states: tuple[_State | None, ...]
    addresses: Mapping[str, int]

    def read(self, index: int, operand: Operand, width: int = 32) -> KnownBits:
        """Return the value of an operand of instruction `index`; an address counts its offset."""
        state = self.states[index]
        if state is None:
            return make_unknown(width)
        if isinstance(operand, Address):
            target = _read(operand.target, width, state, self.addresses)
            return known_bits.add(target, make_constant(operand.offset, width))
        return _read(operand, width, state, self.addresses)

    def read_shared_offset(self, index: int, operand: Operand) -> int | None:
        """Return the offset in the CTA's shared memory that an address operand has, or None."""
        return self.read(index, operand, 32).read_field(0, SHARED_OFFSET_BITS)

    def find_parameter(self, index: int, operand: Operand) -> tuple[int, int] | None:
        """Return (number of the parameter, byte in it) that an address operand points to."""
        address = self.read(index, operand, 64).constant
        if address is None or address < PARAMETER_START:
            return None
        offset = address - PARAMETER_START
        for number, parameter in enumerate(self.kernel.layout.parameters):
            if parameter.offset <= offset < parameter.offset + parameter.size:
                return number, offset - parameter.offset
        return None


def find_first_pass(
    kernel: KernelText, parameters: Sequence[bytes] | None = None, rank: int = 0
) -> RegisterValues:
    """Return the values of the first pass through every loop.

    Args:
        kernel: the kernel.
        parameters: bytes of each parameter of a launch; without them they are unknown.
        rank: of the CTA in its cluster, which lies along x.
    """
    return _find_values(kernel, parameters, rank, follows_loops=False)


def find_lasting(kernel: KernelText, parameters: Sequence[bytes] | None = None) -> RegisterValues:
    """Return the values that hold in every pass through every loop; arguments as above."""
    return _find_values(kernel, parameters, 0, follows_loops=True)


def _find_values(
    kernel: KernelText, parameters: Sequence[bytes] | None, rank: int, follows_loops: bool
) -> RegisterValues:
    addresses = {
        **kernel.layout.shared,
        **{name: PARAMETER_START + at for name, at in kernel.layout.parameter.items()},
        **dict.fromkeys(_ZEROS, 0),
        **dict.fromkeys(_RANKS, rank),
    }
    known = _place_parameters(kernel, parameters)
    first = _Evaluation(kernel, addresses, known, frozenset()).run()
    allocated = frozenset(
        offset
        for index, instruction in kernel.list_instructions("tcgen05.alloc")
        if (offset := first.read_shared_offset(index, instruction.operands[0])) is not None
    )
    if not allocated and not follows_loops:
        return first
    return _Evaluation(kernel, addresses, known, allocated).run(follows_loops)


def find_reached_blocks(kernel: KernelText, warp: int) -> frozenset[int]:
    """Return the blocks that a warp of a one-dimensional CTA comes to: its role.

    Branches whose guard follows from the warp's number are decided, all others go both ways.
    """
    thread = KnownBits(32, 0xFFFFFFFF & ~31, 32 * warp)
    addresses = {**kernel.layout.shared, **dict.fromkeys(_ZEROS | _RANKS, 0)}
    evaluation = _Evaluation(kernel, addresses, {}, frozenset(), {"%tid.x": thread})
    values = evaluation.run()
    starts = zip(kernel.flow.starts, range(kernel.flow.num_blocks), strict=False)
    return frozenset(block for start, block in starts if values.states[start] is not None)


def _place_parameters(kernel: KernelText, parameters: Sequence[bytes] | None) -> Mapping[int, int]:
    """Return the known bytes of the parameter block by their offset."""
    if parameters is None:
        return {}
    return {
        place.offset + position: byte
        for place, value in zip(kernel.layout.parameters, parameters, strict=True)
        for position, byte in enumerate(value)
    }


class _Evaluation:
    """One walk over the blocks, in an order that follows the edges."""

    def __init__(
        self,
        kernel: KernelText,
        addresses: Mapping[str, int],
        parameter_bytes: Mapping[int, int],
        tensor_address_offsets: frozenset[int],
        given: Mapping[str, KnownBits] | None = None,
    ) -> None:
        self._kernel = kernel
        self._addresses = addresses
        self._parameter_bytes = parameter_bytes
        # Where in shared memory tcgen05.alloc leaves its address.
        self._tensor_address_offsets = tensor_address_offsets
        self._given = dict(given or {})  # of special registers; decides branches, too
        self._widths = {
            name: 1 if kind == "pred" else int(kind.lstrip("busf").partition("x")[0] or 32)
            for name, kind in kernel.body.registers.items()
        }

    def run(self, follows_loops: bool = False) -> RegisterValues:
        """Walk until nothing changes; in one walk where loops are left out."""
        flow = self._kernel.flow
        order = order_blocks(flow)
        position = {block: number for number, block in enumerate(order)}
        entering: dict[int, _State] = {0: dict(self._given)}
        before: list[_State | None] = [None] * len(flow.instructions)
        waiting = {0}
        while waiting:
            block = min(waiting, key=position.__getitem__)
            waiting.remove(block)
            state = dict(entering[block])
            for index in flow.block_range(block):
                before[index] = self._step(index, state)
            for target in self._list_targets(block, state):
                is_back = target == flow.exit or position[target] <= position[block]
                if target == flow.exit or (is_back and not follows_loops):
                    continue
                known = entering.get(target)
                # What nobody reads from there on is left out: states of big kernels stay small.
                kept = state.keys() & (self._kernel.live_in[target] | self._given.keys())
                joined = {
                    name: value
                    for name in kept
                    if (value := _join(known, name, state[name])) is not None
                }
                if known is None or joined != known:
                    entering[target] = joined
                    waiting.add(target)
        return RegisterValues(self._kernel, tuple(before), self._addresses)

    def _list_targets(self, block: int, state: _State) -> tuple[int, ...]:
        """Return the blocks that may follow: with registers given, a decided branch has one."""
        flow = self._kernel.flow
        targets = flow.successors[block]
        last = flow.instructions[flow.last_instruction(block)]
        is_branch = last.opcode.partition(".")[0] == "bra" and last.guard is not None
        if not self._given or not is_branch or last.guard is None or len(targets) != 2:
            return targets
        taken = _read(last.guard.register, 1, state, self._addresses).constant
        if taken is None:
            return targets
        is_taken = bool(taken) != last.guard.negated
        return targets[:1] if is_taken else targets[1:]

    def _step(self, index: int, state: _State) -> _State:
        """Change `state` as the instruction does; return what it read of it."""
        instruction, effects = self._kernel.flow.instructions[index], self._kernel.effects[index]
        read = {
            name: state[name]
            for operand in instruction.operands
            for name in list_registers(operand)
            if name in state
        }
        if effects.writes:
            results = self._find_results(instruction, state) or ()
            found = {
                target.name: value for target, value in results if isinstance(target, Register)
            }
            for name in effects.writes:
                self._write(name, found.get(name), instruction.guard is not None, state)
        return read

    def _write(self, name: str, value: KnownBits | None, is_guarded: bool, state: _State) -> None:
        width = self._widths.get(name, 32)
        before = state.pop(name, None)
        if value is None or (is_guarded and before is None):
            return
        value = value.resize(width)
        if is_guarded and before is not None:
            value = known_bits.join(before, value)
        if value.mask:
            state[name] = value

    def _find_results(self, instruction: Instruction, state: _State) -> Results:
        if instruction.opcode.startswith(("ld.param", "ld.shared")):
            return self._load(instruction, state)
        return find_results(
            instruction, lambda operand, width: _read(operand, width, state, self._addresses)
        )

    def _load(self, instruction: Instruction, state: _State) -> Results:
        nbytes = _ELEMENT_BYTES.get(instruction.opcode.rpartition(".")[2].lstrip("bsuf"))
        target, address = instruction.operands[0], instruction.operands[1]
        if nbytes is None or not isinstance(address, Address):
            return None
        start = _read(address.target, 64, state, self._addresses)
        start = known_bits.add(start, make_constant(address.offset, 64))
        items = target.items if isinstance(target, Vector) else (target,)
        is_parameter = instruction.opcode.startswith("ld.param")
        read_memory = self._read_parameter if is_parameter else self._read_shared
        return [
            (item, value)
            for number, item in enumerate(items)
            if isinstance(item, Register)
            and (value := read_memory(start, number * nbytes, nbytes)) is not None
        ]

    def _read_parameter(self, start: KnownBits, offset: int, nbytes: int) -> KnownBits | None:
        if start.constant is None:
            return None
        first = start.constant - PARAMETER_START + offset
        found = [self._parameter_bytes.get(first + i) for i in range(nbytes)]
        known = bytes(byte for byte in found if byte is not None)
        if len(known) < nbytes:
            return None
        return make_constant(int.from_bytes(known, "little"), 8 * nbytes)

    def _read_shared(self, start: KnownBits, offset: int, nbytes: int) -> KnownBits | None:
        first = start.read_field(0, SHARED_OFFSET_BITS)
        is_tensor_address = first in self._tensor_address_offsets and not offset and nbytes == 4
        return make_constant(0, 32) if is_tensor_address else None


def _join(known: _State | None, name: str, value: KnownBits) -> KnownBits | None:
    """Return what holds for a register on this edge and on those before; None for nothing."""
    if known is None:
        return value
    before = known.get(name)
    if before is None:
        return None
    both = before if before == value else known_bits.join(before, value)
    return both if both.mask else None


def _read(
    operand: Operand, width: int, state: Mapping[str, KnownBits], addresses: Mapping[str, int]
) -> KnownBits:
    match operand:
        case Register(name):
            value = state.get(name)
            if value is not None:
                return value.resize(width)
            return (
                make_constant(addresses[name], width)
                if name in addresses
                else (make_unknown(width))
            )
        case Negated(register):
            return known_bits.invert(_read(register, width, state, addresses))
        case Immediate(bits=bits, float_bits=0):
            return make_constant(bits, width)
        case Symbol(name) if name in addresses:
            return make_constant(addresses[name], width)
        case SymbolOffset(name, offset, mask=None) if name in addresses:
            return make_constant(addresses[name] + offset, width)
    return make_unknown(width)
