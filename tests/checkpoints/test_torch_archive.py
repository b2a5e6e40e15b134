import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from halfbyte.checkpoints.torch_archive import TorchArchiveSource
from halfbyte.errors import CheckpointError


class Bomb:
    """Its pickle makes a file when it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def save(path: Path, value) -> Path:
    torch.save(value, path)
    return path


def rewrite(path: Path, change) -> Path:
    """Replace the pickle of an archive by `change` of it."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    out = path.with_suffix(".changed")
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return out


def test_tensors_of_every_kind(tmp_path):
    matrix = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    model = torch.nn.Linear(3, 2)
    value = {
        "f32": matrix,
        "view": matrix[1:3, 2:5],
        "turned": matrix.t(),
        "shared": matrix[2],
        "bf16": torch.randn(3).bfloat16(),
        "e4m3": torch.randn(3).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nested": model.state_dict(),
        "flag": True,
        "number": 0.5,
        "nothing": None,
    }
    path = save(tmp_path / "x.pt", value)
    with TorchArchiveSource(path) as source:
        tensors = {name: source.read(name) for name in source.specs}
        assert dict(source.metadata) == {"flag": "true", "number": "0.5", "nothing": "null"}
    wanted = {key: part for key, part in value.items() if isinstance(part, torch.Tensor)}
    wanted |= {"nested.weight": model.weight.data, "nested.bias": model.bias.data}
    assert set(tensors) == set(wanted)
    for name, tensor in tensors.items():
        assert tensor.dtype == wanted[name].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(-1).view(torch.uint8), _bytes(wanted[name])), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol(tmp_path, protocol):
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path, pickle_protocol=protocol)
    with TorchArchiveSource(path) as source:
        assert torch.equal(source.read("a"), torch.ones(3))


def test_no_code_of_a_hostile_pickle_runs(tmp_path):
    mark = tmp_path / "executed"
    path = save(tmp_path / "x.pt", {"a": torch.ones(3), "b": Bomb(mark)})
    with pytest.raises(CheckpointError, match=r"mkdir.*run code"):
        TorchArchiveSource(path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"(S'true'\nios\nsystem\n.",
        b"\x82\x01.",  # an extension code
        b"\x80\x02}q\x00h\x00h\x00s.",
        b"\x80\x02K\x05.",
        b"\x80\x02ctorch\ndevice\n.",
        b"",
        b".",
        b"\x80\x02}",
        b"\x80\x02h\x07.",
        b"\x80\x02t.",
        pickle.dumps({"a": [1, 2]}, 2),
        pickle.dumps({"a": {"b": {1.5: 2}}}, 2),
    ],
)
def test_pickles_that_are_more_than_data_or_damaged(tmp_path, data):
    path = rewrite(save(tmp_path / "x.pt", {"a": torch.ones(3)}), lambda _: data)
    with pytest.raises(CheckpointError, match=r"x\.changed"):
        TorchArchiveSource(path)


def test_lists_of_lists_without_end_are_cheap(tmp_path):
    value: list = []
    for _ in range(100):
        value = [value, value]
    path = save(tmp_path / "x.pt", {"a": value})
    with pytest.raises(CheckpointError, match="list"):
        TorchArchiveSource(path)


def test_a_dictionary_that_holds_itself(tmp_path):
    value: dict = {}
    value["a"] = value
    with pytest.raises(CheckpointError, match="levels"):
        TorchArchiveSource(save(tmp_path / "x.pt", value))


@pytest.mark.parametrize(
    ("old", "replacement"),
    [
        (b"K\x04K\x06\x86", b"K\x05K\x06\x86"),  # a row too many
        (b"K\x06K\x01\x86", b"K\x00K\x01\x86"),  # rows that share their elements
        (b"K\x06K\x01\x86", b"K\x07K\x01\x86"),  # rows further apart than the storage
        (b"torch\nFloatStorage", b"torch\nBoolStorage2"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x009"),  # another storage
    ],
)
def test_tensors_outside_their_storage(tmp_path, old, replacement):
    path = save(tmp_path / "x.pt", {"a": torch.ones(4, 6)})
    with pytest.raises(CheckpointError):
        TorchArchiveSource(rewrite(path, lambda data: _replace(data, old, replacement)))


def _replace(data: bytes, old: bytes, replacement: bytes) -> bytes:
    assert old in data
    return data.replace(old, replacement)


def test_files_that_are_no_archive_of_torch(tmp_path):
    path = save(tmp_path / "x.pt", {"a": torch.ones(40, 6)})
    data = path.read_bytes()
    for cut in (0, 3, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.pt").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            TorchArchiveSource(tmp_path / "cut.pt")
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w") as out:
        for info in archive.infolist():
            out.writestr(info.filename, archive.read(info), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        TorchArchiveSource(packed)


def test_mutated_archives_give_an_error_or_the_same_tensors(tmp_path):
    path = save(tmp_path / "x.pt", {"a": torch.ones(4, 6), "b": torch.zeros(3).bfloat16()})
    data = bytearray(path.read_bytes())
    draw = torch.Generator().manual_seed(0)
    changed = tmp_path / "changed.pt"
    for _ in range(300):
        place = int(torch.randint(0, len(data), (), generator=draw))
        mutated = bytearray(data)
        mutated[place] ^= 1 << int(torch.randint(0, 8, (), generator=draw))
        changed.write_bytes(mutated)
        try:
            with TorchArchiveSource(changed) as source:
                for name in source.specs:
                    source.read(name)
        except CheckpointError as error:
            assert "changed.pt" in str(error)  # noqa: PT017
