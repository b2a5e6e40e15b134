"""Check: nothing writes a register that a product in flight may still read as its A operand.

`wgmma` with A from registers is asynchronous: until its group has been waited for, its operand's
registers may not change (PTX ISA, wgmma.mma_async). PTX that obeys this is no proof: ptxas 12.9 was
seen to put the target of a later load into registers of an operand in flight, after it had
coalesced a copy between the two. So machine code is followed: from each product on, along all
branches, up to the wait that covers its group.
"""

import re
from collections.abc import Iterator

from halfbyte.checks.finding import CheckFinding, CheckReport, Severity
from halfbyte.checks.sass import SassInstruction, SassKernel

CHECK = "wgmma-operands"
_OPERAND_WORDS = 4
_PRODUCT = re.compile(r"R\d+,R(\d+),gdesc")
_TARGET = re.compile(r"(?:U?P\d+,)?R(\d+)")
_WAIT = re.compile(r"gsb0,(0x[0-9a-f]+)")
_MOST_GROUPS = 8  # more than any wait leaves in flight: a loop without a wait has an end here
_COMMIT = "gsb0"  # a product that ends a group
# Their first operand is read.
_WITHOUT_TARGET = ("BAR", "BRX", "EXIT", "NANOSLEEP", "WARPSYNC")


def check_wgmma_operands(kernel: SassKernel) -> CheckReport:
    """Return the writes into A operands of products in flight."""
    instructions = kernel.instructions
    findings = []
    num_examined = 0
    for index, product in enumerate(instructions):
        match = _PRODUCT.match(product.operands) if product.family.endswith("GMMA") else None
        if match is None:
            continue
        num_examined += 1
        first = int(match[1])
        operand = frozenset(range(first, first + _OPERAND_WORDS))
        findings += [
            CheckFinding(
                f"{CHECK}/in-flight",
                Severity.ERROR,
                str(writer),
                f"writes a register that {product} may still read: no wait for its group between",
            )
            for writer in _find_writers(instructions, index, operand)
        ]
    return CheckReport(CHECK, tuple(findings), num_examined=num_examined)


def _find_writers(
    instructions: tuple[SassInstruction, ...], start: int, operand: frozenset[int]
) -> Iterator[SassInstruction]:
    """Yield what writes `operand` between the product at `start` and the wait for its group."""
    start_offset, size = instructions[0].offset, instructions[1].offset - instructions[0].offset
    # (place, groups that were ended since the product's own, -1 before that)
    waiting = [(start + 1, 0 if _ends_group(instructions[start]) else -1)]
    seen = set(waiting)
    while waiting:
        place, groups = waiting.pop()
        instruction = instructions[place]
        wait = _WAIT.match(instruction.operands) if _is_wait(instruction) else None
        if wait is not None and groups >= int(wait[1], 16):
            continue
        if _list_targets(instruction) & operand:
            yield instruction
            continue
        if _ends_group(instruction):
            groups = min(groups + 1, _MOST_GROUPS)
        places = []
        if instruction.family in ("BRA", "EXIT") and instruction.operands[:2] in ("0x", ""):
            if instruction.family == "BRA":
                places.append((int(instruction.operands, 16) - start_offset) // size)
            if instruction.predicate:
                places.append(place + 1)
        else:
            places.append(place + 1)
        for following in places:
            if following < len(instructions) and (following, groups) not in seen:
                seen.add((following, groups))
                waiting.append((following, groups))


def _ends_group(instruction: SassInstruction) -> bool:
    return instruction.family.endswith("GMMA") and _COMMIT in instruction.operands.split(",")


def _is_wait(instruction: SassInstruction) -> bool:
    return instruction.opcode.startswith("WARPGROUP.DEPBAR")


def _list_targets(instruction: SassInstruction) -> frozenset[int]:
    """Return the numbers of the registers that an instruction writes; products' sums left out."""
    match = _TARGET.match(instruction.operands)
    if match is None or instruction.family in _WITHOUT_TARGET:
        return frozenset()
    if instruction.family.endswith("GMMA"):
        return frozenset()
    words = instruction.opcode.split(".")
    width = 4 if "128" in words else 2 if "64" in words or "WIDE" in words else 1
    first = int(match[1])
    return frozenset(range(first, first + width))
