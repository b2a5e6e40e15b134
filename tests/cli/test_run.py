"""`halfbyte run` runs a program as python would and reports every launch."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from halfbyte.cli.main import main
from halfbyte.errors import HalfbyteError, MissingDependencyError
from halfbyte.virtual.driver.stand_in import find_library
from tests.virtual.driver.fake_core import FakeDevice

PROGRAM = """
import ctypes, struct, sys
import torch
import launches_of_this_program

assert sys.argv[1:] == ["--mnk", "1,2,3", "-q"], sys.argv
assert __name__ == "__main__"
assert torch.zeros(2, device="cuda").is_cuda
print("output of the program")
launches_of_this_program.launch()
"""
LAUNCHES = """
from halfbyte.virtual.driver import session
from halfbyte.virtual.driver.launches import LaunchRequest
from halfbyte.virtual.driver.runtime import Kernel, Library

PTX = ".version 8.8\\n.visible .entry scale()\\n{ ret; }"

def launch():
    runtime = session.get_active().runtime
    kernel = Kernel(Library(b"", PTX), "scale")
    request = LaunchRequest("scale", (2, 1, 1), (32, 1, 1), None, 0, (), ())
    runtime.launch(kernel, request)
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    try:
        find_library()
    except MissingDependencyError as error:
        pytest.skip(f"needs a C++ compiler at install: {error}")
    made = FakeDevice("b200")
    stub = SimpleNamespace(Device=lambda name: made)
    monkeypatch.setitem(sys.modules, "halfbyte.virtual.device", stub)
    return made


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "launches_of_this_program.py").write_text(LAUNCHES)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture(autouse=True)
def forget_launches() -> Iterator[None]:
    yield
    sys.modules.pop("launches_of_this_program", None)


def test_a_program_gets_its_arguments_folder_and_device(
    device: FakeDevice, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (sys.argv[:], sys.path[:])
    assert main(["run", str(program), "--mnk", "1,2,3", "-q"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "output of the program\n"
    assert "launch 0: scale: grid 2x1x1, block 32x1x1: 7 instructions" in captured.err
    assert "1 launch on b200: 7 instructions, " in captured.err
    assert (sys.argv, sys.path) == before


def test_json_is_one_last_line_or_a_file(
    device: FakeDevice, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(program), "--mnk", "1,2,3", "-q"]
    assert main(["run", "--json", "-", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "output of the program"
    report = json.loads(lines[-1])
    assert report["arguments"] == ["--mnk", "1,2,3", "-q"]
    assert (report["exit_code"], report["findings"], report["instructions"]) == (0, 0, 7)
    assert report["launches"][0]["grid"] == [2, 1, 1]
    sys.modules.pop("launches_of_this_program")
    file = tmp_path / "run.json"
    assert main(["run", "--json", str(file), "--gpu", "b200", *arguments]) == 0
    assert json.loads(file.read_text())["launches"] != []


def test_a_fault_prints_the_line_of_the_program_and_its_report_and_exits_1(
    device: FakeDevice, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device.fault = HalfbyteError("warp 3 reads 4 bytes past the end of x")
    assert main(["run", str(program), "--mnk", "1,2,3", "-q"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("warp 3 reads 4 bytes past the end of x") == 1
    assert "HalfbyteError of launch 0" in errors
    assert "launches_of_this_program.py" in errors
    assert "runtime.launch(kernel, request)" in errors
    assert "Traceback" not in errors
    assert errors.endswith(", 1 finding\n")


def test_an_interrupt_names_its_launch(
    device: FakeDevice, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device.fault = KeyboardInterrupt()
    assert main(["run", "--quiet", str(program), "--mnk", "1,2,3", "-q"]) == 130
    errors = capsys.readouterr().err
    assert errors.startswith("launch 0: scale: grid 2x1x1, block 32x1x1: interrupted after ")
    assert errors.count("\n") == 1


def test_a_swallowed_fault_still_exits_1(
    device: FakeDevice, program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device.fault = HalfbyteError("out of bounds")
    text = program.read_text().replace("launches_of_this_program.launch()", "")
    text += "try:\n    launches_of_this_program.launch()\nexcept Exception: pass\n"
    program.write_text(text)
    assert main(["run", str(program), "--mnk", "1,2,3", "-q"]) == 1


@pytest.mark.parametrize(
    ("ending", "code"),
    [("raise SystemExit(7)", 7), ("raise SystemExit('no')", 1), ("1 / 0", 1), ("", 0)],
)
def test_the_exit_code_is_the_programs(
    device: FakeDevice,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ending: str,
    code: int,
) -> None:
    file = tmp_path / "program.py"
    file.write_text(f"import sys\n{ending}\n")
    assert main(["run", str(file)]) == code
    errors = capsys.readouterr().err
    assert ("ZeroDivisionError" in errors) == (ending == "1 / 0")
    assert "runpy" not in errors


def test_a_missing_program_is_misuse(
    device: FakeDevice, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "no_such_program.py"]) == 2
    assert "no_such_program.py" in capsys.readouterr().err
