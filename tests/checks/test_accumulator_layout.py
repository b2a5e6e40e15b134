"""Cells of accumulators: CuTe's layouts, the PTX ISA's rule, and where they differ."""

import numpy as np
import pytest

from halfbyte.checks.accumulator_layout import (
    compare_cells,
    find_cells_by_isa,
    find_cells_by_layouts,
    read_layout,
)
from halfbyte.errors import UsageError

PAIR = ("(2,(128,256)):(128,(1,256))", "((128,256),1,1):((65536,1),0,0)")


def test_two_ctas_split_the_rows() -> None:
    cells = find_cells_by_layouts("scaled", *PAIR, (256, 256))
    assert cells.name_cell(0, 0) == "cta 0 lane 0 column 0"
    assert cells.name_cell(200, 17) == "cta 1 lane 72 column 17"
    report = compare_cells(find_cells_by_isa(2, (256, 256)), cells)
    assert report.is_clean
    assert report.num_examined == 65536
    assert len(report.evidence) == 4


def test_an_accumulator_of_other_rows_differs_in_named_cells() -> None:
    other = find_cells_by_layouts(
        "low rank", "(2,(128,256)):(1,(2,256))", "((128,256),1,1):((65536,1),0,0)", (256, 256)
    )
    report = compare_cells(find_cells_by_isa(2, (256, 256)), other)
    (finding,) = report.findings
    assert finding.rule == "accumulator-layout/differs"
    assert "of 65536 cells differ; first (1, 0): PTX ISA cta 0 lane 1 column 0" in finding.message
    assert "low rank cta 1 lane 0 column 0" in finding.message


def test_two_elements_in_one_cell_are_found() -> None:
    twice = find_cells_by_layouts(
        "scaled", "(1,(128,256)):(128,(1,128))", "((128,256),1,1):((65536,0),0,0)", (128, 256)
    )
    rules = [finding.rule for finding in compare_cells(twice).findings]
    assert rules == ["accumulator-layout/shared-cell"]


@pytest.mark.parametrize(("num_ctas", "m"), [(1, 128), (1, 64), (2, 256), (2, 128)])
def test_the_rule_gives_every_element_its_own_cell(num_ctas: int, m: int) -> None:
    cells = find_cells_by_isa(num_ctas, (m, 64))
    assert compare_cells(cells).is_clean
    assert cells.lane.max() <= 127
    assert cells.cta.max() == num_ctas - 1


def test_halves_of_a_pair_of_64_rows_lie_side_by_side() -> None:
    cells = find_cells_by_isa(2, (128, 64))
    assert cells.name_cell(0, 40) == "cta 0 lane 64 column 8"
    assert cells.name_cell(127, 0) == "cta 1 lane 63 column 0"


def test_layouts_are_read_with_nested_modes() -> None:
    layout = read_layout("((2,3),4):((1,10),100)")
    offsets = layout.list_offsets()
    assert layout.size == 24
    expected = [a + 10 * b + 100 * c for c in range(4) for b in range(3) for a in range(2)]
    assert np.array_equal(offsets, expected)


def test_what_is_no_layout_of_the_tile_is_refused() -> None:
    with pytest.raises(UsageError, match="no static CuTe layout"):
        read_layout("(?,2):(1,?)")
    with pytest.raises(UsageError, match="65536 elements on 2 CTAs"):
        find_cells_by_layouts("scaled", *PAIR, (128, 256))
    with pytest.raises(UsageError, match="leaves elements"):
        find_cells_by_layouts("scaled", "(2,(128,256)):(128,(1,128))", PAIR[1], (256, 256))
    with pytest.raises(UsageError, match="M = 32"):
        find_cells_by_isa(1, (32, 64))
