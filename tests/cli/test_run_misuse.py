"""`halfbyte run` and programs that end in odd ways: exit codes and messages."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli.main import main
from halfbyte.errors import MissingDependencyError
from halfbyte.virtual.driver.stand_in import find_library
from halfbyte.virtual.library import load_core


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        find_library()
        load_core()
    except MissingDependencyError as error:
        pytest.skip(f"needs a C++ compiler at install: {error}")


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Run:
    """Return a function that runs `halfbyte run` in this process, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        code = main(["run", *arguments])
        return Done(code, *capfd.readouterr())

    return call


def run_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halfbyte.cli.main", "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return name


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import os; os.close(2)", 0),
        ("import sys; sys.stderr.close(); raise ValueError", 1),
    ],
)
def test_a_program_may_close_stderr(tmp_path: Path, text: str, code: int) -> None:
    done = run_process(tmp_path, write(tmp_path, text))
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit('text')", 1),
        ("import sys; sys.exit(44)", 44),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", 130),
    ],
)
def test_the_exit_code_is_the_programs_own(run: Run, tmp_path: Path, text: str, code: int) -> None:
    assert run(write(tmp_path, text, "prögram with spaces.py")).returncode == code


@pytest.mark.parametrize("text", ["def f(: pass", "nul \0 byte"])
def test_a_program_that_does_not_compile_shows_no_interior(
    run: Run, tmp_path: Path, text: str
) -> None:
    done = run(write(tmp_path, text))
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["."], [""], ["-m", "no_such_module.at_all"], ["missing.py"], ["--unknown", "x"]]
)
def test_what_cannot_be_run_is_a_misuse(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_missing_module_inside_the_program_keeps_its_traceback(run: Run, tmp_path: Path) -> None:
    done = run(write(tmp_path, "import no_such_module_at_all"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "program.py" in done.stderr.splitlines()[1]


def test_a_program_meets_a_closed_pipe_as_under_python(tmp_path: Path) -> None:
    endless = write(tmp_path, "while True: print('y')", "endless.py")
    brief = write(tmp_path, "print('y')", "brief.py")
    for file, code in ((endless, 1), (brief, 0)):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            [sys.executable, "-m", "halfbyte.cli.main", "run", file],
            cwd=tmp_path,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        os.close(write_end)
        assert done.returncode == code, done.stderr
        assert ("BrokenPipeError" in done.stderr) == (code == 1)
        assert "0 launches on b200" in done.stderr
        assert "ignored" not in done.stderr


def test_json_goes_where_it_was_asked_for_though_the_program_moves(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "run.json").write_text("old")
    done = run("--json", "run.json", write(tmp_path, "import os; os.chdir('other')"))
    assert done.returncode == 0
    assert json.loads((tmp_path / "run.json").read_text())["exit_code"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "program.py", "run.json"]


def test_a_killed_program_leaves_the_old_json(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("old")
    file = write(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert run_process(tmp_path, "--json", "run.json", file).returncode == -signal.SIGKILL
    assert (tmp_path / "run.json").read_text() == "old"


@pytest.mark.parametrize("file", ["no/such/folder.json", "."])
def test_json_that_cannot_be_written_is_refused_before_the_run(
    run: Run, tmp_path: Path, file: str
) -> None:
    done = run("--json", file, write(tmp_path, "print('ran')"))
    assert done.returncode == 2
    assert "ran" not in done.stdout
    assert "--json" in done.stderr


@pytest.mark.parametrize("variable", ["HALFBYTE_VIRTUAL_LIBRARY", "HALFBYTE_CUDA_STAND_IN"])
@pytest.mark.parametrize("library", ["text.so", "missing.so", "other"])
def test_a_library_that_is_none_is_named(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    library: str,
) -> None:
    (tmp_path / "text.so").write_text("no library")
    own = [find_library(), Path(load_core()._name)]  # of the right kind for the other variable
    other = own[0] if variable == "HALFBYTE_VIRTUAL_LIBRARY" else own[1]
    name = str(other) if library == "other" else library
    monkeypatch.setenv(variable, name)
    done = run(write(tmp_path, "print('ran')"))
    assert done.returncode == 1
    assert "ran" not in done.stdout
    assert done.stderr.startswith("error: ")
    assert Path(name).name in done.stderr or Path(name).resolve().name in done.stderr
