"""A conversion that is repeated: nothing to do where its output stands, never where it does not."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.errors import CheckpointError, UsageError
from tests.checkpoints.test_convert import make_modelopt, make_shards
from tests.svdquant.checkpoint_files import read_tree


def convert(source: Path, target: Path, **changes: object) -> str:
    """Return the status of a conversion to our own format."""
    request = ConvertRequest(source, target, "halfbyte")
    return convert_checkpoint(replace(request, **changes)).status  # type: ignore[arg-type]


def read_stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["own", "own.safetensors"])
def test_a_finished_conversion_is_not_made_again(tmp_path: Path, name: str) -> None:
    source = make_modelopt(tmp_path / "in")
    assert convert(source, tmp_path / name) == "written"
    before = read_stamps(tmp_path)
    assert convert(source, tmp_path / name) == "already_done"
    assert read_stamps(tmp_path) == before
    assert convert(source, tmp_path / name, force=True) == "written"
    assert convert(source, tmp_path / name) == "already_done"


def test_a_sharded_directory_with_files_beside_it_too(tmp_path: Path) -> None:
    source = make_shards(tmp_path / "in")
    assert convert(source, tmp_path / "own") == "written"
    assert convert(source, tmp_path / "own") == "already_done"


def test_a_proof_that_is_asked_for_is_given(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in")
    assert convert(source, tmp_path / "own") == "written"
    again = convert_checkpoint(ConvertRequest(source, tmp_path / "own", "halfbyte", verify=True))
    assert again.status == "already_done"
    assert again.verified is not None
    assert again.verified["identical"] == 4
    assert again.verified["copied_tensors"] == 1


def flip_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


SHARD = "model-1.safetensors"
CHANGES: dict[str, Callable[[Path], object]] = {
    "a value": lambda at: flip_byte(at / "own" / SHARD, -1),
    "a name in a header": lambda at: flip_byte(at / "own" / SHARD, 20),
    "a byte more": lambda at: append(at / "own" / SHARD),
    "three bytes less": lambda at: truncate(at / "own" / SHARD),
    "a shard gone": lambda at: (at / "own" / SHARD).unlink(),
    "a file more": lambda at: (at / "own" / "more.safetensors").write_bytes(b""),
    "a file beside the tensors": lambda at: (at / "own" / "tokenizer.json").write_text("[]"),
    "its index": lambda at: append(at / "own" / "model.safetensors.index.json"),
    "the source": lambda at: touch(at / "in" / SHARD),
    "a file beside the source": lambda at: (at / "in" / "tokenizer.json").write_text("[]"),
    "no report": lambda at: (at / "own.report.json").unlink(),
    "half a report": lambda at: truncate(at / "own.report.json"),
    "a report of nothing": lambda at: (at / "own.report.json").write_text("[1]"),
    "a report without checksums": lambda at: (at / "own.report.json").write_text(
        '{"report": "halfbyte convert", "finished": {"checksums": 3}}'
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_its_output_is_refused_and_stays(tmp_path: Path, change: str) -> None:
    source = make_shards(tmp_path / "in")
    assert convert(source, tmp_path / "own") == "written"
    CHANGES[change](tmp_path)
    before = read_tree(tmp_path / "own")
    with pytest.raises((UsageError, CheckpointError), match="own: exists, and nothing tells"):
        convert(source, tmp_path / "own")
    assert read_tree(tmp_path / "own") == before


def test_another_request_is_not_the_finished_one(tmp_path: Path) -> None:
    source = make_modelopt(tmp_path / "in")
    other = make_modelopt(tmp_path / "other", layers=3)
    assert convert(source, tmp_path / "out") == "written"
    with pytest.raises(UsageError, match="nothing tells"):
        convert(other, tmp_path / "out")
    with pytest.raises(UsageError, match="nothing tells"):
        convert(source, tmp_path / "out", to="modelopt")


def test_another_version_converts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_modelopt(tmp_path / "in")
    assert convert(source, tmp_path / "out") == "written"
    monkeypatch.setattr("halfbyte.checkpoints.finished_conversion.__version__", "0.0")
    with pytest.raises(UsageError, match="nothing tells"):
        convert(source, tmp_path / "out")
