"""Checkpoints are opened by what they are."""

import pickle
from pathlib import Path

import pytest
import torch

from halfbyte.checkpoints.open_source import OpenSources, open_source
from halfbyte.checkpoints.split_files import SPLIT_FILES, SplitFilesSource
from halfbyte.checkpoints.tensor_source import SafetensorsSource
from halfbyte.errors import CheckpointError
from tests.checkpoints.family_files import FamilyFile

FILE = FamilyFile({"a": torch.arange(6)})


def test_a_name_decides_nothing(tmp_path: Path) -> None:
    made = FILE.write(tmp_path / "in") / "model.safetensors"
    for name in ("model.gguf", "model.pt", "model"):
        made.rename(tmp_path / name)
        made = tmp_path / name
        with OpenSources() as sources:
            source = sources.open(made)
            assert isinstance(source, SafetensorsSource)
            assert source.read("a").equal(torch.arange(6))


def test_folders(tmp_path: Path) -> None:
    FILE.write(tmp_path / "one")
    with OpenSources() as sources:
        assert list(sources.open(tmp_path / "one").specs) == ["a"]
    FILE.write(tmp_path / "split")
    (tmp_path / "split" / "model.safetensors").rename(tmp_path / "split" / SPLIT_FILES[0])
    other = FamilyFile({"b": torch.ones(2)}).write(tmp_path / "b") / "model.safetensors"
    other.rename(tmp_path / "split" / SPLIT_FILES[1])
    with OpenSources() as sources:
        source = sources.open(tmp_path / "split")
        assert isinstance(source, SplitFilesSource)
        assert set(source.specs) == {"a", "b"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="wanted one"):
        open_source(tmp_path / "empty")


def test_a_pickle_is_refused_unread(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pickle"):
        open_source(tmp_path / "model.safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"\x80", b"GGU", bytes(100), b"{}" * 50])
def test_other_bytes_are_named_as_no_checkpoint(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match="x: "):
        open_source(tmp_path / "x")
    with pytest.raises(CheckpointError, match="no such file"):
        open_source(tmp_path / "absent")
