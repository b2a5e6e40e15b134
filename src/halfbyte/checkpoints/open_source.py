"""Opens a checkpoint by what it is, whatever its name says.

The first bytes decide what a file is. Pickles that are no archive are refused unread: reading one
runs code.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from halfbyte.checkpoints.deepcompressor import DumpSource, is_dump_folder
from halfbyte.checkpoints.gguf_source import GgufSource
from halfbyte.checkpoints.split_files import SplitFilesSource, is_split_folder
from halfbyte.checkpoints.tensor_source import SafetensorsSource, TensorSource
from halfbyte.checkpoints.torch_archive import TorchArchiveSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_checkpoint import FILE_SUFFIX, INDEX_SUFFIX
from halfbyte.formats.safetensors_header import GGUF_MAGIC
from halfbyte.formats.safetensors_reader import open_regular_file

ARCHIVE_MAGIC: Final = b"PK\x03\x04"  # zip; what torch.save writes
PICKLE_MAGIC: Final = b"\x80"
HEAD_BYTES: Final = 8
# First bytes -> what opens such a file. What is not listed here is a safetensors file or nothing.
OPENERS: dict[bytes, Callable[[Path], TensorSource]] = {
    ARCHIVE_MAGIC: TorchArchiveSource,
    GGUF_MAGIC: GgufSource,
}
_WORDS: Final = {GGUF_MAGIC: "a GGUF file", ARCHIVE_MAGIC: "a zip or torch archive"}


def open_source(path: Path) -> TensorSource:
    """Return the open checkpoint at `path`.

    Args:
        path: a file of any known container, or a directory: safetensors shards with their index,
            one file of a known container, or nunchaku's two files of older releases.

    Raises:
        CheckpointError: nothing there, or nothing that is known; the message says what came.
    """
    return _open_folder(path) if path.is_dir() else _open_file(path)


class OpenSources:
    """Opens checkpoints and closes them; a context manager."""

    def __init__(self) -> None:
        """Start with none."""
        self._open: list[TensorSource] = []

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close every source."""
        for source in self._open:
            source.close()

    def open(self, path: Path) -> TensorSource:
        """Return the open source at `path`."""
        source = open_source(path)
        self._open.append(source)
        return source


def read_head(path: Path) -> bytes:
    """Return the first bytes of a regular file; CheckpointError if it cannot be read."""
    with open(open_regular_file(path), "rb") as stream:
        try:
            return stream.read(HEAD_BYTES)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error


def _open_file(path: Path) -> TensorSource:
    head = read_head(path)
    for magic, opener in OPENERS.items():
        if head.startswith(magic):
            return opener(path)
    for magic, word in _WORDS.items():
        if head.startswith(magic):
            raise CheckpointError(
                f"{path}: got {word}, which this version does not read; export it as safetensors"
            )
    if head.startswith(PICKLE_MAGIC) and not _may_be_length(head):
        raise CheckpointError(
            f"{path}: got a pickle, wanted a checkpoint; reading one runs code, so it is never "
            "read: save it again as safetensors"
        )
    return SafetensorsSource(path)


def _open_folder(path: Path) -> TensorSource:
    if is_split_folder(path):
        return SplitFilesSource(path)
    if is_dump_folder(path):
        return DumpSource(path)
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    if any(name.endswith((FILE_SUFFIX, INDEX_SUFFIX)) for name in names):
        return SafetensorsSource(path)
    others = [name for name in names if _is_known(path / name)]
    if len(others) == 1:
        return _open_file(path / others[0])
    return SafetensorsSource(path)  # says what it wanted


def _is_known(path: Path) -> bool:
    head = read_head(path)
    return any(head.startswith(magic) for magic in OPENERS)


def _may_be_length(head: bytes) -> bool:
    """Return whether the bytes may be a safetensors file's header length of 128 bytes or so."""
    return len(head) == HEAD_BYTES and int.from_bytes(head, "little") < 2**32
