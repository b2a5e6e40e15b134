"""`halfbyte doctor` describes what is here and fails when a needed part is broken."""

import json
import types

import pytest

from halfbyte.cli import doctor
from halfbyte.cli.main import main


def test_json_lists_packages_cpu_extras_and_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {package["name"] for package in report["packages"]} == {
        *("numpy", "torch", "safetensors", "typer", "rich")
    }
    assert report["cpu"]["cores"] >= 1
    assert set(report["extras"]) == {"demo", "dev", "peers", "kernels", "models"}
    states = {feature["name"]: feature["state"] for feature in report["features"]}
    assert states["4-bit linear on the CPU"] in ("yes", "slower")
    assert states["Hopper kernels (H100, H200)"] == "not in this version"
    assert report["problems"] == []


def test_text_names_the_torch_build_and_the_pip_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "find_missing", lambda modules: list(modules))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "build)" in text
    assert 'pip install -e ".[peers]"' in text
    assert "missing: gguf, tokenizers, matplotlib" in text


def test_a_broken_needed_package_is_named_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_NEEDED", ("numpy", "halfbyte_no_such_package"))
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


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_target_has_the_suffix_of_its_architecture(
    capability: tuple[int, int], target: str
) -> None:
    assert doctor.make_target(capability) == target


def test_a_gpu_is_listed_with_its_target() -> None:
    properties = types.SimpleNamespace(
        name="NVIDIA B200", major=10, minor=0, total_memory=180 * 2**30
    )
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: properties,
    )
    torch = types.ModuleType("torch")
    torch.cuda = cuda  # type: ignore[attr-defined]
    assert doctor.find_gpus(torch) == [
        {"name": "NVIDIA B200", "capability": "10.0", "target": "sm_100a", "memory_gib": 180.0}
    ]
