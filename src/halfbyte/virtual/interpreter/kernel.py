"""Launches: threads in turns, each until it must wait; lanes that meet are served together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.errors import PtxError
from halfbyte.ptx.parser import parse
from halfbyte.ptx.scopes import FlatBody, resolve
from halfbyte.ptx.syntax import (
    TYPE_BYTES,
    Immediate,
    InitializerList,
    Instruction,
    Kernel,
    Label,
    Module,
    Register,
    Symbol,
    Variable,
)
from halfbyte.virtual.interpreter import barriers, memory_access, warp_wide
from halfbyte.virtual.interpreter.machine import (
    WINDOWS,
    Cta,
    GlobalBuffer,
    Machine,
    Meeting,
    Thread,
    read_guard,
    split_opcode,
)
from halfbyte.virtual.interpreter.scalar import run_scalar

FIRST_ADDRESS = 0x10000
GLOBAL_VARIABLES = 1 << 40
ALIGNMENT = 256
TURN = 2000  # instructions of a thread before the next one has its turn
IGNORED = ("membar", "fence", "nanosleep", "prefetch", "griddepcontrol", "setmaxnreg", "pmevent")

Triple = tuple[int, int, int]


def run_kernel(
    ptx: str,
    name: str,
    grid: Triple,
    block: Triple,
    arguments: Sequence[Any] = (),
    dynamic_shared: int = 0,
) -> None:
    """Run a kernel to its end; arrays among the arguments are written in place.

    Args:
        ptx: the text of a module.
        name: an entry of it.
        grid: CTAs along x, y, z.
        block: threads of a CTA along x, y, z.
        arguments: one a parameter: a contiguous NumPy array, whose address is passed, or a number.
        dynamic_shared: bytes of dynamic shared memory.

    Raises PtxError for what the interpreter does not know, and where threads wait for ever.
    """
    module = parse(ptx)
    kernel = module.find_kernel(name)
    machine, shared_bytes, local_bytes = _make_machine(module, kernel, (grid, block), arguments)
    for number in range(grid[0] * grid[1] * grid[2]):
        index = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        cta = Cta(machine, index, bytearray(shared_bytes + dynamic_shared))
        count = block[0] * block[1] * block[2]
        cta.threads = [Thread(cta, thread, bytearray(local_bytes)) for thread in range(count)]
        run_cta(cta)


def _make_machine(
    module: Module, kernel: Kernel, shape: tuple[Triple, Triple], arguments: Sequence[Any]
) -> tuple[Machine, int, int]:
    body = resolve(kernel)
    variables = {variable.name: variable for variable in module.globals} | body.variables
    labels = {s.name: i for i, s in enumerate(body.statements) if isinstance(s, Label)}
    symbols: dict[str, int] = {}
    sizes = {space: _place_variables(symbols, space, variables) for space in ("shared", "local")}
    buffers, words = _place_arguments(arguments)
    parameters = _place_parameters(symbols, body, words)
    _place_globals(symbols, buffers, module)
    machine = Machine(body, labels, buffers, symbols, parameters, *shape)
    return machine, sizes["shared"], sizes["local"]


def _place_variables(symbols: dict[str, int], space: str, variables: dict[str, Variable]) -> int:
    offset = 0
    for name, variable in variables.items():
        if variable.space.split("::")[0] != space:
            continue
        offset = -(-offset // variable.alignment_bytes) * variable.alignment_bytes
        symbols[name] = WINDOWS[space] | offset
        offset += 0 if variable.linkage == "extern" else variable.size_bytes
    return offset


def _place_globals(symbols: dict[str, int], buffers: list[GlobalBuffer], module: Module) -> None:
    """Add the module's .global and .const variables, which must not hold addresses."""
    address = GLOBAL_VARIABLES
    for variable in module.globals:
        if variable.space not in ("global", "const"):
            continue
        data = _make_initial_bytes(variable)
        symbols[variable.name] = address
        buffers.append(GlobalBuffer(address, memoryview(data)))
        address += -(-len(data) // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def _make_initial_bytes(variable: Variable) -> bytearray:
    """Return what a variable starts with: zeros, one constant, or a flat list of constants."""
    data = bytearray(variable.size_bytes)
    start = variable.initializer
    items = start.items if isinstance(start, InitializerList) else [start] if start else []
    size = variable.element_bytes
    for index, item in enumerate(items):
        if not isinstance(item, Immediate):
            raise PtxError(f"the interpreter cannot initialise {variable.name}", variable.line)
        word = item.bits & ((1 << (8 * size)) - 1)
        data[index * size : (index + 1) * size] = word.to_bytes(size, "little")
    return data


def _place_arguments(arguments: Sequence[Any]) -> tuple[list[GlobalBuffer], list[int]]:
    buffers, words, address = [], [], FIRST_ADDRESS
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            view = memoryview(argument.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            buffers.append(GlobalBuffer(address, view))
            words.append(address)
            address += -(-len(view) // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        else:
            words.append(int(argument))
    return buffers, words


def _place_parameters(symbols: dict[str, int], body: FlatBody, words: list[int]) -> bytearray:
    if len(words) != len(body.parameters):
        raise PtxError(f"{body.name} has {len(body.parameters)} parameters, {len(words)} came")
    data = bytearray()
    for variable, word in zip(body.parameters, words, strict=True):
        size = TYPE_BYTES[variable.type]
        data += bytes(-len(data) % variable.alignment_bytes)
        symbols[variable.name] = WINDOWS["param"] | len(data)
        data += (word & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    return data


def run_cta(cta: Cta) -> None:
    """Run the threads of a CTA until all have exited; PtxError where none can go on."""
    while not all(thread.has_exited for thread in cta.threads):
        has_moved = False
        for thread in cta.threads:
            has_moved |= _take_turn(thread)
        has_moved |= _hold_meetings(cta)
        if not has_moved:
            waiting = [thread.number for thread in cta.threads if not thread.has_exited]
            raise PtxError(f"threads {waiting} wait for what cannot happen")


def _take_turn(thread: Thread) -> bool:
    """Run a thread until it waits, exits or has had its turn; return whether it moved."""
    if thread.has_exited or thread.meeting is not None:
        return False
    if thread.is_ready is not None:
        if not thread.is_ready():
            return False
        thread.is_ready = None
        thread.position += 1
    for _ in range(TURN):
        if not _step(thread):
            break
    return True


def _step(thread: Thread) -> bool:
    """Run one statement; return whether the thread can run the next one at once."""
    statements = thread.cta.machine.body.statements
    if thread.position >= len(statements):
        thread.has_exited = True
        return False
    statement = statements[thread.position]
    if isinstance(statement, Label) or not read_guard(thread, statement):
        thread.position += 1
        return True
    opcode = split_opcode(statement.opcode)
    if warp_wide.is_warp_wide(opcode):
        thread.meeting = Meeting(warp_wide.read_mask(thread, statement))
        return False
    if opcode[0] in ("exit", "ret"):
        thread.has_exited = True
        return False
    if opcode[0] in ("bra", "brx"):
        thread.position = _find_target(thread, statement, opcode)
        return True
    _run_plain(thread, statement, opcode)
    if thread.is_ready is not None:
        return False
    thread.position += 1
    return True


def _find_target(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> int:
    machine = thread.cta.machine
    target = instruction.operands[0]
    if opcode[0] == "brx":
        table = instruction.operands[1]
        assert isinstance(table, Symbol)
        return machine.labels[machine.body.branch_tables[table.name][thread.read(target)]]
    if not isinstance(target, Symbol | Register):
        raise PtxError(f"{instruction} has no label", instruction.line)
    return machine.labels[target.name]


def _run_plain(thread: Thread, instruction: Instruction, opcode: tuple[str, ...]) -> None:
    name = opcode[0]
    if name in ("ld", "ldu"):
        memory_access.load(thread, instruction, opcode)
    elif name == "st":
        memory_access.store(thread, instruction, opcode)
    elif name in ("atom", "red"):
        memory_access.atomic(thread, instruction, opcode)
    elif name in ("bar", "barrier"):
        barriers.named_barrier(thread, instruction, opcode)
    elif name == "mbarrier":
        barriers.mbarrier(thread, instruction, opcode)
    elif name not in IGNORED:
        run_scalar(thread, instruction)


def _hold_meetings(cta: Cta) -> bool:
    """Serve lanes that have all come to the same instruction; return whether any were."""
    has_moved = False
    for thread in cta.threads:
        if thread.meeting is None:
            continue
        mask = thread.meeting.mask
        lanes = {t.lane: t for t in thread.warp if mask >> t.lane & 1 and not t.has_exited}
        if all(t.meeting is not None and t.position == thread.position for t in lanes.values()):
            instruction = cta.machine.body.statements[thread.position]
            assert isinstance(instruction, Instruction)
            warp_wide.give_results(lanes, instruction)
            for other in lanes.values():
                other.meeting = None
                other.position += 1
            has_moved = True
    return has_moved
