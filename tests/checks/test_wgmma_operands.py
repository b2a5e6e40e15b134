"""Writes into operands of products in flight are found on all paths up to the wait."""

import pytest

from halfbyte.checks.sass import SassInstruction, SassKernel
from halfbyte.checks.wgmma_operands import check_wgmma_operands

PRODUCT = "QGMMA.64x256x32.F32.E4M3.E4M3 R24,R164,gdesc[UR20],R24"
LAST = "QGMMA.64x256x32.F32.E4M3.E4M3 R24,R168,gdesc[UR20],R24,gsb0"
WAIT_ALL, WAIT_ONE = "WARPGROUP.DEPBAR.LE gsb0,0x0", "WARPGROUP.DEPBAR.LE gsb0,0x1"
LOAD = "LDS.128 R164,[R6+UR23]"


def make_kernel(*lines: str) -> SassKernel:
    """Return instructions at multiples of 16 bytes; `@P0 ` in front is a predicate."""
    instructions = []
    for number, line in enumerate((*lines, "EXIT")):
        predicate, _, text = line.rpartition("@P0 ")
        opcode, _, operands = text.partition(" ")
        has_predicate = "@P0" if line.startswith("@P0 ") else predicate
        instructions.append(SassInstruction(16 * number, opcode, operands, has_predicate))
    return SassKernel("kernel", tuple(instructions))


@pytest.mark.parametrize(
    ("lines", "num_writes"),
    [
        ((PRODUCT, LAST, LOAD, WAIT_ALL), 1),
        ((PRODUCT, LAST, WAIT_ALL, LOAD), 0),
        ((PRODUCT, LAST, WAIT_ONE, LOAD, WAIT_ALL), 1),
        ((PRODUCT, LAST, LAST, WAIT_ONE, LOAD), 0),
        ((PRODUCT, LAST, "IMAD.MOV.U32 R171,RZ,RZ,R4", WAIT_ALL), 1),
        ((PRODUCT, LAST, "IADD3 R172,P1,R171,0x1,RZ", WAIT_ALL), 0),
        ((PRODUCT, LAST, "IMAD.WIDE.U32 R163,R4,0x2,R6", WAIT_ALL), 1),
        ((PRODUCT, LAST, "STS.128 [R164],R168", "BAR.SYNC R164,0x80", WAIT_ALL), 0),
        # A loop that loads at its head what its end still reads, and one that waits first.
        ((LOAD, PRODUCT, LAST, "@P0 BRA 0x0", WAIT_ALL), 1),
        ((WAIT_ALL, LOAD, PRODUCT, LAST, "@P0 BRA 0x0", WAIT_ALL), 0),
        # The load is jumped over.
        ((PRODUCT, LAST, "BRA 0x40", LOAD, WAIT_ALL), 0),
    ],
)
def test_writes_in_flight(lines: tuple[str, ...], num_writes: int) -> None:
    report = check_wgmma_operands(make_kernel(*lines))
    assert len(report.findings) == num_writes, [str(one) for one in report.findings]
    assert report.num_examined == sum(line in (PRODUCT, LAST) for line in lines)
