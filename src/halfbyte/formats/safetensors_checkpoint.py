"""A checkpoint on disk: one safetensors file, or a directory of shards under one index.

The index is hostile input too: a shard is a plain name inside the directory, exists, and holds
the tensors that the index says it holds; a tensor lives in one shard only.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import (
    MAX_HEADER_BYTES,
    TensorEntry,
    quoted,
    read_strict_json,
)
from halfbyte.formats.safetensors_reader import SafetensorsFile, open_regular_file

INDEX_SUFFIX = ".safetensors.index.json"
FILE_SUFFIX = ".safetensors"


class SafetensorsCheckpoint:
    """All tensors of a file or sharded directory under one roof; a context manager.

    Attributes:
        path: the file or directory as given.
        is_directory: whether `path` is a directory.
        index_name: file name of the index, or None without one.
        shards: open files by name, in sorted order; the one file under its own name.
        shard_of: shard name of every tensor.
        unindexed: names of tensors that lie in a shard but not in the index.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open every shard of `path` and check index against shards; CheckpointError if not so."""
        self.path = Path(path)
        self.is_directory = self.path.is_dir()
        self.index_name: str | None = None
        self.shards: dict[str, SafetensorsFile] = {}
        self.shard_of: dict[str, str] = {}
        self.unindexed: tuple[str, ...] = ()
        with ExitStack() as stack:
            if self.is_directory:
                self._open_directory(stack)
            else:
                self.shards[self.path.name] = stack.enter_context(SafetensorsFile(self.path))
            self._map_tensors()
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every shard."""
        self.close()

    def close(self) -> None:
        """Close every shard; closing twice is fine."""
        self._open_files.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.header.file_bytes for shard in self.shards.values())

    def file_of(self, name: str) -> SafetensorsFile:
        """Return the open file that holds tensor `name`; CheckpointError if none does."""
        try:
            return self.shards[self.shard_of[name]]
        except KeyError:
            raise CheckpointError(f"{self.path}: has no tensor {quoted(name)}") from None

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of tensor `name`; CheckpointError if there is none."""
        return self.file_of(name).entry(name)

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor `name` (see `SafetensorsFile.read_tensor`)."""
        return self.file_of(name).read_tensor(name)

    def _open_directory(self, stack: ExitStack) -> None:
        names = sorted(entry.name for entry in os.scandir(self.path))
        indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
        files = [name for name in names if name.endswith(FILE_SUFFIX)]
        if len(indexes) > 1 or (not indexes and len(files) != 1):
            found = indexes or files
            raise CheckpointError(
                f"{self.path}: got {len(indexes)} index files and {len(files)} safetensors files "
                f"({quoted(found)}), wanted one {INDEX_SUFFIX[1:]} or exactly one safetensors "
                "file; name the file itself"
            )
        wanted: dict[str, str] = {}
        if indexes:
            self.index_name = indexes[0]
            wanted = self._read_index(self.path / indexes[0])
        for shard in sorted(set(wanted.values())) if indexes else files:
            self.shards[shard] = stack.enter_context(SafetensorsFile(self.path / shard))
        for name, shard in wanted.items():
            if name not in self.shards[shard].tensors:
                raise CheckpointError(
                    f"{self.path / shard}: tensor {quoted(name)} is missing, though the index "
                    "says it is here; fetch the shard again"
                )
        if indexes:
            held = (name for shard in self.shards.values() for name in shard.tensors)
            self.unindexed = tuple(sorted(name for name in held if name not in wanted))

    def _read_index(self, path: Path) -> dict[str, str]:
        fd = open_regular_file(path)
        with open(fd, "rb") as stream:
            text = stream.read(MAX_HEADER_BYTES + 1)
        if len(text) > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: over {MAX_HEADER_BYTES} bytes; no such index is real")
        table = read_strict_json(path, text)
        weight_map = table.get("weight_map") if isinstance(table, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{path}: weight_map is {quoted(weight_map)}, wanted an object of tensor name -> "
                "shard file; export the checkpoint again"
            )
        for name, shard in weight_map.items():
            _check_shard_name(path, name, shard)
        return weight_map

    def _map_tensors(self) -> None:
        for shard_name, shard in self.shards.items():
            for name in shard.tensors:
                if name in self.shard_of:
                    raise CheckpointError(
                        f"{self.path}: tensor {quoted(name)} is in two shards, "
                        f"{quoted(self.shard_of[name])} and {quoted(shard_name)}; keep one"
                    )
                self.shard_of[name] = shard_name


def _check_shard_name(path: Path, tensor: str, shard: Any) -> None:
    is_plain = (
        isinstance(shard, str)
        and shard.endswith(FILE_SUFFIX)
        and not shard.startswith(".")
        and not any(character in shard for character in "/\\\0")
    )
    if not is_plain:
        raise CheckpointError(
            f"{path}: tensor {quoted(tensor)}: shard {quoted(shard)}, wanted the plain name of a "
            f"{FILE_SUFFIX} file in the same directory; a path that leads elsewhere is refused"
        )
