"""Reads one safetensors file piece by piece, with plain positioned reads.

Nothing is mapped, so what a process holds is what the caller asked for and no more; a file that
shrinks while it is read is a CheckpointError, not a bus error.
"""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import (
    SafetensorsHeader,
    TensorEntry,
    quoted,
    read_header,
)

CHUNK_BYTES = 8 * 2**20  # of one read when a tensor is streamed: large for a disk, small for memory
_OPEN_ERRORS = {
    errno.ENOENT: "there is no such file; check the path",
    errno.EACCES: "the file may not be read; check its permissions",
    errno.ELOOP: "the path is a loop of links; give the file itself",
}


class SafetensorsFile:
    """An open safetensors file whose header has been checked; a context manager.

    Attributes:
        path: as given.
        header: the checked header.
        header_bytes: the file's first bytes, header length and JSON as they stand.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path` and check its header; CheckpointError for anything but such a file."""
        self.path = Path(path)
        self._fd = open_regular_file(self.path)
        try:
            file_bytes = os.fstat(self._fd).st_size
            self.header: SafetensorsHeader
            self.header, self.header_bytes = read_header(self.path, self._fd, file_bytes)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def __del__(self) -> None:
        """Close the file if nobody did."""
        self.close()

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Entries by name, in the order of their bytes."""
        return self.header.tensors

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` map."""
        return self.header.metadata

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of tensor `name`; CheckpointError if the file has none."""
        try:
            return self.header.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.path}: has no tensor {quoted(name)}; it holds {len(self.tensors)} others"
            ) from None

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return bytes [start, stop) of tensor `name` as a 1-d uint8 tensor of its own memory."""
        entry = self.entry(name)
        stop = entry.num_bytes if stop is None else stop
        if not 0 <= start <= stop <= entry.num_bytes:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)}: bytes [{start}, {stop}) asked for, "
                f"wanted a range inside its {entry.num_bytes}"
            )
        buffer = np.empty(stop - start, dtype=np.uint8)
        self._fill(buffer.data, entry, start)
        return torch.from_numpy(buffer)

    def iter_bytes(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[torch.Tensor]:
        """Yield the bytes of tensor `name` in order, at most `chunk_bytes` at a time."""
        total = self.entry(name).num_bytes
        for start in range(0, total, chunk_bytes):
            yield self.read_bytes(name, start, min(start + chunk_bytes, total))

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return the whole tensor `name`, in its own shape, dtype and memory.

        Raises:
            CheckpointError: no such tensor, or a sub-byte dtype (read its bytes instead).
        """
        entry = self.entry(name)
        return self._typed(entry, self.read_bytes(name), entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) along the first dimension of tensor `name`.

        Raises:
            CheckpointError: a 0-d tensor, a range outside it, or a sub-byte dtype.
        """
        entry = self.entry(name)
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)}: rows [{start}, {stop}) asked for, wanted a "
                f"range inside shape {list(entry.shape)}"
            )
        row_bytes = entry.num_bytes // max(entry.shape[0], 1)
        data = self.read_bytes(name, start * row_bytes, stop * row_bytes)
        return self._typed(entry, data, (stop - start, *entry.shape[1:]))

    def _typed(
        self, entry: TensorEntry, data: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        dtype = entry.dtype.torch_dtype
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(entry.name)}: dtype {entry.dtype.name} packs "
                f"{entry.dtype.bits}-bit elements and has no torch dtype; read its bytes instead"
            )
        if data.numel() == 0:
            return torch.empty(shape, dtype=dtype)
        return data.view(dtype).reshape(shape)

    def _fill(self, view: memoryview, entry: TensorEntry, start: int) -> None:
        position = 0
        while position < len(view):
            try:
                count = os.preadv(self._fd, [view[position:]], entry.start + start + position)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(entry.name)}: cannot be read ({error})"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(entry.name)}: the file ended "
                    f"{len(view) - position} bytes early; something shortens it while it is read"
                )
            position += count


def open_regular_file(path: Path) -> int:
    """Return a read-only descriptor of the regular file `path`; CheckpointError for others.

    A pipe or device is refused before it can block or answer with endless bytes.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        number = error.errno if isinstance(error, OSError) else None
        reason = _OPEN_ERRORS.get(number or 0, str(error))
        raise CheckpointError(f"{path}: cannot be opened: {reason}") from error
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise CheckpointError(f"{path}: got a directory, wanted a file; name one file inside it")
    raise CheckpointError(f"{path}: got a pipe or device, wanted a regular file")
