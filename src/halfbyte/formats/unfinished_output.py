"""The record of how far a run got, beside its unfinished output; what makes a kill harmless.

One JSON line for the run and one for each finished unit, appended after the unit's bytes are on
the disk. A line cut short by a kill does not count, and a unit whose bytes no longer have the
checksum in its line is worked off again.
"""

import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.output_files import OutputFile
from halfbyte.formats.safetensors_header import TensorEntry
from halfbyte.formats.safetensors_reader import CHUNK_BYTES, open_regular_file
from halfbyte.formats.safetensors_writer import (
    TEMPORARY_SUFFIX,
    PreallocatedFile,
    raise_write_error,
    sync_directory,
)

JOURNAL_SUFFIX = ".halfbyte-progress"
OLD_SUFFIX = ".halfbyte-old"  # of a directory that --force replaces


@dataclass(frozen=True)
class FinishedUnit:
    """A journal line: the unit's name, the checksum of its output bytes, its report entries."""

    name: str
    checksum: int
    layers: list[dict[str, Any]]


class UnfinishedOutput:
    """The output under construction, with its journal; a context manager.

    It lies beside the target under a fixed hidden name: `.NAME.halfbyte-partial`, a directory
    that holds every output file, and `.NAME.halfbyte-progress`. Leaving the context closes files
    and keeps both; `discard` removes them, `finish` puts the output in place.
    """

    def __init__(self, target: Path, files: Sequence[OutputFile], fingerprint: str) -> None:
        """Lock the journal; keep finished units of an equal run, else begin anew.

        Args:
            target: the finished output's place.
            files: what it consists of; one where the target is a file.
            fingerprint: of input and settings; a run with another one is not continued.

        Raises:
            UsageError: another run is writing the same target.
            CheckpointError: the place cannot be written, or the disk is too full.
        """
        self.target = target
        self.folder = get_unfinished_folder(target)
        self.journal = target.parent / f".{target.name}{JOURNAL_SUFFIX}"
        self.finished: dict[str, FinishedUnit] = {}
        self.files: dict[str, PreallocatedFile] = {}
        self.was_other_run = False
        self._planned = tuple(files)
        self._file_of = {name: file.name for file in files for name in file.layout.tensors}
        self._fd = self._open_journal()
        try:
            self._resume_or_begin(fingerprint)
        except OSError as error:
            self.discard()
            raise_write_error(self.target, error)
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        """Return the output itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything; what is on the disk stays."""
        self._close()

    def file_of(self, tensor: str) -> PreallocatedFile:
        """Return the file that holds output tensor `tensor`."""
        return self.files[self._file_of[tensor]]

    def measure_checksum(self, tensors: Iterable[str]) -> int:
        """Return the CRC-32 of the bytes of `tensors`, in name order, as they stand."""
        checksum = 0
        for name in sorted(tensors):
            file = self.file_of(name)
            total = file.layout.tensors[name].num_bytes
            for start in range(0, total, CHUNK_BYTES):
                data = file.read_bytes(name, start, min(start + CHUNK_BYTES, total))
                checksum = zlib.crc32(data, checksum)
        return checksum

    def record(self, unit: FinishedUnit) -> None:
        """Put the unit's bytes on the disk, then its line into the journal."""
        self.record_all([unit])

    def record_all(self, units: Sequence[FinishedUnit]) -> None:
        """Record several units at the price of one: the disk is waited for once."""
        if not units:
            return
        for file in self.files.values():
            file.sync()
        for unit in units:
            self._append(unit.__dict__)
            self.finished[unit.name] = unit

    def drop(self, unit_name: str) -> None:
        """Forget a finished unit whose bytes are not what its line says."""
        self.finished.pop(unit_name, None)

    def finish(self, is_directory: bool) -> None:
        """Put the output in place of the target and remove the journal.

        A directory that stands at the target is moved aside first and removed last; between the
        two renames a kill leaves the finished output under its hidden name, and the next run
        takes it from there.
        """
        for file in self.files.values():
            file.sync()
            file.close()
        try:
            self._replace_target(is_directory)
        except OSError as error:
            raise_write_error(self.target, error)
        self.discard()

    def discard(self) -> None:
        """Remove the unfinished output and its journal."""
        for file in self.files.values():
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.journal.unlink(missing_ok=True)
        self._close()

    @staticmethod
    def remove_leftovers(target: Path) -> None:
        """Remove what a run that was killed right after its last rename left beside `target`."""
        (target.parent / f".{target.name}{JOURNAL_SUFFIX}").unlink(missing_ok=True)
        for suffix in (TEMPORARY_SUFFIX, OLD_SUFFIX):
            shutil.rmtree(target.parent / f".{target.name}{suffix}", ignore_errors=True)

    def _replace_target(self, is_directory: bool) -> None:
        if not is_directory:
            (only,) = self._planned
            os.replace(self.folder / only.name, self.target)
        else:
            old = self.target.parent / f".{self.target.name}{OLD_SUFFIX}"
            shutil.rmtree(old, ignore_errors=True)
            if self.target.exists():
                os.rename(self.target, old)
            sync_directory(self.folder)
            os.rename(self.folder, self.target)
            shutil.rmtree(old, ignore_errors=True)
        sync_directory(self.target.parent)

    def _open_journal(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self.journal, flags, 0o666)
        except OSError as error:
            raise_write_error(self.target, error)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a run that has just ended removed the journal that we opened
            is_same = os.fstat(fd).st_ino == os.stat(self.journal).st_ino
        except OSError:
            is_same = False
        if not is_same:
            os.close(fd)
            raise UsageError(
                f"{self.target}: another run is writing it; wait for that run or end it"
            )
        return fd

    def _resume_or_begin(self, fingerprint: str) -> None:
        lines, whole = read_journal(self.journal)
        os.ftruncate(self._fd, whole)  # a line cut by a kill would swallow the next one
        if not lines or lines[0].get("fingerprint") != fingerprint or not self.folder.is_dir():
            self.was_other_run = bool(lines) and lines[0].get("fingerprint") != fingerprint
            lines = []
            if self.folder.is_symlink() or self.folder.is_file():
                self.folder.unlink()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
            os.ftruncate(self._fd, 0)
            self._append({"fingerprint": fingerprint})
        for file in self._planned:
            place = self.folder / file.name
            self.files[file.name] = PreallocatedFile(place, file.layout, file.prefix)
        for line in lines[1:]:
            unit = FinishedUnit(line["name"], line["checksum"], line["layers"])
            self.finished[unit.name] = unit

    def _append(self, line: dict[str, Any]) -> None:
        raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            if os.write(self._fd, raw) != len(raw):
                raise CheckpointError(f"{self.journal}: cannot be written: the disk is full")
            os.fsync(self._fd)
        except OSError as error:
            raise_write_error(self.journal, error)

    def _close(self) -> None:
        for file in self.files.values():
            file.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def get_unfinished_folder(target: Path) -> Path:
    """Return where the unfinished output of `target` lies."""
    return target.parent / f".{target.name}{TEMPORARY_SUFFIX}"


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines of a journal, the run's first, and the bytes that they take."""
    with open(path, "rb") as stream:
        text = stream.read()
    lines: list[dict[str, Any]] = []
    whole = 0
    for raw in text.splitlines(keepends=True):
        if not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
            is_run = not lines and "fingerprint" in line
            is_unit = bool(lines) and {"name", "checksum", "layers"} <= line.keys()
        except (ValueError, AttributeError, TypeError):
            break
        if not (is_run or is_unit):
            break
        lines.append(line)
        whole += len(raw)
    return lines, whole


