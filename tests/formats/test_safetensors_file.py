"""Streaming reads, sharded directories and the atomic writer."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import make_layout, make_spec
from halfbyte.formats.safetensors_reader import SafetensorsFile
from halfbyte.formats.safetensors_writer import SafetensorsWriter, write_safetensors


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(13, 7, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_row_ranges_are_the_rows_of_the_tensor(matrix: torch.Tensor, tmp_path: Path) -> None:
    save_file({"pad": torch.zeros(3), "w": matrix}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert torch.equal(file.read_rows("w", 4, 9), matrix[4:9])
        assert file.read_rows("w", 5, 5).shape == (0, 7)
        assert torch.equal(torch.cat(list(file.iter_bytes("w", 10))), file.read_bytes("w"))
        for start, stop in ((-1, 3), (3, 14), (5, 4)):
            with pytest.raises(CheckpointError, match="'w'"):
                file.read_rows("w", start, stop)


def test_read_tensor_is_memory_of_its_own(matrix: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": matrix}, path)
    before = path.read_bytes()
    with SafetensorsFile(path) as file:
        file.read_tensor("w").fill_(7)
        assert torch.equal(file.read_tensor("w"), matrix)
    assert path.read_bytes() == before


def test_file_that_shrinks_while_open_is_an_error(matrix: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": matrix}, path)
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CheckpointError, match="1 bytes early"):
            file.read_tensor("w")


def test_written_file_is_read_by_the_library(matrix: torch.Tensor, tmp_path: Path) -> None:
    tensors = {
        "strided": matrix.t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "scale": torch.ones(3).to(torch.float8_e8m0fnu),
    }
    path = tmp_path / "w.safetensors"
    write_safetensors(path, tensors, {"b": "2", "a": "1"})
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].float(), tensor.float())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"a": "1", "b": "2"}
    again = tmp_path / "again.safetensors"
    write_safetensors(again, dict(reversed(tensors.items())), {"a": "1", "b": "2"})
    assert again.read_bytes() == path.read_bytes()


def test_finished_file_has_usual_permissions(matrix: torch.Tensor, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "w.safetensors", {"w": matrix})
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "w.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_failed_write_leaves_the_old_file_and_nothing_else(
    matrix: torch.Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")
    layout, prefix = make_layout([make_spec("w", matrix.dtype, matrix.shape)])

    def write_and_fail() -> None:
        with SafetensorsWriter(path, layout, prefix) as writer:
            writer.write("w", matrix[:5])
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        write_and_fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_incomplete_tensor_is_not_put_in_place(matrix: torch.Tensor, tmp_path: Path) -> None:
    layout, prefix = make_layout([make_spec("w", matrix.dtype, matrix.shape)])
    with (
        pytest.raises(CheckpointError, match="'w' lacks 112"),
        SafetensorsWriter(tmp_path / "w.safetensors", layout, prefix) as writer,
    ):
        writer.write("w", matrix[:5])
    assert os.listdir(tmp_path) == []


def test_bytes_beyond_a_tensor_are_refused(matrix: torch.Tensor, tmp_path: Path) -> None:
    layout, prefix = make_layout([make_spec("w", matrix.dtype, matrix.shape)])
    with (
        pytest.raises(CheckpointError, match="do not fit"),
        SafetensorsWriter(tmp_path / "w.safetensors", layout, prefix) as writer,
    ):
        writer.write("w", matrix, start=2)
    assert os.listdir(tmp_path) == []


def test_unwritable_targets_are_named(matrix: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        write_safetensors(tmp_path / "no" / "w.safetensors", {"w": matrix})
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file"):
        write_safetensors(tmp_path / "file" / "w.safetensors", {"w": matrix})
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder"):
        write_safetensors(tmp_path / "folder", {"w": matrix})
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def write_shards(folder: Path, weight_map: object | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "m-1.safetensors")
    save_file({"c": torch.full((4,), 2.0)}, folder / "m-2.safetensors")
    if weight_map is None:
        weight_map = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    index = {"metadata": {"total_size": 36}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def refuse_directory(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    for word in words:
        assert word in str(caught.value)


def test_sharded_directory_reads_as_one(tmp_path: Path) -> None:
    with SafetensorsCheckpoint(write_shards(tmp_path)) as checkpoint:
        assert checkpoint.shard_of == {
            "a": "m-1.safetensors",
            "b": "m-1.safetensors",
            "c": "m-2.safetensors",
        }
        assert torch.equal(checkpoint.read_tensor("c"), torch.full((4,), 2.0))
        assert checkpoint.unindexed == ()
        with pytest.raises(CheckpointError, match="'d'"):
            checkpoint.read_tensor("d")


def test_directory_with_one_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.index_name is None
        assert list(checkpoint.shard_of) == ["a"]


def test_directory_without_an_index_for_several_files_is_ambiguous(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    refuse_directory(folder, "2 safetensors files")
    (tmp_path / "bare").mkdir()
    refuse_directory(tmp_path / "bare", "0 safetensors files")


@pytest.mark.parametrize(
    "shard",
    [
        "../m-1.safetensors",
        "/etc/passwd",
        "/m-1.safetensors",
        "sub/m-1.safetensors",
        "..\\m-1.safetensors",
        "..",
        "",
        ".hidden.safetensors",
        "config.json",
        "m-1.safetensors\0",
        7,
        None,
        ["m-1.safetensors"],
    ],
)
def test_shard_path_that_leads_elsewhere_is_refused(shard: object, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "in", {"a": shard})
    refuse_directory(folder, "'a'", "plain name")


@pytest.mark.parametrize("weight_map", [[], "x", {}, 3])
def test_weight_map_that_is_no_map_is_refused(weight_map: object, tmp_path: Path) -> None:
    refuse_directory(write_shards(tmp_path, weight_map), "weight_map")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path) / "m-2.safetensors").unlink()
    refuse_directory(tmp_path, "m-2.safetensors", "no such file")


def test_tensor_missing_in_its_shard_is_named(tmp_path: Path) -> None:
    refuse_directory(write_shards(tmp_path, {"lost": "m-1.safetensors"}), "'lost'", "missing")


def test_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    save_file({"c": torch.ones(1), "a": torch.ones(2)}, folder / "m-2.safetensors")
    refuse_directory(folder, "'a'", "two shards")


def test_unindexed_tensor_is_reported(tmp_path: Path) -> None:
    weight_map = {"a": "m-1.safetensors", "c": "m-2.safetensors"}
    with SafetensorsCheckpoint(write_shards(tmp_path, weight_map)) as checkpoint:
        assert checkpoint.unindexed == ("b",)


def test_corrupt_index_is_refused(tmp_path: Path) -> None:
    index = write_shards(tmp_path) / "model.safetensors.index.json"
    for text, word in (("{", "JSON"), ("[]", "weight_map"), ('{"a":1,"a":2}', "twice")):
        index.write_text(text)
        refuse_directory(tmp_path, word, "index.json")
