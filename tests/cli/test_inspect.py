"""`halfbyte inspect`: what it prints and its exit codes."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfbyte.cli.main import main
from halfbyte.formats.halfbyte_file import write_halfbyte_file
from tests.random_linears import LinearShape, make_linear
from tests.svdquant.checkpoint_files import write_directory, write_file


def run(*arguments: object) -> int:
    return main(["inspect", *map(str, arguments)])


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    linears = {
        "model.q": make_linear(LinearShape(64, 96, rank=16), ("nvfp4", "nvfp4_dynamic")),
        "model.[bold]\x1b[2J": make_linear(LinearShape(32, 64, rank=0), ("int4", None)),
    }
    path = tmp_path / "own.safetensors"
    write_halfbyte_file(path, linears, {"norm": torch.ones(10)})
    return path


def test_own_file_is_described_in_full(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own_file, "--json", "--layers") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "halfbyte"
    assert found["format_version"] == "1"
    assert found["formats"] == {"int4": 1, "nvfp4": 1}
    assert found["ranks"] == {"0": 1, "16": 1}
    assert found["bytes_by_kind"]["codes"] == 64 * 96 // 2 + 32 * 64 // 2
    assert found["bytes_by_kind"]["passthrough"] == 40
    assert found["hardware"][0] == {
        "machine": "CPU",
        "state": "yes",
        "needs": "any x86-64 or Arm; compiled loops where built",
    }
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["model.q"]["activation"] == "nvfp4_dynamic"
    stored = sum(layer["num_bytes"] for layer in found["layers"])
    assert found["bits_per_weight"] == stored * 8 / (64 * 96 + 32 * 64)


def test_table_shows_layers_and_hardware(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(own_file, "--layers") == 0
    text = capsys.readouterr().out
    for word in ("halfbyte, version 1", "64 x 96", "no kernel in this", "[bold]"):
        assert word in text
    assert "\x1b[2J" not in text


def test_damaged_value_exits_1_unless_quick(
    own_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(own_file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])["model.q.weight_block_scale"]
    data[8 + length + entry["data_offsets"][0]] = 0x7F
    own_file.write_bytes(data)
    assert run(own_file) == 1
    assert "model.q.weight_block_scale" in " ".join(capsys.readouterr().err.split())
    assert run(own_file, "--quick") == 0


def test_plain_file_and_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (write_file(tmp_path / "a.safetensors"), write_directory(tmp_path / "a")):
        assert run(place, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["family"] == "plain safetensors"
        assert found["layers"] == 0
        assert {row["state"] for row in found["hardware"]} == {"quantize it first"}


E4M3 = torch.float8_e4m3fn
FOREIGN = {
    "nunchaku": {
        "qweight": torch.zeros(128, 64, dtype=torch.int8),
        "wscales": torch.ones(8, 128).to(E4M3),
        "wtscale": torch.ones(1),
        "proj_down": torch.zeros(128, 32).bfloat16(),
        "proj_up": torch.zeros(128, 32).bfloat16(),
        "smooth_factor": torch.ones(128).bfloat16(),
    },
    "nunchaku (older key names)": {
        "qweight": torch.zeros(128, 64, dtype=torch.int8),
        "wscales": torch.ones(2, 128).bfloat16(),
        "lora_down": torch.zeros(128, 32).bfloat16(),
        "lora_up": torch.zeros(128, 32).bfloat16(),
    },
    "ModelOpt": {
        "weight": torch.zeros(128, 64, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 8).to(E4M3),
        "weight_scale_2": torch.tensor(1.0),
    },
    "ModelOpt SVD": {
        "weight": torch.zeros(128, 64, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 8).to(E4M3),
        "weight_scale_2": torch.tensor(1.0),
        "svdquant_lora_a": torch.zeros(32, 128),
        "svdquant_lora_b": torch.zeros(128, 32),
    },
    "compressed-tensors": {
        "weight_packed": torch.zeros(128, 64, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 8).to(E4M3),
        "weight_global_scale": torch.ones(1),
    },
    "ComfyUI": {
        "weight": torch.zeros(128, 64, dtype=torch.uint8),
        "weight_scale": torch.ones(128, 8).to(E4M3),
        "weight_scale_2": torch.tensor(1.0),
        "comfy_quant": torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8),
    },
}


@pytest.mark.parametrize("family", FOREIGN)
def test_other_families_are_recognised(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {f"block.0.fc.{part}": value for part, value in FOREIGN[family].items()}
    save_file({**tensors, "norm.weight": torch.ones(8)}, tmp_path / "f.safetensors")
    assert run(tmp_path / "f.safetensors", "--json", "--layers") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == family
    (layer,) = found["layers"]
    assert (layer["out_features"], layer["in_features"]) == (128, 128)
    has_branch = any("lora" in part or "proj" in part for part in FOREIGN[family])
    assert layer["rank"] == (32 if has_branch else 0)
    assert found["bytes_by_kind"]["codes"] == 128 * 64
    assert found["bytes_by_kind"]["passthrough"] == 32
    assert {row["state"] for row in found["hardware"]} == {"convert it first"}


def test_readings_and_targets_are_told(own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(own_file, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (reading,) = found["readings"]
    assert (reading["family"], reading["is_certain"], reading["layers"]) == ("halfbyte", True, 2)
    assert found["targets"]["halfbyte"] == "yes"
    assert found["targets"]["modelopt"].startswith("2 of 2 layers not: ")


def test_a_possible_reading_is_told_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {f"fc.{part}": value for part, value in FOREIGN["ModelOpt"].items()}
    save_file(tensors, tmp_path / "f.safetensors")
    assert run(tmp_path / "f.safetensors", "--json", "--layers") == 0
    found = json.loads(capsys.readouterr().out)
    certain = {reading["family"]: reading["is_certain"] for reading in found["readings"]}
    assert certain["modelopt"] is False
    if len(certain) == 1:
        assert found["targets"]["compressed-tensors"] == "yes"
    else:
        assert any("--from FAMILY, or --original" in note for note in found["notes"])


def test_a_left_over_tensor_is_told_with_its_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {f"fc.{part}": value for part, value in FOREIGN["compressed-tensors"].items()}
    save_file({**tensors, "fc.weight_zero_point": torch.zeros(2)}, tmp_path / "f.safetensors")
    assert run(tmp_path / "f.safetensors", "--json") == 0
    (reading,) = json.loads(capsys.readouterr().out)["readings"]
    assert "fc.weight_zero_point" in reading["problem"]


def test_what_nothing_reads_is_still_recognised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {"qweight": torch.zeros(8, 16, dtype=torch.int32), "scales": torch.ones(1, 16).half()}
    parts["qzeros"] = torch.zeros(1, 2, dtype=torch.int32)
    save_file({f"fc.{part}": value for part, value in parts.items()}, tmp_path / "f.safetensors")
    assert run(tmp_path / "f.safetensors", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "GPTQ or AWQ"
    assert found["readings"] == []
    assert {row["state"] for row in found["hardware"]} == {"no loader in this version"}
    assert any("no loader for it" in note for note in found["notes"])


def test_gguf_is_recognised_by_its_magic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 271, 40) + bytes(100))
    assert run(path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["family"], found["format_version"], found["num_tensors"]) == ("GGUF", "3", 271)
    path.write_bytes(b"GGUF\x03")
    assert run(path) == 1


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04" + bytes(40), bytes(64)])
def test_other_files_exit_1(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.bin"
    path.write_bytes(data)
    assert run(path) == 1
    assert "odd.bin" in capsys.readouterr().err


def test_misuse_exits_2() -> None:
    assert run() == 2
    assert run("a", "b") == 2
