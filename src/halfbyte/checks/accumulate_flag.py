"""Check: the flag with which an MMA adds to its accumulator is not frozen.

`enable-input-d` must be false for the first k-block and true for the others. A flag that Python
set while a kernel was traced is a constant of the text: always true, and the first k-block adds to
what tensor memory holds; always false, and only the last k-block counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from halfbyte.checks.finding import CheckFinding, CheckReport, Evidence, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.loops import Loop, order_blocks
from halfbyte.checks.register_values import RegisterValues, find_first_pass, find_lasting
from halfbyte.ptx.register_effects import list_registers
from halfbyte.ptx.syntax import Operand, Vector

CHECK = "accumulate-flag"
_COLUMN_BITS = 16


@dataclass(frozen=True, slots=True)
class AccumulatingMma:
    """One MMA and its flag.

    Attributes:
        index: of the instruction in the kernel's control flow.
        flag: True or False where it is the same in every pass, None where it varies.
        column: of the accumulator in the first pass; None where not known.
        is_fixed: whether the accumulator is the same in every pass of the innermost loop.
        loop: the innermost loop around it, None outside of loops.
    """

    index: int
    flag: bool | None
    column: int | None
    is_fixed: bool
    loop: Loop | None


def check_accumulate_flag(kernel: KernelText) -> CheckReport:
    """Return the accumulators whose flag is a constant where it must vary."""
    products = list_accumulating_mma(kernel)
    findings = (*_find_always_false(kernel, products), *_find_always_true(kernel, products))
    words = {True: "always true", False: "always false", None: "varies"}
    evidence = tuple(
        Evidence(f"enable-input-d {words[product.flag]}", kernel.quote(product.index))
        for product in products
    )
    return CheckReport(CHECK, findings, evidence, len(products))


def list_accumulating_mma(kernel: KernelText) -> tuple[AccumulatingMma, ...]:
    """Return the `tcgen05.mma` of a kernel with what is known of their flags."""
    first, lasting = find_first_pass(kernel), find_lasting(kernel)
    found = []
    for index, instruction in kernel.list_instructions("tcgen05.mma"):
        target = instruction.operands[0]
        flag = lasting.read(index, find_flag(instruction.operands), 1).constant
        around = kernel.list_loops_around(index)
        loop = around[0] if around else None
        found.append(
            AccumulatingMma(
                index=index,
                flag=None if flag is None else bool(flag),
                column=first.read(index, target).read_field(0, _COLUMN_BITS),
                is_fixed=loop is None or _is_invariant(kernel, lasting, index, target, loop),
                loop=loop,
            )
        )
    return tuple(found)


def find_flag(operands: tuple[Operand, ...]) -> Operand:
    """Return the operand `enable-input-d`: behind descriptors, scales and disable-output-lane.

    The order is D, A, B, idesc, [scales of A], [scales of B] or {disable-output-lane}, flag (PTX
    ISA, "tcgen05.mma").
    """
    rest = [operand for operand in operands[4:] if not isinstance(operand, Vector)]
    is_scaled = len(rest) >= 3
    return rest[2 if is_scaled else 0]


def _is_invariant(
    kernel: KernelText, lasting: RegisterValues, index: int, target: Operand, loop: Loop
) -> bool:
    """Return whether an accumulator's address cannot change while the loop runs."""
    if lasting.read(index, target).read_field(0, _COLUMN_BITS) is not None:
        return True
    names = set(list_registers(target))
    return not any(
        names.intersection(kernel.effects[position].writes)
        for block in loop.blocks
        for position in kernel.flow.block_range(block)
    )


