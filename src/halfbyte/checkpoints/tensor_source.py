"""Named tensors with what is known about them before a value is read, whatever the container.

Families read through this interface alone: a safetensors file or directory, a GGUF file and a torch
archive look the same to them. `MetaSource` answers every read with a tensor without values, so that
a conversion can be planned by running it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.halfbyte_file import RESERVED_KEYS
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import TensorSpec, quoted
from halfbyte.formats.safetensors_reader import SafetensorsFile

MAX_CONFIG_BYTES = 64 * 2**20
# Files beside the shards that say what the tensors mean.
CONFIG_NAMES = (
    "config.json",
    "hf_quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)


class TensorSource(Protocol):
    """Tensors by name.

    Attributes:
        path: of the file or directory.
        metadata: strings that the file itself carries.
        configs: parsed JSON objects of files beside it, by file name.
        specs: what every tensor is, by name; in name order.
    """

    path: Path
    metadata: Mapping[str, str]
    configs: Mapping[str, Any]
    specs: Mapping[str, TensorSpec]

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, in its own memory; CheckpointError without it."""

    def close(self) -> None:
        """Close files."""


@runtime_checkable
class ChunkedSource(Protocol):
    """A source that gives a tensor's bytes piece by piece, whatever its size."""

    def iter_bytes(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensor `name` in order, [n] uint8 each."""


def iter_tensor_bytes(source: TensorSource, name: str) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in row-major order; at once where the source has no pieces."""
    if isinstance(source, ChunkedSource):
        yield from source.iter_bytes(name)
    else:
        yield view_as_bytes(source.read(name))


class SafetensorsSource:
    """The tensors of a safetensors file or sharded directory."""

    def __init__(self, path: Path) -> None:
        """Open `path`; CheckpointError for a damaged file or unreadable configuration."""
        self.path = path
        self.metadata: Mapping[str, str] = {}
        self.checkpoint = SafetensorsCheckpoint(path)
        try:
            self.specs: Mapping[str, TensorSpec] = {
                name: self.checkpoint.entry(name) for name in sorted(self.checkpoint.shard_of)
            }
            self.metadata = join_metadata(self.checkpoint.shards.values())
            folder = path if self.checkpoint.is_directory else path.parent
            self.configs: Mapping[str, Any] = (
                read_configs(folder) if self.checkpoint.is_directory else {}
            )
        except BaseException:
            self.checkpoint.close()
            raise

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every shard."""
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`."""
        return self.checkpoint.read_tensor(name)

    def iter_bytes(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensor `name` in order."""
        return self.checkpoint.file_of(name).iter_bytes(name)

    def close(self) -> None:
        """Close every shard."""
        self.checkpoint.close()


class MetaSource:
    """A source whose tensors have shapes and dtypes and no values."""

    def __init__(self, source: TensorSource) -> None:
        """Answer for `source`, whose files are not read."""
        self.path = source.path
        self.metadata = source.metadata
        self.configs = source.configs
        self.specs = source.specs

    def read(self, name: str) -> torch.Tensor:
        """Return a meta tensor; CheckpointError for a name or dtype that torch has no tensor of."""
        spec = get_spec(self, name)
        if spec.dtype.torch_dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)}: dtype {spec.dtype.name} has no torch dtype"
            )
        return torch.empty(spec.shape, dtype=spec.dtype.torch_dtype, device="meta")

    def close(self) -> None:
        """Leave the source that it answers for open."""


def get_spec(source: TensorSource, name: str) -> TensorSpec:
    """Return what tensor `name` is; CheckpointError without it."""
    try:
        return source.specs[name]
    except KeyError:
        raise CheckpointError(f"{source.path}: has no tensor {quoted(name)}") from None


def join_metadata(files: Iterable[SafetensorsFile]) -> dict[str, str]:
    """Return the metadata of all files together; CheckpointError where they contradict.

    Each file of our own format lists its own layers: there the first one's entry stands.
    """
    joined: dict[str, str] = {}
    for file in files:
        for key, value in file.metadata.items():
            if joined.setdefault(key, value) != value and key not in RESERVED_KEYS:
                raise CheckpointError(
                    f"{file.path}: metadata {quoted(key)} differs from another file's"
                )
    return joined


def read_configs(folder: Path) -> dict[str, Any]:
    """Return the JSON objects of `CONFIG_NAMES` in `folder`; CheckpointError for other content."""
    found = {}
    for name in CONFIG_NAMES:
        path = folder / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, no configuration is that long"
            )
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path}: got a JSON {type(value).__name__}, wanted an object")
        found[name] = value
    return found
