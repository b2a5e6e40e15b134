"""Writes safetensors files whose layout is known beforehand; a half-written file never shows.

The file grows under another name in the target's directory, at its full length from the start (a
full disk fails before any work), and takes its name only once complete and on the disk.
"""

import errno
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.safetensors_header import (
    SafetensorsHeader,
    make_layout,
    make_spec,
    quoted,
)

TEMPORARY_SUFFIX = ".halfbyte-partial"


class PreallocatedFile:
    """A safetensors file under construction: header in place, tensor bytes written anywhere.

    Attributes:
        path: of the file itself, not of the finished target.
        layout: where every tensor goes.
    """

    def __init__(self, path: Path, layout: SafetensorsHeader, prefix: bytes) -> None:
        """Open or create `path`, give it its length and header; CheckpointError on a full disk."""
        self.path = path
        self.layout = layout
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.ftruncate(self._fd, layout.file_bytes)
            reserve_bytes(self._fd, layout.file_bytes)
            self._write_at(memoryview(prefix), 0)
        except OSError as error:
            self.close()
            raise_write_error(path, error)
        except BaseException:
            self.close()
            raise

    def write_bytes(self, name: str, data: torch.Tensor, start: int = 0) -> None:
        """Put the bytes of `data` at byte `start` of tensor `name`."""
        entry = self.layout.tensors[name]
        view = tensor_bytes(data)
        if start < 0 or start + len(view) > entry.num_bytes:
            raise CheckpointError(
                f"{self.path}: tensor {quoted(name)}: {len(view)} bytes at {start} do not fit "
                f"into its {entry.num_bytes}"
            )
        try:
            self._write_at(view, entry.start + start)
        except OSError as error:
            raise_write_error(self.path, error)

    def read_bytes(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of tensor `name` as they stand in the file."""
        return os.pread(self._fd, stop - start, self.layout.tensors[name].start + start)

    def sync(self) -> None:
        """Return when everything written so far is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise_write_error(self.path, error)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write_at(self, view: memoryview, offset: int) -> None:
        position = 0
        while position < len(view):
            position += os.pwrite(self._fd, view[position:], offset + position)


class SafetensorsWriter:
    """Writes one file atomically; a context manager whose clean exit puts the file in place.

    Every tensor of the layout must have been written whole by then. On an exception, or if
    something is missing, the temporary file is removed and the target stays as it was.
    """

    def __init__(self, path: str | os.PathLike[str], layout: SafetensorsHeader, prefix: bytes):
        """Start the file; `layout` and `prefix` come from `make_layout`."""
        self.path = Path(path)
        self._missing = {name: entry.num_bytes for name, entry in layout.tensors.items()}
        temporary = make_temporary_file(self.path)
        try:
            self._file = PreallocatedFile(temporary, layout, prefix)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the finished file in place, or remove what was begun."""
        try:
            if error is None:
                self._check_complete()
                self._file.sync()
                self._file.close()
                replace_path(self._file.path, self.path)
        finally:
            self._file.close()
            self._file.path.unlink(missing_ok=True)

    def write(self, name: str, data: torch.Tensor, start: int = 0) -> None:
        """Put the bytes of `data` at byte `start` of tensor `name`; each byte is written once."""
        if name not in self._missing:
            raise CheckpointError(f"{self.path}: tensor {quoted(name)} is not in the layout")
        self._file.write_bytes(name, data, start)
        self._missing[name] -= data.numel() * data.element_size()

    def _check_complete(self) -> None:
        for name, count in self._missing.items():
            if count:
                raise CheckpointError(
                    f"{self.path}: tensor {quoted(name)} lacks {count} of its bytes; not written"
                )


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` to `path` atomically; equal input gives equal bytes."""
    specs = [make_spec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    layout, prefix = make_layout(specs, metadata)
    with SafetensorsWriter(path, layout, prefix) as writer:
        for name in layout.tensors:
            writer.write(name, tensors[name])


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of `tensor` in row-major order as a flat view (a copy if strided)."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return view_as_bytes(tensor.detach().cpu()).numpy().data


def make_temporary_file(path: Path) -> Path:
    """Return the path of a fresh empty file beside `path`; CheckpointError if none can be made."""
    try:
        fd, name = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name[:64]}.", path.parent or ".")
        os.close(fd)
    except OSError as error:
        raise_write_error(path, error)
    return Path(name)


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, then rename it into place.

    The temporary name is fixed, so that what a kill leaves behind goes with the next write.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        replace_path(temporary, path)
    except OSError as error:
        raise_write_error(path, error)
    finally:
        temporary.unlink(missing_ok=True)


def replace_path(source: Path, target: Path) -> None:
    """Rename `source` to `target` and put the rename itself on the disk."""
    try:
        _give_usual_permissions(source)
        os.replace(source, target)
        sync_directory(target.parent)
    except OSError as error:
        raise_write_error(target, error)


def sync_directory(directory: Path) -> None:
    """Return when the names in `directory` are on the disk (a rename is a directory's change)."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve_bytes(fd: int, num_bytes: int) -> None:
    """Claim the disk space of the open file; OSError where the disk is too full.

    File systems that cannot reserve are left alone: there the write itself will tell.
    """
    if not num_bytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


def raise_write_error(path: Path, error: OSError) -> NoReturn:
    """Raise CheckpointError that says why `path` cannot be written and what helps."""
    fixes = {
        errno.ENOSPC: "the disk is full; free some space or choose another place",
        errno.EDQUOT: "the disk quota is used up; free some space or choose another place",
        errno.EFBIG: "the file would be larger than this system or its limits allow",
        errno.EACCES: "the directory may not be written; check its permissions",
        errno.EROFS: "the file system is read-only; choose another place",
        errno.ENOENT: "its directory does not exist; make it first",
        errno.ENOTDIR: "a part of its path is a file; choose another place",
        errno.EISDIR: "a directory stands there; choose another name",
        errno.ENAMETOOLONG: "its name, with what is added while it is written, is too long; "
        "choose a shorter one",
    }
    reason = fixes.get(error.errno or 0, str(error))
    raise CheckpointError(f"{path}: cannot be written: {reason}") from error


def _give_usual_permissions(path: Path) -> None:
    # mkstemp makes files private (0600); a finished file gets what open() would have given it
    mask = os.umask(0)
    os.umask(mask)
    if not path.is_dir():
        os.chmod(path, 0o666 & ~mask)
