"""`halfbyte convert` and `halfbyte diff`: what they print and their exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.cli.main import main
from halfbyte.formats.halfbyte_file import write_halfbyte_file
from halfbyte.formats.quantized_linear import QuantizedLinear
from tests.random_linears import LinearShape, make_linear

Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def make_layers() -> dict[str, QuantizedLinear]:
    pair = ("nvfp4", "nvfp4_static")
    return {
        "model.q": make_linear(LinearShape(32, 64, 8, parts=False), pair),
        "model.[bold]\x1b[2J": make_linear(LinearShape(16, 32, 0, parts=False), pair),
    }


def write(path: Path, layers: dict[str, QuantizedLinear], norm: float = 1.0) -> Path:
    write_halfbyte_file(path, layers, {"norm": torch.full((4,), norm)})
    return path


def test_a_conversion_is_proved_and_described(tmp_path: Path, capsys: Capture) -> None:
    source = write(tmp_path / "in.safetensors", make_layers())
    assert run("convert", source, tmp_path / "out", "--to", "modelopt", "--verify") == 0
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "2 layers bit for bit" in text
    assert "1 copied tensor byte for byte" in text
    assert run("convert", tmp_path / "out", tmp_path / "b", "--to", "halfbyte", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "written"
    assert found["report"]["from"] == "modelopt"
    assert found["report"]["verified"] is None
    assert json.loads(Path(found["report_path"]).read_text()) == found["report"]
    assert run("diff", source, tmp_path / "b") == 0
    assert run("convert", source, tmp_path / "out", "--to", "modelopt", "--verify") == 0
    text = " ".join(capsys.readouterr().err.split())
    assert "already; nothing to do" in text
    assert "verified: 2 layers bit for bit" in text


def test_misuse_exits_2_and_findings_exit_1(tmp_path: Path, capsys: Capture) -> None:
    source = write(tmp_path / "in.safetensors", make_layers())
    assert run("convert", source, source, "--to", "halfbyte") == 2
    assert run("convert", source, tmp_path / "out") == 2
    assert run("convert", source, tmp_path / "out", "--to", "no-such-family") == 2
    assert run("convert", source, tmp_path / "out", "--to", "halfbyte", "--from", "modelopt") == 1
    assert "has no layer of family modelopt" in " ".join(capsys.readouterr().err.split())
    assert run("convert", source, tmp_path / "out", "--to", "compressed-tensors") == 1
    assert "model.q" in capsys.readouterr().err
    assert run("convert", tmp_path / "absent", tmp_path / "out", "--to", "halfbyte") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_diff_names_what_differs_and_exits_1(tmp_path: Path, capsys: Capture) -> None:
    layers = make_layers()
    left = write(tmp_path / "a.safetensors", layers)
    changed = dict(layers)
    changed["model.q"] = replace(layers["model.q"], lora_up=layers["model.q"].lora_up * 1.5)
    changed["model.k"] = changed.pop("model.[bold]\x1b[2J")
    right = write(tmp_path / "b.safetensors", changed, norm=2.0)
    assert run("diff", left, right, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    (layer,) = found["layers"]
    assert (layer["name"], layer["state"]) == ("model.q", "differs")
    assert layer["differences"]["low_rank"]["relative"] == pytest.approx(0.5)
    assert layer["differences"]["weight"]["largest"] == 0
    assert found["only_left"] == ["model.[bold]\x1b[2J"]
    assert found["only_right"] == ["model.k"]
    assert found["tensors_differ"] == ["norm"]
    assert run("diff", left, right) == 1
    text = capsys.readouterr().out
    assert "they differ" in text
    assert "\x1b[2J" not in text


def test_diff_of_other_sizes_formats_and_roundings(tmp_path: Path, capsys: Capture) -> None:
    layer = make_layers()["model.q"]
    left = write(tmp_path / "a.safetensors", {"q": layer})
    small = make_linear(LinearShape(16, 64, 8, parts=False), ("nvfp4", "nvfp4_static"))
    other = make_linear(LinearShape(32, 64, 8, parts=False), ("nvfp4", None))
    scale = layer.activation_global_scale
    assert scale is not None
    rounded = replace(layer, activation_global_scale=torch.nextafter(scale, scale * 2))
    cases = {"small": small, "other": other, "rounded": rounded}
    for name, changed in cases.items():
        right = write(tmp_path / f"{name}.safetensors", {"q": changed})
        assert run("diff", left, right, "--json") == (0 if name == "rounded" else 1)
        (found,) = json.loads(capsys.readouterr().out)["layers"]
        assert found["state"] == ("rounded" if name == "rounded" else "differs")
        assert run("diff", left, right, "--exact") == 1
        assert run("diff", left, right) == (0 if name == "rounded" else 1)
        capsys.readouterr()


def test_diff_of_what_cannot_be_read_exits_1(tmp_path: Path, capsys: Capture) -> None:
    left = write(tmp_path / "a.safetensors", make_layers())
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    assert run("diff", left, tmp_path / "b.safetensors") == 1
    assert "b.safetensors" in capsys.readouterr().err
    assert run("diff", left, left, "--from-a", "no-such-family") == 2