def is_output_of(
    target: Path,
    files: Sequence[OutputFile],
    fingerprint: str,
    tensors: Mapping[str, Sequence[str]],
) -> bool:
    """Return whether `target` is the finished output of a run that was killed before its end.

    Args:
        target: a file, or a directory.
        files: what it consists of.
        fingerprint: of the run.
        tensors: names of the output tensors of every unit.
    """
    journal = target.parent / f".{target.name}{JOURNAL_SUFFIX}"
    is_unfinished = (get_unfinished_folder(target) / files[0].name).exists()
    if is_unfinished or not target.exists() or not journal.exists():
        return False
    lines, _ = read_journal(journal)
    checksums = {line["name"]: line["checksum"] for line in lines[1:]}
    if not lines or lines[0]["fingerprint"] != fingerprint:
        return False
    return has_checksums(target, files, checksums, tensors)


def has_checksums(
    target: Path,
    files: Sequence[OutputFile],
    checksums: Mapping[str, int],
    tensors: Mapping[str, Sequence[str]],
) -> bool:
    """Return whether finished files have the planned headers and sizes, and units these CRC-32s.

    Args:
        target: a file, or a directory.
        files: what it consists of.
        checksums: of the tensors of every unit, as `UnfinishedOutput.measure_checksum`.
        tensors: names of the output tensors of every unit.
    """
    if checksums.keys() != tensors.keys():
        return False
    places = {file.name: target / file.name if target.is_dir() else target for file in files}
    try:
        return _measure_units(places, files, tensors) == checksums
    except (OSError, CheckpointError):
        return False


def _measure_units(
    places: Mapping[str, Path], files: Sequence[OutputFile], tensors: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return the CRC-32 of every unit's tensors in finished files; {} for files of another run."""
    found: dict[str, int] = {}
    with ExitStack() as stack:
        streams: dict[str, tuple[BinaryIO, TensorEntry]] = {}
        for file in files:
            opened = open_regular_file(places[file.name])
            stream: BinaryIO = stack.enter_context(os.fdopen(opened, "rb"))
            is_whole = os.fstat(opened).st_size == file.layout.file_bytes
            if not is_whole or stream.read(len(file.prefix)) != file.prefix:
                return {}
            streams |= {name: (stream, entry) for name, entry in file.layout.tensors.items()}
        for unit, names in tensors.items():
            checksum = 0
            for name in sorted(names):
                place, entry = streams[name]
                place.seek(entry.start)
                for start in range(0, entry.num_bytes, CHUNK_BYTES):
                    data = place.read(min(CHUNK_BYTES, entry.num_bytes - start))
                    checksum = zlib.crc32(data, checksum)
            found[unit] = checksum
    return found
