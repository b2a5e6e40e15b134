"""The error policy of the command line: one readable message, the right exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from halfbyte.cli import main as program
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.halfbyte_file import write_halfbyte_file
from halfbyte.version import __version__
from tests.random_linears import LinearShape, make_linear


def run_halfbyte(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "halfbyte.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def failing_app(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """An app whose only verb raises what the test puts under "error"."""
    raised: dict[str, BaseException] = {}
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail() -> None:
        raise raised["error"]

    monkeypatch.setattr(program, "app", app)
    monkeypatch.delenv("HALFBYTE_TRACEBACK", raising=False)
    return raised


def test_version_prints_the_version() -> None:
    finished = run_halfbyte("--version")
    assert (finished.returncode, finished.stdout.strip()) == (0, f"halfbyte {__version__}")


def test_help_lists_every_verb_and_the_exit_codes() -> None:
    finished = run_halfbyte("--help")
    assert finished.returncode == 0
    for verb in ("demo", "quantize", "inspect", "doctor", "virtual GPU", "Exit codes"):
        assert verb in finished.stdout


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["doctor", "--nonsense"]])
def test_misuse_exits_2(arguments: list[str]) -> None:
    finished = run_halfbyte(*arguments)
    assert finished.returncode == 2
    assert "nonsense" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_halfbyte_error_is_one_message_and_exit_1(
    failing_app: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_app["error"] = CheckpointError("a.safetensors: tensor 'w[0]' overlaps 'v'")
    assert program.main(["fail"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: a.safetensors: tensor 'w[0]' overlaps 'v'\n"
    assert captured.out == ""


def test_contradicting_arguments_exit_2(failing_app: dict[str, BaseException]) -> None:
    failing_app["error"] = UsageError("IN and OUT are the same file")
    assert program.main(["fail"]) == 2


def test_a_missing_file_is_one_message_and_exit_1(
    failing_app: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_app["error"] = FileNotFoundError(2, "No such file or directory", "a.safetensors")
    assert program.main(["fail"]) == 1
    assert "a.safetensors" in capsys.readouterr().err


def test_a_defect_says_so_without_a_traceback(
    failing_app: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_app["error"] = KeyError("scale")
    assert program.main(["fail"]) == 1
    error = capsys.readouterr().err
    assert "internal error: KeyError: 'scale'" in error
    assert "Traceback" not in error


def test_the_traceback_can_be_asked_for(
    failing_app: dict[str, BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_TRACEBACK", "1")
    failing_app["error"] = CheckpointError("bad")
    with pytest.raises(CheckpointError, match="bad"):
        program.main(["fail"])


def test_an_interrupt_exits_130(failing_app: dict[str, BaseException]) -> None:
    failing_app["error"] = KeyboardInterrupt()
    assert program.main(["fail"]) == 130


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["build", "--list"], 0), (["build", "--list", "--json"], 0), (["diff"], 1)],
    ids=["help", "table", "json", "findings"],
)
def test_a_closed_pipe_is_quiet_and_changes_no_exit_code(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    if arguments == ["diff"]:  # both are read, and differ
        for name, value in (("a", 0.0), ("b", 1.0)):
            write_halfbyte_file(
                tmp_path / name,
                {"q": make_linear(LinearShape(16, 32, 0), ("nvfp4", None))},
                {"norm": torch.full((4,), value)},
            )
        arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "halfbyte.cli.main", *arguments]
    finished = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write_end)
    assert (finished.returncode, finished.stderr) == (code, "")


def test_a_full_disk_behind_stdout_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "halfbyte.cli.main", "doctor", "--json"]
        finished = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert finished.returncode == 1
    assert finished.stderr.startswith("error: ")
    assert "No space left" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_control_characters_in_an_error_do_not_steer_the_terminal(
    failing_app: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing_app["error"] = CheckpointError("a\x1b[31m.safetensors: corrupt\nsecond line")
    assert program.main(["fail"]) == 1
    assert "error: a\\x1b[31m.safetensors: corrupt\nsecond line" in capsys.readouterr().err
