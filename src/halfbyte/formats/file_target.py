"""Whether a target path can be meant and written, decided before any work."""

import os
import shutil
from pathlib import Path

from halfbyte.errors import CheckpointError, UsageError


def check_target(
    source: Path, target: Path, report: Path, *, may_become_directory: bool = False
) -> None:
    """Raise an error if `source` and `target` cannot be meant, or `target` cannot be written.

    Args:
        source: the input.
        target: the output.
        report: where the report goes.
        may_become_directory: whether one file may be made into a directory.

    Raises:
        UsageError: the same place, one inside the other, a file where a directory belongs, a
            pipe or device, a missing parent directory, a report on top of input or output, a path
            that the system cannot take.
        CheckpointError: no such source, or a place without write permission.
    """
    try:
        _check_places(source, target)
        if source.is_file() and target.is_dir() and not may_become_directory:
            raise UsageError(
                f"{target}: is a directory and {source} one file; give the output file's name"
            )
        _check_parent(target)
        _check_report(source, target, report)
        _check_parent(report)
    except OSError as error:
        place = target if error.filename is None else os.fsdecode(error.filename)
        raise UsageError(f"{place}: {error.strerror or error}; give another path") from error


def _check_places(source: Path, target: Path) -> None:
    if not os.path.lexists(source):
        raise CheckpointError(f"{source}: there is no such file or directory; check the path")
    if target.name in ("", ".", ".."):
        raise UsageError(f"{target}: names no file; give a name for the output")
    real_source, real_target = resolve_links(source), resolve_links(target)
    if real_source == real_target or _is_same_file(source, target):
        raise UsageError(f"{target}: output and input are the same; choose another output")
    if source.is_dir() and real_target.is_relative_to(real_source):
        raise UsageError(f"{target}: lies inside the input {source}; choose a place outside it")
    if real_source.is_relative_to(real_target):
        raise UsageError(f"{target}: contains the input {source}; choose another output")
    if target.is_symlink():
        raise UsageError(f"{target}: is a link; give the place it leads to")
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise UsageError(f"{target}: is a pipe or device, wanted a file; choose another output")


def _check_report(source: Path, target: Path, report: Path) -> None:
    """Raise UsageError unless the report can be put at `report` and harms nothing there."""
    real = resolve_links(report)
    for place in (source, target):
        if real.is_relative_to(resolve_links(place)):
            raise UsageError(
                f"{report}: cannot hold the report, it is {place} or lies inside; choose another "
                "--report"
            )
    if report.exists() and not report.is_file():
        raise UsageError(
            f"{report}: cannot hold the report, it is a directory, pipe or device; choose another "
            "--report"
        )


def resolve_links(path: Path) -> Path:
    """Return the absolute path without links; one that loops stays as it is."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop


def check_free_space(target: Path, num_bytes: int) -> None:
    """Raise CheckpointError if the disk of `target` has less than `num_bytes` left."""
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes:
        raise CheckpointError(
            f"{target}: needs {num_bytes} bytes and the disk has {free} left; free some space or "
            "choose another place"
        )


def check_may_replace(target: Path, is_directory: bool, is_forced: bool, making: str) -> None:
    """Raise UsageError if something else stands at `target` and `is_forced` does not allow it.

    Args:
        target: where the output goes.
        is_directory: whether the output is one.
        is_forced: whether --force was given.
        making: what the output would be the result of, for the message.
    """
    if not os.path.lexists(target):
        return
    if is_directory != target.is_dir():
        came, wanted = ("a file", "directory") if is_directory else ("a directory", "file")
        raise UsageError(f"{target}: {came} stands there, the output is a {wanted}; rename one")
    if not is_forced and not (is_directory and not any(target.iterdir())):
        raise UsageError(
            f"{target}: exists, and nothing tells that it is the result of {making}; "
            "choose another name, or --force to replace it"
        )


def _check_parent(path: Path) -> None:
    parent = path.parent
    if not parent.is_dir():
        word = "is a file" if parent.exists() else "does not exist"
        raise UsageError(f"{path}: its directory {parent} {word}; make it or choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"{path}: {parent} may not be written; check its permissions")


def _is_same_file(left: Path, right: Path) -> bool:
    try:
        return os.path.samefile(left, right)
    except OSError:
        return False
