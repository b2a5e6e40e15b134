"""docs/learn is true: its programs run, print what the pages say, and are what they quote."""

from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import (
    ROOT,
    Program,
    has_excerpt,
    list_blocks,
    list_missing,
    list_programs,
    run_program,
)

FOLDER = ROOT / "docs" / "learn"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
PROGRAMS = [program for page in PAGES for program in list_programs(page, "sh")]


def name_program(program: Program) -> str:
    assert program.path is not None
    return "-".join([program.path.stem, *program.arguments])


@pytest.mark.parametrize("program", PROGRAMS, ids=name_program)
def test_program_says_what_its_page_says(program: Program, b200: Any, tmp_path: Path) -> None:
    first_launch = len(b200.log)
    said, has_raised = run_program(program, b200, tmp_path)
    assert has_raised == ("fails" in program.marks), said
    assert program.expected, "a page shows what its program prints"
    assert list_missing(said, program.expected) == [], said
    if has_raised:
        report = said[said.index(program.expected[0].split("...")[0]) :].strip().splitlines()
        assert len(report) == len(program.expected), "a page shows the whole report"
    else:
        records = list(b200.log)[first_launch:]
        assert [str(one) for record in records for one in record.findings] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_quotes_its_programs(page: Path) -> None:
    texts = [
        program.path.read_text(encoding="utf-8")
        for program in list_programs(page, "sh")
        if program.path is not None
    ]
    blocks = [block for block in list_blocks(page) if block.language == "python"]
    assert blocks, "a page shows parts of its program"
    assert [block.line for block in blocks if not has_excerpt(block.text, texts)] == []


def test_every_program_is_run_by_a_page_and_every_page_is_in_the_index() -> None:
    run = {program.path for program in PROGRAMS}
    assert sorted(set(FOLDER.glob("*.py")) - run) == []
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in index] == []
