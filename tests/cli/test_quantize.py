"""`halfbyte quantize`: exit codes, messages, output; the work itself is tested in svdquant."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from halfbyte.cli.main import main
from halfbyte.svdquant import unit_quantizer
from tests.svdquant.checkpoint_files import make_tensors, write_directory, write_file


def run(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


def test_quantize_writes_output_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    assert run(source, target) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "8 as nvfp4" in shown.err
    assert "peak memory" in shown.err
    report = json.loads((tmp_path / "out.report.json").read_text())
    layer = report["layers"][0]
    assert set(layer) == {
        "name",
        "out_features",
        "in_features",
        "format",
        "rank",
        "group",
        "relative_error",
        "snr_db",
        "blocks",
        "saturated",
        "flushed",
        "zero",
        "bytes_before",
        "bytes_after",
    }
    assert report["totals"]["layers"] == 8
    assert run(source, target) == 0
    assert "nothing to do" in " ".join(capsys.readouterr().err.split())


def test_json_is_one_object_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_directory(tmp_path / "in")
    report = tmp_path / "r.json"
    options = ("--json", "--preset", "int4_weight_only_r32", "--rank", "8", "--report", report)
    assert run(source, tmp_path / "out", *options) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["status"] == "written"
    assert printed["peak_rss_bytes"] > 2**20
    assert printed["report"] == json.loads(report.read_text())
    assert {layer["rank"] for layer in printed["report"]["layers"]} == {8}
    assert {layer["format"] for layer in printed["report"]["layers"]} == {"int4"}


def test_include_and_exclude_reach_the_rules(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    options = ("--include", "*q_proj", "--include", "*k_proj", "--exclude", "*.0.*")
    assert run(source, target, *options) == 0
    report = json.loads((tmp_path / "out.report.json").read_text())
    names = [layer["name"] for layer in report["layers"]]
    assert names == ["model.layers.1.k_proj", "model.layers.1.q_proj"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("in.safetensors",),
        ("in.safetensors", "in.safetensors"),
        ("in.safetensors", "out.safetensors", "--preset", "nvfp5"),
        ("in.safetensors", "out.safetensors", "--rank", "-1"),
        ("in.safetensors", "out.safetensors", "--exclude", "*"),
        ("in.safetensors", "out.safetensors", "--colour"),
        ("in.safetensors", "absent/out.safetensors"),
        ("in.safetensors", "other.safetensors"),
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_misuse_exits_2_and_writes_nothing(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(Path("in.safetensors"))
    Path("other.safetensors").write_bytes(b"something else")
    assert run(*arguments) == 2
    assert sorted(os.listdir()) == ["in.safetensors", "other.safetensors"]


def make_hostile_files() -> dict[str, bytes]:
    def with_header(text: str, data: bytes = b"") -> bytes:
        return struct.pack("<Q", len(text)) + text.encode() + data

    entry = '{"dtype":"F32","shape":[64,64],"data_offsets":[0,16384]}'
    return {
        "empty": b"",
        "zeros": bytes(64),
        "huge-header": b"\xff" * 8,
        "cut-header": struct.pack("<Q", 1000) + b"{",
        "no-json": with_header("{nonsense"),
        "cut-data": with_header(f'{{"a.weight":{entry}}}', bytes(100)),
        "overlap": with_header(f'{{"a.weight":{entry},"b.weight":{entry}}}', bytes(16384)),
        "twice": with_header(f'{{"a.weight":{entry},"a.weight":{entry}}}', bytes(16384)),
        "nan": with_header(f'{{"a.weight":{entry}}}', b"\xff" * 16384),
        "gguf": b"GGUF" + bytes(64),
        "markup": with_header('{"[red]\\u001b[31m":{"dtype":"X","shape":[],"data_offsets":[0,1]}}'),
    }


@pytest.mark.parametrize("case", make_hostile_files())
def test_hostile_file_exits_1_with_a_name_and_leaves_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(make_hostile_files()[case])
    assert run(source, tmp_path / "out.safetensors") == 1
    message = capsys.readouterr().err
    assert "error:" in message
    assert "internal error" not in message
    assert "in.safetensors" in message
    assert "\x1b[31m" not in message
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_hostile_index_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_directory(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    index.write_text('{"weight_map":{"a":"../../etc/x.safetensors"}}')
    assert run(source, tmp_path / "out") == 1
    assert "refused" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["in"]


def test_interrupt_exits_130_and_says_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"

    def interrupt(*arguments: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unit_quantizer, "quantize_linear_group", interrupt)
        assert run(source, target) == 130
    assert "same command again" in capsys.readouterr().err
    assert not target.exists()
    assert run(source, target) == 0


def test_hostile_layer_name_does_not_reach_the_terminal_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"\x1b[2J[bold]x.weight": torch.randn(64, 64)}
    source = write_file(tmp_path / "in.safetensors", tensors)
    assert run(source, tmp_path / "out.safetensors") == 0
    assert "\x1b[2J" not in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "halfbyte quantize model.safetensors model-nvfp4.safetensors" in text


def test_source_is_never_written(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", make_tensors(layers=1))
    before = (source.read_bytes(), source.stat().st_mtime_ns)
    run(source, tmp_path / "out.safetensors")
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before
