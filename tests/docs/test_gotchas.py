"""docs/gotchas is true: every snippet runs or fails as its page says."""

from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Program, list_missing, list_programs, run_alone, run_program

FOLDER = ROOT / "docs" / "gotchas"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
PROGRAMS = [program for page in PAGES for program in list_programs(page, "python")]
KNOWN_MARKS = {"fails", "alone", "driverless"}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_snippet_does_what_its_page_says(program: Program, b200: Any, tmp_path: Path) -> None:
    assert set(program.marks) <= KNOWN_MARKS
    if "driverless" in program.marks and find_library("cuda") is not None:
        pytest.skip("this machine has an NVIDIA driver, the snippet is about one that has none")
    if "alone" in program.marks:
        said, has_failed = run_alone(program, tmp_path)
    else:
        said, has_failed = run_program(program, b200, tmp_path)
    assert has_failed == ("fails" in program.marks), said
    assert list_missing(said, program.expected) == [], said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_a_snippet_with_its_outcome_and_is_in_the_index(page: Path) -> None:
    programs = list_programs(page, "python")
    assert programs
    assert any(program.expected for program in programs), "a page shows what its snippet says"
    assert f"({page.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")
