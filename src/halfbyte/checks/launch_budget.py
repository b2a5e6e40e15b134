"""The shared and tensor memory of one launch, measured from its PTX and its parameters.

Operands are the tensor maps among the parameters: what one ring slot holds of each, in a CTA.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from halfbyte.checks.finding import CheckFinding, CheckReport, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.register_values import RegisterValues, find_first_pass
from halfbyte.checks.shared_budget import CHECK, check_shared_total, compare_declared
from halfbyte.checks.tensor_memory_budget import list_allocations, list_tensor_buffers
from halfbyte.checks.tma_loads import TmaLoad, list_tma_loads
from halfbyte.ptx.syntax import Instruction

_SHARED_NAME, _TENSOR_NAME = "shared", "tensor_memory"


@dataclass(frozen=True, slots=True)
class OperandBudget:
    """What one operand takes of a CTA's shared memory.

    Attributes:
        name: "parameter 2", or what `--declare` calls it.
        parameter: number of the kernel parameter that holds the tensor map.
        dtype, box, swizzle: of the tensor map.
        box_bytes: of one TMA copy.
        boxes_per_slot: copies that fill one slot, those of other CTAs' multicasts included; None
            where not known.
        slot_bytes: the product; None where not known.
        offset: of the first slot in shared memory; None where not known.
        shares_slots_with: parameters whose boxes lie at the same offset.
    """

    name: str
    parameter: int
    dtype: str
    box: tuple[int, ...]
    swizzle: int
    box_bytes: int
    boxes_per_slot: int | None
    slot_bytes: int | None
    offset: int | None
    shares_slots_with: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BarrierBytes:
    """Bytes that a loop arms a barrier with, and those of the loads in the same loop."""

    offset: int
    expected_bytes: int
    loaded_bytes: int | None
    place: str


@dataclass(frozen=True, slots=True)
class LaunchBudget:
    """The budget of one launch; sizes in bytes per CTA, columns of tensor memory.

    Attributes:
        kernel: its short name.
        static_bytes, dynamic_bytes: shared memory.
        alignment_bytes: padding in front of the dynamic part.
        capacity_bytes: what a CTA can have.
        num_barriers: mbarriers that are initialised.
        tensor_columns: allocated; None where they cannot be traced.
        used_columns: highest column used in the first pass, plus one.
        operands: by parameter.
        barriers: by offset.
        problems: tensor loads that could not be measured, with the reason.
    """

    kernel: str
    static_bytes: int
    dynamic_bytes: int
    alignment_bytes: int
    capacity_bytes: int
    num_barriers: int
    tensor_columns: int | None
    used_columns: int
    operands: tuple[OperandBudget, ...]
    barriers: tuple[BarrierBytes, ...]
    problems: tuple[str, ...]

    @property
    def used_bytes(self) -> int:
        """Shared memory of a CTA, as the launch check counts it."""
        return self.static_bytes + self.alignment_bytes + self.dynamic_bytes

    @property
    def slack_bytes(self) -> int:
        """What is left over; negative where it does not fit."""
        return self.capacity_bytes - self.used_bytes

    def list_figures(self) -> dict[str, int | None]:
        """Return what a declared figure is compared with, by name; None where it is not known.

        Bytes per slot of each operand, "shared" for all of a CTA's, "tensor_memory" for columns.
        """
        return {
            **{operand.name: operand.slot_bytes for operand in self.operands},
            _SHARED_NAME: self.used_bytes,
            _TENSOR_NAME: self.tensor_columns,
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {**asdict(self), "used_bytes": self.used_bytes, "slack_bytes": self.slack_bytes}


def measure_launch(
    kernel: KernelText,
    parameters: Sequence[bytes],
    dynamic_bytes: int,
    names: Mapping[int, str] | None = None,
) -> LaunchBudget:
    """Return the budget of a launch.

    Args:
        kernel: its kernel.
        parameters: bytes of each parameter.
        dynamic_bytes: dynamic shared memory of a CTA.
        names: what to call the tensor maps of parameters.
    """
    values = find_first_pass(kernel, parameters)
    loads = list_tma_loads(values, parameters)
    start = kernel.layout.static_shared_end - kernel.gpu.reserved_shared_bytes
    static = _measure_static(kernel)
    columns = list_allocations(values)
    problems = (f"{kernel.quote(load.index)}: {load.problem}" for load in loads if load.problem)
    return LaunchBudget(
        kernel=kernel.short_name,
        static_bytes=static,
        dynamic_bytes=dynamic_bytes,
        alignment_bytes=start - static,
        capacity_bytes=kernel.gpu.shared_bytes_per_cta,
        num_barriers=sum(1 for _ in kernel.list_instructions("mbarrier.init")),
        tensor_columns=None if None in columns else sum(filter(None, columns)),
        used_columns=max((b.end for b in list_tensor_buffers(values)), default=0),
        operands=tuple(_list_operands(values, loads, names or {})),
        barriers=tuple(_list_barriers(values, loads)),
        problems=tuple(problems),
    )


def _measure_static(kernel: KernelText) -> int:
    """Return where the static variables end, without the padding of the dynamic part."""
    reserved = kernel.gpu.reserved_shared_bytes
    variables = (*kernel.module.globals, *kernel.body.variables.values())
    ends = (
        kernel.layout.shared[variable.name] + variable.size_bytes - reserved
        for variable in variables
        if variable.space == "shared" and variable.size_bytes
    )
    return max(ends, default=0)


def _list_operands(
    values: RegisterValues, loads: Sequence[TmaLoad], names: Mapping[int, str]
) -> Iterator[OperandBudget]:
    groups: dict[int, list[TmaLoad]] = {}
    for load in loads:
        if load.parameter is not None and load.tensor_map is not None:
            groups.setdefault(load.parameter, []).append(load)
    for parameter, group in sorted(groups.items()):
        first = group[0]
        tensor_map = first.tensor_map
        assert tensor_map is not None
        boxes = _count_boxes(values, group)
        others = {
            load.parameter
            for load in loads
            if load.first is not None and load.first == first.first and load.parameter != parameter
        }
        yield OperandBudget(
            name=names.get(parameter, f"parameter {parameter}"),
            parameter=parameter,
            dtype=tensor_map.layout.dtype,
            box=tuple(tensor_map.box.shape),
            swizzle=tensor_map.box.swizzle,
            box_bytes=tensor_map.box_bytes,
            boxes_per_slot=boxes,
            slot_bytes=None if boxes is None else boxes * tensor_map.box_bytes,
            offset=first.first,
            shares_slots_with=tuple(sorted(other for other in others if other is not None)),
        )


def _count_boxes(values: RegisterValues, group: Sequence[TmaLoad]) -> int | None:
    """Return how many boxes of one operand a pass of a loop puts into a CTA's slot."""
    per_loop: dict[int, int] = {}
    for load in group:
        copies = load.copies
        if copies is None:
            return None
        loop = find_loop(values.kernel, load.index)
        per_loop[loop] = per_loop.get(loop, 0) + copies
    return max(per_loop.values())


