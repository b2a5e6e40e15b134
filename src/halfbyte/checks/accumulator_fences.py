"""Check: nothing stands between the block-scaled MMAs of an accumulator and the plain ones.

Both kinds go down one pipe in order, so that a fence between them waits for nothing that is needed
and drains the pipe.
"""

from collections.abc import Iterable, Sequence

from halfbyte.checks.finding import CheckFinding, CheckReport, Severity
from halfbyte.checks.kernel_text import KernelText
from halfbyte.checks.sass import SassInstruction, SassKernel

CHECK = "accumulator-fences"
_SCALED_SASS, _PLAIN_SASS = ("UTCOMMA",), ("UTCHMMA", "UTCQMMA", "UTCIMMA")
_FENCES_SASS = ("FENCE", "MEMBAR")


def check_accumulator_fences(kernel: KernelText, sass: SassKernel | None = None) -> CheckReport:
    """Return the fences between MMAs of the two kinds.

    In PTX these are the `tcgen05.fence` on a path from an MMA of one kind to one of the other that
    does not start the outermost loop anew (the next tile waits for its accumulator, and may fence).
    In machine code they are FENCE and MEMBAR at addresses between neighbours of the two kinds.
    """
    findings = [
        CheckFinding(
            f"{CHECK}/ptx",
            Severity.ERROR,
            kernel.describe(index),
            f"{kernel.flow.instructions[index].opcode} between block-scaled and plain MMAs of one "
            "tile; they run in order in one pipe and need none",
        )
        for index in find_fences_between(kernel)
    ]
    if sass is not None:
        findings += [
            CheckFinding(
                f"{CHECK}/sass",
                Severity.ERROR,
                str(fence),
                f"{fence.opcode} between block-scaled and plain MMAs",
            )
            for fence in find_sass_fences_between(sass.instructions)
        ]
    count = sum(1 for _ in kernel.list_instructions("tcgen05.mma"))
    return CheckReport(CHECK, tuple(findings), num_examined=count)


def find_fences_between(kernel: KernelText) -> tuple[int, ...]:
    """Return the indices of the `tcgen05.fence` on a path between MMAs of the two kinds."""
    scaled: set[int] = set()
    plain: set[int] = set()
    for index, instruction in kernel.list_instructions("tcgen05.mma"):
        is_scaled = "block_scale" in instruction.opcode.split(".")
        (scaled if is_scaled else plain).add(index)
    found = []
    for fence, _ in kernel.list_instructions("tcgen05.fence"):
        before = _find_reachable(kernel, fence, is_backward=True)
        behind = _find_reachable(kernel, fence, is_backward=False)
        if (scaled & before and plain & behind) or (plain & before and scaled & behind):
            found.append(fence)
    return tuple(found)


def _find_reachable(kernel: KernelText, start: int, is_backward: bool) -> set[int]:
    """Return the instructions on paths from (or to) one, without new tiles."""
    flow = kernel.flow
    tile_headers = _find_tile_headers(kernel)
    block = kernel.blocks[start]
    inside = flow.block_range(block)
    found = set(range(inside.start, start) if is_backward else range(start, inside.stop))
    seen: set[int] = set()
    waiting = [block]
    while waiting:
        current = waiting.pop()
        for target in (flow.predecessors if is_backward else flow.successors)[current]:
            first, second = (target, current) if is_backward else (current, target)
            starts_tile = any(
                second == header and first in blocks for header, blocks in tile_headers
            )
            if target == flow.exit or target in seen or starts_tile:
                continue
            seen.add(target)
            waiting.append(target)
            found.update(flow.block_range(target))
    return found


def _find_tile_headers(kernel: KernelText) -> Sequence[tuple[int, frozenset[int]]]:
    """Return header and blocks of the outermost loops around MMAs."""
    headers = []
    for index, _ in kernel.list_instructions("tcgen05.mma"):
        around = kernel.list_loops_around(index)
        if around:
            headers.append((around[-1].header, around[-1].blocks))
    return tuple(dict(headers).items())


def find_sass_fences_between(
    instructions: Iterable[SassInstruction],
) -> tuple[SassInstruction, ...]:
    """Return the fences that stand, in order of addresses, between neighbours of the two kinds."""
    found: list[SassInstruction] = []
    fences: list[SassInstruction] = []
    last: tuple[str, ...] | None = None
    for instruction in instructions:
        family = instruction.family
        kind = next((k for k in (_SCALED_SASS, _PLAIN_SASS) if family in k), None)
        if family in _FENCES_SASS:
            fences.append(instruction)
        elif kind is not None:
            if last is not None and kind != last:
                found += fences
            fences, last = [], kind
    return tuple(found)
