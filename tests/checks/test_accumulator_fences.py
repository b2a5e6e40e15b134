"""Fences between MMAs of two kinds, in PTX and in machine code."""

from halfbyte.checks.accumulator_fences import (
    check_accumulator_fences,
    find_sass_fences_between,
)
from halfbyte.checks.kernel_text import read_kernel
from halfbyte.checks.sass import SassInstruction, SassKernel
from tests.checks.ptx_texts import ALWAYS, VARIES, make_products, plain_mma, scaled_mma

FENCE = "tcgen05.fence::after_thread_sync;\n"


def count_findings(ptx: str) -> int:
    return len(check_accumulator_fences(read_kernel(ptx)).findings)


def test_a_fence_between_the_kinds_is_found() -> None:
    ptx = make_products(scaled_mma(VARIES) + "\n" + FENCE + plain_mma(ALWAYS))
    (finding,) = check_accumulator_fences(read_kernel(ptx)).findings
    assert finding.rule == "accumulator-fences/ptx"
    assert "tcgen05.fence::after_thread_sync between block-scaled and plain" in finding.message


def test_a_fence_behind_the_loop_before_the_low_rank_is_found() -> None:
    ptx = make_products(scaled_mma(VARIES), between=FENCE + plain_mma(ALWAYS))
    assert count_findings(ptx) == 1


def test_fences_elsewhere_are_none() -> None:
    assert count_findings(make_products(scaled_mma(VARIES) + plain_mma(ALWAYS))) == 0
    # in front of a tile, and between MMAs of one kind
    assert count_findings(make_products(FENCE + scaled_mma(VARIES) + plain_mma(ALWAYS))) == 0
    twice = scaled_mma(VARIES) + "\n" + FENCE + scaled_mma(ALWAYS)
    assert count_findings(make_products(twice)) == 0


def make_sass(*opcodes: str) -> SassKernel:
    return SassKernel(
        "k", tuple(SassInstruction(16 * i, opcode, "", "") for i, opcode in enumerate(opcodes))
    )


def test_machine_code_fences_count_between_neighbours_of_two_kinds() -> None:
    scaled, plain = "UTCOMMA.2CTA.4X", "UTCHMMA.2CTA"
    fence = "FENCE.VIEW.ASYNC.S"
    between = make_sass(fence, scaled, "MOV", fence, plain, fence)
    assert [i.offset for i in find_sass_fences_between(between.instructions)] == [48]
    same = make_sass(scaled, fence, scaled, plain, fence, plain)
    assert find_sass_fences_between(same.instructions) == ()
    kernel = read_kernel(make_products(scaled_mma(VARIES) + plain_mma(ALWAYS)))
    (finding,) = check_accumulator_fences(kernel, between).findings
    assert finding.rule == "accumulator-fences/sass"
    assert finding.place.startswith("SASS /*0030*/ FENCE.VIEW.ASYNC.S")