def _find_always_false(
    kernel: KernelText, products: tuple[AccumulatingMma, ...]
) -> Iterator[CheckFinding]:
    """Yield MMAs that start anew in each pass of a loop whose sum is handed over behind it."""
    for product in products:
        if product.flag is not False or product.loop is None or not product.is_fixed:
            continue
        if not _hands_over_behind(kernel, product.loop):
            continue
        handed_over = _hands_over_inside(kernel, product.loop)
        if handed_over:
            continue
        message = (
            "enable-input-d is the constant false in a loop over k-blocks: each pass forgets the "
            "ones before, only the last k-block counts. A flag set in Python is frozen when the "
            "kernel is traced; let it depend on the loop's counter"
        )
        if handed_over is None:
            message += "; whether the loop hands its product over itself is not decided"
        severity = Severity.UNDECIDED if handed_over is None else Severity.ERROR
        place = kernel.describe(product.index)
        yield CheckFinding(f"{CHECK}/always-false", severity, place, message)


def _hands_over_inside(kernel: KernelText, loop: Loop) -> bool | None:
    """Return whether a commit in a loop signals a barrier behind which tensor memory is read.

    That is a loop over products (attention does it); a loop over k-blocks signals that slots are
    free. None where a commit's barrier, or what waits for it, is not known.
    """
    values = find_first_pass(kernel)
    readers: set[int] = set()
    is_known = True
    loads = [kernel.blocks[index] for index, _ in kernel.list_instructions("tcgen05.ld")]
    for index, instruction in kernel.list_instructions("mbarrier.try_wait"):
        barrier = values.read_shared_offset(index, instruction.operands[1])
        if any(kernel.dominators.dominates(kernel.blocks[index], block) for block in loads):
            if barrier is None:
                is_known = False
            else:
                readers.add(barrier)
    for index, instruction in kernel.list_instructions("tcgen05.commit"):
        if kernel.blocks[index] in loop.blocks:
            barrier = values.read_shared_offset(index, instruction.operands[0])
            if barrier in readers:
                return True
            is_known = is_known and barrier is not None
    return False if is_known else None


def _hands_over_behind(kernel: KernelText, loop: Loop) -> bool:
    """Return whether a commit stands behind a loop, before it is entered again.

    What is committed behind the loop was summed over all of its passes; a loop over tiles commits
    within.
    """
    flow = kernel.flow
    position = {block: number for number, block in enumerate(order_blocks(flow))}
    seen: set[int] = set()
    waiting = [
        target
        for block in loop.blocks
        for target in flow.successors[block]
        if target not in loop.blocks
    ]
    while waiting:
        block = waiting.pop()
        if block == flow.exit or block in seen or block in loop.blocks:
            continue
        seen.add(block)
        for index in flow.block_range(block):
            opcode = flow.instructions[index].opcode
            if opcode.startswith("tcgen05.commit"):
                return True
            if opcode.startswith("tcgen05.mma"):
                break
        else:
            later = (t for t in flow.successors[block] if t != flow.exit)
            waiting += [target for target in later if position[target] > position[block]]
    return False


def _find_always_true(
    kernel: KernelText, products: tuple[AccumulatingMma, ...]
) -> Iterator[CheckFinding]:
    """Yield accumulators that no MMA starts."""
    groups: dict[int | None, list[AccumulatingMma]] = {}
    for product in products:
        groups.setdefault(product.column, []).append(product)
    starts_somewhere = any(product.flag is not True for product in groups.get(None, ()))
    is_stored = any(True for _ in kernel.list_instructions("tcgen05.st"))
    for column, group in groups.items():
        if any(product.flag is not True for product in group):
            continue
        name = "an accumulator" if column is None else f"the accumulator at column {column}"
        message = (
            f"enable-input-d is the constant true in all {len(group)} MMAs of {name}: the first "
            "k-block adds to what tensor memory holds"
        )
        is_open = is_stored or starts_somewhere or (column is None and len(groups) > 1)
        if is_open:
            message += "; whether a tcgen05.st or another MMA clears it first is not decided"
        severity = Severity.UNDECIDED if is_open else Severity.ERROR
        place = kernel.describe(group[0].index)
        yield CheckFinding(f"{CHECK}/always-true", severity, place, message)
