"""Converting files: what comes out, what is refused, and that nothing half-done ever shows."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoints.convert import ConvertRequest, ConvertResult, convert_checkpoint
from halfbyte.checkpoints.modelopt import ModelOpt
from halfbyte.checkpoints.split_files import SPLIT_FILES
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file
from tests.checkpoints import test_modelopt, test_nunchaku
from tests.checkpoints.family_files import FamilyFile
from tests.random_linears import LinearShape, make_linear
from tests.svdquant.checkpoint_files import read_tree

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("nvfp4", "nvfp4_static")


def run(source: Path, target: Path, to: str = "halfbyte", **changes: object) -> ConvertResult:
    request = ConvertRequest(source, target, to, verify=True)
    return convert_checkpoint(replace(request, **changes))  # type: ignore[arg-type]


def make_modelopt(folder: Path, layers: int = 2) -> Path:
    file = test_modelopt.make_file()
    for index in range(layers):
        parts = test_modelopt.make_parts(seed=index)
        file.tensors.update({f"b.{index}.up.{part}": value for part, value in parts.items()})
    return file.write(folder)


def make_shards(folder: Path) -> Path:
    """A ModelOpt checkpoint of two shards whose layers lie across both, with files beside it."""
    whole = FamilyFile(test_modelopt.make_file().tensors)
    names = sorted(whole.tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    folder.mkdir()
    weight_map = {}
    for shard, held in shards.items():
        one = FamilyFile({name: whole.tensors[name] for name in held}, {"format": "pt"})
        one.write(folder)
        os.rename(folder / "model.safetensors", folder / shard)
        weight_map |= dict.fromkeys(held, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "hf_quant_config.json").write_bytes(test_modelopt.CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.bin").write_bytes(b"weights")
    return folder


def test_there_and_back_gives_every_byte_of_the_file(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in")
    found = run(source, tmp_path / "own").report
    assert found is not None
    assert found["from"] == "modelopt"
    assert found["verified"]["identical"] == found["totals"]["layers"] == 4
    assert found["verified"]["copied_tensors"] == found["passthrough"]["tensors"] == 1
    run(tmp_path / "own", tmp_path / "back", "modelopt")
    assert (
        read_tree(tmp_path / "back")["model.safetensors"]
        == (read_tree(source)["model.safetensors"])
    )
    assert json.loads((tmp_path / "own.report.json").read_text()) == found


def test_metadata_comes_back_too(tmp_path: Path) -> None:
    config = {"method": "svdquant", "weight": {"dtype": "int4"}, "rank": 99}
    metadata = {"quantization_config": json.dumps(config), "model_class": "X", "format": "pt"}
    tensors = test_nunchaku.load_golden("int4", "blocks.0.fc1")
    source = FamilyFile(tensors, metadata).write(tmp_path / "in") / "model.safetensors"
    run(source, tmp_path / "own.safetensors")
    run(tmp_path / "own.safetensors", tmp_path / "back.safetensors", "nunchaku")
    assert (tmp_path / "back.safetensors").read_bytes() == source.read_bytes()


def test_a_directory_keeps_shards_and_files(tmp_path: Path) -> None:
    source = make_shards(tmp_path / "in")
    found = run(source, tmp_path / "own").report
    assert found is not None
    assert sorted(os.listdir(tmp_path / "own")) == [
        "hf_quant_config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert found["not_copied"] == ["model.bin"]
    contents = read_halfbyte_file(tmp_path / "own")
    assert set(contents.linears) == {"a.up", "a.down"}
    assert contents.metadata["format"] == "pt"
    run(tmp_path / "own", tmp_path / "back", "modelopt")
    wanted = test_modelopt.make_file().tensors
    got: dict[str, torch.Tensor] = {}
    for shard in ("model-1.safetensors", "model-2.safetensors"):
        got |= load_file(tmp_path / "back" / shard)
    assert got.keys() == wanted.keys()
    assert all(got[name].view(-1).equal(wanted[name].view(-1)) for name in wanted)


def test_how_the_source_was_quantized_does_not_go_along_to_another_family(tmp_path: Path) -> None:
    parts = test_modelopt.make_parts(is_svd=False)
    config = {"model_type": "toy", "quantization_config": {"quant_algo": "NVFP4"}}
    files = {"config.json": json.dumps(config).encode(), "hf_quant_config.json": b"{}"}
    tensors = {f"a.up.{part}": value for part, value in parts.items()}
    source = FamilyFile(tensors, files=files).write(tmp_path / "in")
    run(source, tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text()) == config
    for name, to in (("ao", "torchao"), ("ct", "compressed-tensors")):
        for start in (source, tmp_path / "own"):
            run(start, tmp_path / name, to, force=True)
            written = read_tree(tmp_path / name)
            assert "hf_quant_config.json" not in written
            kept = json.loads(written["config.json"])
            assert kept["model_type"] == "toy"
            assert "quant_algo" not in kept.get("quantization_config", {})


def test_a_directory_can_become_one_file_where_the_family_needs_no_other(tmp_path: Path) -> None:
    source = make_shards(tmp_path / "in")
    run(source, tmp_path / "own.safetensors")
    assert len(read_halfbyte_file(tmp_path / "own.safetensors").linears) == 2
    with pytest.raises(UsageError, match=r"hf_quant_config\.json.*directory"):
        run(tmp_path / "own.safetensors", tmp_path / "m.safetensors", "modelopt")
    run(tmp_path / "own.safetensors", tmp_path / "m", "modelopt")
    assert sorted(os.listdir(tmp_path / "m")) == ["hf_quant_config.json", "model.safetensors"]


def test_layers_that_the_target_cannot_hold_are_named_before_any_work(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in", layers=6)
    with pytest.raises(CheckpointError, match=r"a\.down': smooth.*and 5 more layers"):
        run(source, tmp_path / "out", "compressed-tensors")
    assert os.listdir(tmp_path) == ["in"]


def test_a_reciprocal_that_overflows_is_named(tmp_path: Path) -> None:
    linear = make_linear(LinearShape(16, 32, 0, parts=False), PLAIN)
    smooth = torch.ones(32)
    smooth[3] = 1e-39
    write_halfbyte_file(tmp_path / "in.safetensors", {"a.up": replace(linear, smooth=smooth)})
    with pytest.raises(CheckpointError, match=r"a\.up: pre_quant_scale.*infinite"):
        run(tmp_path / "in.safetensors", tmp_path / "out", "modelopt")
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_a_wrong_writer_is_caught_by_the_proof_and_puts_nothing_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = make_linear(LinearShape(16, 32, 4, parts=False), PLAIN)
    write_halfbyte_file(tmp_path / "in.safetensors", {"a.up": linear})
    right = ModelOpt.encode
    swaps = {
        "weight": lambda codes: (codes >> 4) | (codes << 4),
        "weight_scale_2": lambda scale: scale * (1 + 2.0**-20),
        "svdquant_lora_a": lambda factor: factor * 1.0001,
        "input_scale": lambda scale: scale * 2,
    }
    for part, swap in swaps.items():

        def encode(self, linear, facts, part=part, swap=swap):  # type: ignore[no-untyped-def]
            parts = right(self, linear, facts)
            return {**parts, part: swap(parts[part])}

        monkeypatch.setattr(ModelOpt, "encode", encode)
        with pytest.raises(CheckpointError, match=r"a\.up.*deviates"):
            run(tmp_path / "in.safetensors", tmp_path / "out", "modelopt")
        assert os.listdir(tmp_path) == ["in.safetensors"]


def test_an_output_that_stands_there_needs_force(tmp_path: Path) -> None:
    source, target = make_modelopt(tmp_path / "in"), tmp_path / "own.safetensors"
    target.write_bytes(b"precious")
    with pytest.raises(UsageError, match="--force"):
        run(source, target)
    assert target.read_bytes() == b"precious"
    assert run(source, target, force=True).status == "written"
    assert len(read_halfbyte_file(target).linears) == 4


def test_a_name_that_says_another_container_is_refused(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in")
    with pytest.raises(UsageError, match=r"another name"):
        run(source, tmp_path / "own.gguf")
    with pytest.raises(UsageError, match=r"ends in \.gguf"):
        run(source, tmp_path / "own.safetensors", "gguf")


def test_two_files_of_older_releases_become_one_directory(tmp_path: Path) -> None:
    tensors = test_nunchaku.load_golden("int4", "transformer_blocks.0.mlp.fc1")
    whole = FamilyFile(tensors, files={"config.json": b'{"_class_name": "X"}'})
    source = whole.write(tmp_path / "in")
    (source / "model.safetensors").rename(source / SPLIT_FILES[0])
    rest = FamilyFile({"proj.weight": torch.ones(3)}).write(tmp_path / "rest")
    (rest / "model.safetensors").rename(source / SPLIT_FILES[1])
    (source / "tokenizer.json").write_text("{}")
    run(source, tmp_path / "own")
    assert sorted(os.listdir(tmp_path / "own")) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert set(read_halfbyte_file(tmp_path / "own").passthrough) == {"proj.weight"}


def test_input_and_output_are_not_the_same(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in")
    for target in (source, source / "out.safetensors", tmp_path):
        with pytest.raises(UsageError):
            run(source, target, force=True)
    with pytest.raises(UsageError, match="is unknown"):
        run(source, tmp_path / "out", "modelopt-2")


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")]
)
def test_a_disk_that_takes_nothing_is_named(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_modelopt(tmp_path / "in")

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(CheckpointError, match=words):
        run(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_changes_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_modelopt(tmp_path / "in")
    right = ModelOpt.decode

    def decode(self, parts, facts):  # type: ignore[no-untyped-def]
        os.utime(source / "model.safetensors")
        return right(self, parts, facts)

    monkeypatch.setattr(ModelOpt, "decode", decode)
    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        run(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("mode", "stride"),
    [
        ("file", 17),
        ("force", 29),
        pytest.param("file", 1, marks=pytest.mark.long),
        pytest.param("directory", 1, marks=pytest.mark.long),
        pytest.param("force", 1, marks=pytest.mark.long),
    ],
)
def test_kill_at_any_disk_change_and_rerun_gives_the_same_bytes(
    mode: str, stride: int, tmp_path: Path
) -> None:
    source = make_modelopt(tmp_path / "in") if mode == "file" else make_shards(tmp_path / "in")
    (tmp_path / "work").mkdir()
    target = tmp_path / "work" / ("out.safetensors" if mode == "file" else "out")
    command = [sys.executable, "-m", "tests.checkpoints.kill_convert", str(source), str(target)]
    command += [str(stride), *(["--force"] if mode == "force" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["kills"] * stride > 30


@pytest.mark.long
def test_sigkill_from_outside_and_rerun_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linears = {
        f"layer.{index}": make_linear(LinearShape(4096, 4096, 32, parts=False), PLAIN)
        for index in range(24)
    }
    source, target = tmp_path / "in.safetensors", tmp_path / "out"
    write_halfbyte_file(source, linears)
    journal = tmp_path / ".out.halfbyte-progress"
    command = [sys.executable, "-m", "halfbyte.cli.main", "convert", str(source), str(target)]
    command += ["--to", "modelopt", "--json"]
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 1:
            break
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not target.exists()
    second = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert json.loads(second.stdout)["resumed_units"] >= 1
    run(source, tmp_path / "whole", "modelopt", verify=False)
    assert read_tree(target) == read_tree(tmp_path / "whole")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
