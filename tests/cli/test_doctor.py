"""`halfbyte doctor` describes what is here and fails when a needed part is broken."""

import json
import tomllib
from pathlib import Path

import pytest

from halfbyte.cli.main import main
from halfbyte.runtime import diagnosis

ROOT = Path(__file__).resolve().parents[2]


def test_json_lists_packages_cpu_extras_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {package["name"] for package in report["packages"]} == {
        *("numpy", "torch", "safetensors", "typer", "rich")
    }
    assert report["cpu"]["cores"] >= 1
    assert set(report["extras"]) == {"demo", "dev", "peers", "kernels", "cluster", "models"}
    states = {feature["name"]: feature["state"] for feature in report["features"]}
    assert states["4-bit linear on the CPU"] in ("yes", "slower")
    assert states["RTX Blackwell kernels"] == "not in this version"
    assert report["problems"] == []


def test_text_names_the_torch_build_and_the_pip_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(diagnosis, "find_missing", lambda modules: list(modules))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "build)" in text
    assert 'pip install -e ".[peers]"' in text
    assert "missing: gguf, tokenizers, matplotlib" in text


def test_a_broken_needed_package_is_named_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "_NEEDED", ("numpy", "halfbyte_no_such_package"))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "halfbyte_no_such_package does not work: ModuleNotFoundError" in report["problems"][0]
    assert {feature["state"] for feature in report["features"]} <= {"no", "not in this version"}


def test_a_disabled_native_library_is_slower_and_no_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_NATIVE", "0")
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["native"]["loaded"] is False
    assert report["features"][0]["state"] == "slower"


def test_packages_to_install_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    assert set(diagnosis._EXTRAS) == set(extras)
    setup = (ROOT / "tools" / "prepare_venv.py").read_text(encoding="utf-8")
    for name, version in diagnosis._MODEL_PACKAGES.items():
        assert f'"{name}=={version}"' in setup