def find_loop(kernel: KernelText, index: int) -> int:
    """Return the header of the innermost loop around an instruction, -1 outside of loops."""
    around = kernel.list_loops_around(index)
    return around[0].header if around else -1


def _list_barriers(values: RegisterValues, loads: Sequence[TmaLoad]) -> Iterator[BarrierBytes]:
    """Yield what arms a barrier in a loop, all `expect_tx` of the loop together, and its loads."""
    kernel = values.kernel
    expected: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, instruction in kernel.list_instructions("mbarrier."):
        if "expect_tx" not in instruction.opcode:
            continue
        offset, count = _read_expectation(values, index, instruction)
        if offset is not None and count is not None:
            key = (offset, find_loop(kernel, index))
            expected.setdefault(key, []).append((index, count))
    for (offset, loop), armed in expected.items():
        mine = [
            load
            for load in loads
            if load.barrier == offset and find_loop(kernel, load.index) == loop
        ]
        sizes = [_measure_arrival(values, load) for load in mine]
        known = [size for size in sizes if size is not None]
        loaded = sum(known) if known and len(known) == len(sizes) else None
        counts = [count for _, count in armed]
        # Arms on exclusive branches expect the same bytes once.
        count = counts[0] if loaded in counts else sum(counts)
        yield BarrierBytes(offset, count, loaded, kernel.describe(armed[0][0]))


def _read_expectation(
    values: RegisterValues, index: int, instruction: Instruction
) -> tuple[int | None, int | None]:
    """Return barrier and bytes of `mbarrier.arrive.expect_tx state, [barrier], bytes`."""
    *_, barrier, count = instruction.operands
    return values.read_shared_offset(index, barrier), values.read(index, count).constant


def _measure_arrival(values: RegisterValues, load: TmaLoad) -> int | None:
    """Return the bytes that a load adds to the barrier it names, counted for all CTAs of a pair.

    With .cta_group::2 the copies of both CTAs signal the barrier of one.
    """
    copies = load.copies
    if copies is None or load.box_bytes is None:
        return None
    opcode = values.kernel.flow.instructions[load.index].opcode
    return load.box_bytes * copies * (2 if ".cta_group::2" in opcode else 1)


def check_launch_budget(
    budget: LaunchBudget, kernel: KernelText, declared: Mapping[str, int] | None = None
) -> CheckReport:
    """Return where a launch does not fit, declared figures that are wrong, bytes that do not match.

    `declared` has figures by the names of `LaunchBudget.list_figures`; UsageError for another.
    """
    findings = [
        *check_shared_total(budget.used_bytes, kernel.gpu, budget.kernel, budget.alignment_bytes),
        *compare_declared(declared or {}, budget.list_figures(), budget.kernel),
    ]
    for barrier in budget.barriers:
        loaded = barrier.loaded_bytes
        if loaded is not None and loaded != barrier.expected_bytes:
            message = (
                f"the barrier at shared+0x{barrier.offset:x} expects {barrier.expected_bytes} "
                f"bytes, the loads of its loop bring {loaded}"
            )
            findings.append(
                CheckFinding(f"{CHECK}/expected-bytes", Severity.WARNING, barrier.place, message)
            )
    findings += [
        CheckFinding(f"{CHECK}/unknown-load", Severity.UNDECIDED, budget.kernel, problem)
        for problem in budget.problems
    ]
    return CheckReport(CHECK, tuple(findings), num_examined=len(budget.operands))
