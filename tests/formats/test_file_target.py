"""Paths that a run must not write to, and names that are no Unicode."""

import json
import os
from pathlib import Path

import pytest

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import QuantizeFileRequest, quantize_file
from tests.svdquant.checkpoint_files import make_tensors, write_directory, write_file

PRESET = PRESETS["nvfp4_plain"]


def test_a_pipe_or_device_is_never_replaced_even_by_force(tmp_path: Path) -> None:
    source, pipe = write_file(tmp_path / "in.safetensors"), tmp_path / "pipe"
    os.mkfifo(pipe)
    for target, report in ((pipe, None), (tmp_path / "out.safetensors", pipe)):
        request = QuantizeFileRequest(source, target, PRESET, report=report, force=True)
        with pytest.raises(UsageError, match="pipe or device"):
            quantize_file(request)
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["in.safetensors", "pipe"]


def test_a_report_never_replaces_a_file_of_input_or_output(tmp_path: Path) -> None:
    source, target = write_directory(tmp_path / "in"), tmp_path / "out"
    target.mkdir()
    shard = next(source.glob("*.safetensors"))
    before = shard.read_bytes()
    for report in (shard, source / "config.json", target / "report.json", source):
        request = QuantizeFileRequest(source, target, PRESET, report=report)
        with pytest.raises(UsageError, match="cannot hold the report"):
            quantize_file(request)
    assert shard.read_bytes() == before


def test_a_loop_of_links_is_named_wherever_it_stands(tmp_path: Path) -> None:
    source, loop = write_file(tmp_path / "in.safetensors"), tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match="loop of links"):
        quantize_file(QuantizeFileRequest(loop, tmp_path / "out", PRESET))
    with pytest.raises(UsageError, match="is a link"):
        quantize_file(QuantizeFileRequest(source, loop, PRESET))


def test_a_loop_of_links_beside_the_shards_is_left_out(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    (source / "loop.json").symlink_to("loop.json")
    result = quantize_file(QuantizeFileRequest(source, tmp_path / "out", PRESET))
    assert result.report is not None
    assert "loop.json" in result.report["not_copied"]


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_an_output_without_a_name_is_refused(name: str, tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    with pytest.raises(UsageError, match="names no file"):
        quantize_file(QuantizeFileRequest(source, Path(name), PRESET))


@pytest.mark.parametrize("length", [250, 240])
def test_a_name_that_is_too_long_is_refused_with_the_fix(length: int, tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / ("x" * length + ".safetensors" * (length == 250))
    with pytest.raises((UsageError, CheckpointError), match=r"too long.*(another|shorter)"):
        quantize_file(QuantizeFileRequest(source, target, PRESET))
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_paths_and_globs_that_are_no_unicode_work(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in\udcff.safetensors"), tmp_path / "out\udcff"
    request = QuantizeFileRequest(source, target, PRESET, LinearRules(exclude=("\udcff",)))
    assert quantize_file(request).status == "written"
    assert json.loads(request.report_path.read_bytes())["output"] == str(target)
    assert quantize_file(request).status == "already_done"


def test_weights_beyond_the_arithmetic_are_named_and_leave_nothing(tmp_path: Path) -> None:
    tensors = {name: tensor * 1e37 for name, tensor in make_tensors().items()}
    source, target = write_file(tmp_path / "in.safetensors", tensors), tmp_path / "out"
    preset = PRESETS["nvfp4_weight_only_r32"]
    with pytest.raises(CheckpointError, match=r"in\.safetensors: model\.layers\.0.*exclude"):
        quantize_file(QuantizeFileRequest(source, target, preset))
    assert os.listdir(tmp_path) == ["in.safetensors"]
