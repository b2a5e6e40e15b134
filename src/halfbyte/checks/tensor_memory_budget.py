"""Check: tensor memory fits: columns that are allocated, and columns that MMAs and copies use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfbyte.arch import Gpu
from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.instruction_descriptor import read_scaled_form
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.register_values import RegisterValues, find_first_pass
from halfbyte.checks.scaled_mma import list_scale_copies

CHECK = "tensor-memory"
_SMALLEST_ALLOCATION = 32  # columns; then powers of two (PTX ISA, "tcgen05.alloc")
_COLUMN_BITS = 16


@dataclass(frozen=True, slots=True)
class TensorBuffer:
    """Columns of tensor memory: `num_columns` from `first` on, over all lanes."""

    name: str
    first: int
    num_columns: int

    @property
    def end(self) -> int:
        """The first column behind it."""
        return self.first + self.num_columns


def check_tensor_memory_budget(
    buffers: Sequence[TensorBuffer], gpu: Gpu, allocated: int, place: str = "configuration"
) -> CheckReport:
    """Return whether columns that are used are allocated, and may be.

    Args:
        buffers: what is used, from the first allocated column on. Buffers may share columns.
        gpu: the GPU.
        allocated: columns of the tcgen05.alloc.
        place: where the configuration stands, for the findings.
    """
    findings = [*check_allocation(allocated, gpu, place)]
    used = max((buffer.end for buffer in buffers), default=0)
    if used > allocated:
        last = max(buffers, key=lambda buffer: buffer.end)
        message = (
            f"{last.name} uses columns {last.first} to {last.end - 1}; {allocated} are allocated "
            f"({used - allocated} too few)"
        )
        facts = {"used": used, "allocated": allocated}
        findings.append(CheckFinding(f"{CHECK}/over", Severity.ERROR, place, message, facts))
    evidence = tuple(
        Evidence(f"{b.name}: {b.num_columns} columns", f"columns {b.first} to {b.end - 1}")
        for b in buffers
    )
    return CheckReport(CHECK, tuple(findings), evidence, len(buffers))


def check_allocation(columns: int, gpu: Gpu, place: str) -> Iterator[CheckFinding]:
    """Yield an error for a number of columns that tcgen05.alloc does not take."""
    most = gpu.tensor_memory_columns
    is_power = columns & (columns - 1) == 0
    if columns > most:
        message = f"{columns} columns of tensor memory; {gpu.name} has {most}"
        message += f" ({columns - most} too many)"
    elif columns < _SMALLEST_ALLOCATION or not is_power:
        message = f"{columns} columns; tcgen05.alloc takes powers of two from 32 on"
    else:
        return
    facts = {"columns": columns, "limit": most}
    yield CheckFinding(f"{CHECK}/allocation", Severity.ERROR, place, message, facts)


def check_tensor_memory(
    kernel: KernelText, parameters: Sequence[bytes] | None = None
) -> CheckReport:
    """Return the budget of a kernel's text: its tcgen05.alloc against what it uses."""
    values = find_first_pass(kernel, parameters)
    allocated = list_allocations(values)
    known = [columns for columns in allocated if columns is not None]
    if len(known) < len(allocated):
        message = "the columns of a tcgen05.alloc cannot be traced"
        finding = CheckFinding(f"{CHECK}/unknown", Severity.UNDECIDED, kernel.short_name, message)
        return CheckReport(CHECK, (finding,), num_examined=len(allocated))
    buffers = list_tensor_buffers(values)
    if not known and not buffers:
        return CheckReport(CHECK)
    return check_tensor_memory_budget(buffers, kernel.gpu, sum(known), kernel.short_name)


def list_allocations(values: RegisterValues) -> tuple[int | None, ...]:
    """Return the columns of each tcgen05.alloc, None where they cannot be traced."""
    return tuple(
        values.read(index, instruction.operands[1]).constant
        for index, instruction in values.kernel.list_instructions("tcgen05.alloc")
    )


def list_tensor_buffers(values: RegisterValues) -> tuple[TensorBuffer, ...]:
    """Return what MMAs and copies use in the first pass, with tensor memory at column 0.

    What has the same columns is listed once; the second buffer of a double-buffered accumulator
    comes in a later pass and is not seen.
    """
    found: dict[tuple[int, int], TensorBuffer] = {}

    def add(name: str, first: int | None, columns: int | None) -> None:
        if first is not None and columns:
            found.setdefault((first, columns), TensorBuffer(name, first, columns))

    for index, instruction in values.kernel.list_instructions("tcgen05.mma"):
        is_scaled = "block_scale" in instruction.opcode.split(".")
        descriptor = values.read(index, instruction.operands[3])
        first = values.read(index, instruction.operands[0]).read_field(0, _COLUMN_BITS)
        if is_scaled:
            columns = read_scaled_form(instruction.opcode, descriptor).shape[1]
        else:
            units = descriptor.read_field(17, 6)  # N / 8, PTX ISA "Instruction descriptor"
            columns = None if units is None else 8 * units
        line = instruction.line
        add(f"accumulator (PTX line {line})", first, columns)
    for copy in list_scale_copies(values):
        line = values.kernel.flow.instructions[copy.index].line
        add(f"scales (PTX line {line})", copy.first_column, copy.num_columns)
    return tuple(sorted(found.values(), key=lambda buffer: buffer.first))
