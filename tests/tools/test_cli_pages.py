"""The pages of the command line say what the program says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program() -> ModuleType:
    path = ROOT / "tools" / "make_cli_pages.py"
    spec = importlib.util.spec_from_file_location("make_cli_pages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_verb_has_its_page_and_every_page_is_current(program: ModuleType) -> None:
    modules = (ROOT / "src" / "halfbyte" / "cli").glob("*.py")
    verbs = {path.stem for path in modules if "\ndef register(" in path.read_text(encoding="utf-8")}
    pages = {path.stem for path in (ROOT / "docs" / "cli").glob("*.md")}
    assert len(verbs) > 8
    assert pages == verbs
    assert program.main(["--check"]) == 0, "run tools/make_cli_pages.py"


def test_a_page_that_is_out_of_date_or_left_over_is_named(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "FOLDER", tmp_path)
    assert program.main([]) == 0
    assert program.main(["--check"]) == 0
    (tmp_path / "doctor.md").write_text("something else")
    (tmp_path / "gone.md").write_text("a verb that was removed")
    assert program.main(["--check"]) == 1
    listed = capsys.readouterr().out
    assert "docs/cli/doctor.md" in listed
    assert "docs/cli/gone.md" in listed
