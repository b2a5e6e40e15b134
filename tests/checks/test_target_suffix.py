"""Targets without the suffix that tcgen05 needs, named."""

import pytest

from halfbyte.checks.kernel_text import read_kernel
from halfbyte.checks.target_suffix import check_target_suffix
from tests.checks.ptx_texts import ALWAYS, make_products, scaled_mma

PTX = make_products(scaled_mma(ALWAYS))


def check(ptx: str, target: str) -> list[tuple[str, str]]:
    report = check_target_suffix(read_kernel(ptx.replace("sm_100a", target)))
    assert report.num_examined > 0
    return [(finding.rule, finding.message) for finding in report.findings]


@pytest.mark.parametrize("target", ["sm_100a", "sm_100f", "sm_103a"])
def test_targets_that_have_the_instructions_are_clean(target: str) -> None:
    assert check(PTX, target) == []


@pytest.mark.parametrize("target", ["sm_100", "sm_120", "sm_120a", "sm_90a"])
def test_another_target_is_named_with_those_that_work(target: str) -> None:
    ((rule, message),) = check(PTX, target)
    assert rule == "target-suffix/target"
    assert f"does not exist on .target {target}" in message
    assert "sm_100a, sm_100f" in message
    assert ("the suffix is missing (sm_100a or sm_100f)" in message) == (target == "sm_100")


def test_a_family_spells_blocks_in_one_way_alone() -> None:
    old = PTX.replace("block_scale.block16", "block_scale.scale_vec::4X")
    assert check(old, "sm_100a") == []
    ((rule, message),) = check(old, "sm_100f")
    assert rule == "target-suffix/block-word"
    assert ".block16, not .scale_vec::4X" in message
