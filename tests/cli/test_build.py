"""`halfbyte build`: what it writes and prints, and its exit codes."""

import importlib.util
import json
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import HalfbyteError
from halfbyte.runtime import artifact, shipped_kernels
from halfbyte.runtime.artifact import read_artifacts
from tests.runtime.scaled_sum import ScaledSumConfig, make_source


@pytest.fixture(autouse=True)
def tiny_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ship one tiny kernel, written for sm_100a and sm_90a."""

    def list_sources(target: str) -> list[KernelSource]:
        is_written = target in ("sm_100a", "sm_90a")
        return [make_source(ScaledSumConfig(2.0, target))] if is_written else []

    monkeypatch.setattr(shipped_kernels, "_LISTS", {"scaled_sum": list_sources})


@pytest.fixture
def compiler() -> None:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs the extra `kernels`")


def run(*arguments: object) -> int:
    return main(["build", *map(str, arguments)])


@pytest.mark.usefixtures("compiler")
def test_kernels_of_several_targets_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels"
    assert run("--arch", "sm_100a,sm_90a,sm_120a", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "1/2 scaled_sum sm_100a" in printed
    assert "sm_120a: no kernel is written for it yet" in printed
    assert "HALFBYTE_ARTIFACTS" in printed
    found = {entry.facts.target for entry in read_artifacts(out).entries.values()}
    assert found == {"sm_100a", "sm_90a"}


@pytest.mark.usefixtures("compiler")
def test_json_has_a_row_for_each_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--arch", "sm_90a", "--out", tmp_path / "kernels", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["out"] == str(tmp_path / "kernels")
    (row,) = report["kernels"]
    assert (row["kernel"], row["target"]) == ("scaled_sum", "sm_90a")
    assert row["bytes"] > 0
    assert (tmp_path / "kernels" / row["key"]).is_dir()


def test_a_list_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("--list", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["target"] for row in report["kernels"]] == ["sm_100a", "sm_90a"]
    assert report["without_kernels"] == ["sm_103a", "sm_120a"]
    assert run("--list") == 0
    assert "scaled_sum" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--arch", "sm_120"], 2, "sm_120a"),
        (["--arch", "sm_100a,sm_100f"], 2, "suffix 'f'"),
        (["--arch", ""], 2, "no target is named"),
        (["--arch", "sm_89"], 2, "choose from"),
        (["--kernel", "nothing"], 2, "choose from scaled_sum"),
        (["--arch", "sm_103a"], 1, "no kernel is written for sm_103a yet"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*arguments, "--out", tmp_path / "kernels") == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "kernels").exists()


@pytest.mark.usefixtures("compiler")
def test_a_folder_of_other_things_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("something")
    assert run("--arch", "sm_90a", "--out", tmp_path) == 2
    assert "thesis.txt" in capsys.readouterr().err


def test_a_kernel_that_does_not_compile_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HalfbyteError("CuTe DSL cannot compile this")

    monkeypatch.setattr(artifact, "build_entry", refuse)
    assert run("--arch", "sm_90a", "--out", tmp_path / "kernels") == 1
    assert "cannot compile this" in capsys.readouterr().err
