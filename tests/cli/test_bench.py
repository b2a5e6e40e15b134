"""`halfbyte bench`: lists, exit codes and messages on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfbyte.cli.main import main

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def test_a_list_measures_nothing_and_names_every_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "linear", "--list", "--json", "--modes", "fp8"]) == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert {"kind": "linear", "shape": "4352x3840x3072x128", "case": "fp8_gemm"} in cases
    assert {"cublas", "scaled_mm", "fp8"} <= {case["case"] for case in cases}
    assert main(["bench", "--list", "--arch", "sm_100a", "--shapes", "1x64x64"]) == 0
    printed = capsys.readouterr().out
    assert "exact_gemm" in printed
    assert "fp8_gemm" not in printed
    assert list(tmp_path.iterdir()) == []


@no_gpu
@pytest.mark.parametrize("arguments", [["linear"], ["linear", "--ncu", "cublas"]])
def test_without_a_gpu_it_says_so_and_exits_1(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    message = capsys.readouterr().err
    assert "measured on a GPU" in message
    assert "--list" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x2"], "wanted MxKxN"),
        (["--list", "--shapes", f"1x{'9' * 5000}x64"], "wanted MxKxN"),
        (["--list", "--shapes", "\u0661x64x64"], "wanted MxKxN"),
        (["--list", "--dtype", "float16,bfloat16"], "name it alone"),
        (["--seed", str(2**64)], "--seed"),
        (["--out", "/dev/null/results"], "is no directory"),
        (["tune", "--out", "/dev/null/results"], "is no directory"),
        (["copy", "--build", "kernels"], "nothing to build"),
        (["--peers", "cutlas"], "cublas"),
        (["--modes", "w4a4"], "exact"),
        (["gemm"], "linear"),
        (["--list", "--arch", "sm_90"], "sm_90a"),
    ],
)
def test_misuse_exits_2_and_names_the_right_word(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_package_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "halfbyte.bench", "copy", "--list", "--shapes", "1x64x64"]
    finished = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert "1x64x64x0" in finished.stdout
