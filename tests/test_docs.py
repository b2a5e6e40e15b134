"""The documents hang together: no dead link, no decision page that the index leaves out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def read_prose(path: Path) -> str:
    """The text of a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)


def list_anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    if path.suffix != ".md":
        return set()
    headings = re.findall(r"^#+ (.*)$", read_prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", read_prose(path))
    dead = []
    for name, heading in targets:
        target = path.parent / name if name else path
        if "://" in name:
            continue
        has_heading = not heading or heading in list_anchors(target)
        if not target.exists() or not has_heading:
            dead.append(f"{name}#{heading}")
    assert dead == []


def test_every_decision_is_in_the_index_under_its_own_number() -> None:
    folder = ROOT / "docs" / "design"
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [page for page in pages if f"({page})" not in index] == []
    numbers = [page[:4] for page in pages]
    assert len(set(numbers)) == len(numbers), numbers


def test_programs_named_in_the_acceptance_table_exist_or_are_marked_not_yet_run() -> None:
    for line in (ROOT / "docs" / "acceptance.md").read_text(encoding="utf-8").splitlines():
        for program in re.findall(r"(benchmarks/\w+\.py|tests/[\w/.]+)", line):
            assert (ROOT / program).exists() or "not yet run" in line, f"{program}: {line}"
