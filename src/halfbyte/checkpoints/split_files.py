"""The two files of nunchaku's older releases, read as one source.

A folder holds `transformer_blocks.safetensors`, the quantized blocks, and
`unquantized_layers.safetensors`, the rest of the model, beside its config.json; neither file has
metadata that says what it is. Source: nunchaku 3a3cc3d, merge_safetensors.py.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch

from halfbyte.checkpoints.tensor_source import get_spec, join_metadata, read_configs
from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import TensorSpec, quoted
from halfbyte.formats.safetensors_reader import SafetensorsFile

SPLIT_FILES: Final = ("transformer_blocks.safetensors", "unquantized_layers.safetensors")


def is_split_folder(path: Path) -> bool:
    """Return whether `path` is a folder with the quantized one of `SPLIT_FILES`."""
    return path.is_dir() and (path / SPLIT_FILES[0]).is_file()


class SplitFilesSource:
    """The tensors of both files by name; a `TensorSource` and a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the files of folder `path`.

        Raises:
            CheckpointError: one of them is missing or damaged, both hold a tensor of one name, or
                their metadata contradict.
        """
        self.path = path
        self.metadata: Mapping[str, str]
        self.specs: Mapping[str, TensorSpec]
        self.configs: Mapping[str, Any]
        missing = [name for name in SPLIT_FILES if not (path / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{path}: got no {' and no '.join(missing)}, wanted both "
                f"{' and '.join(SPLIT_FILES)}; fetch the missing file, or name the other one itself"
            )
        with ExitStack() as stack:
            files = [stack.enter_context(SafetensorsFile(path / name)) for name in SPLIT_FILES]
            self._file_of = map_tensors(files)
            self.specs = {name: self._file_of[name].entry(name) for name in sorted(self._file_of)}
            self.metadata = join_metadata(files)
            self.configs = read_configs(path)
            self._open_files = stack.pop_all()

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close both files."""
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`."""
        get_spec(self, name)
        return self._file_of[name].read_tensor(name)

    def iter_bytes(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensor `name` in order."""
        get_spec(self, name)
        return self._file_of[name].iter_bytes(name)

    def close(self) -> None:
        """Close both files; closing twice is fine."""
        self._open_files.close()


def map_tensors(files: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    """Return the file of every tensor; CheckpointError where two hold one name."""
    file_of: dict[str, SafetensorsFile] = {}
    for file in files:
        for name in file.tensors:
            if name in file_of:
                raise CheckpointError(
                    f"{file.path}: tensor {quoted(name)} is in {file_of[name].path.name} too; "
                    "keep one of them"
                )
            file_of[name] = file
    return file_of
