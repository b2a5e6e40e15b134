"""The cache of compiled kernels on disk: shared by processes, bounded, never trusted blindly.

Its files are loaded into the process, so that a folder that others may write is not used.
"""

import contextlib
import logging
import os
import shutil
import stat
from pathlib import Path

from halfbyte.cache_home import find_cache_home
from halfbyte.errors import CheckpointError, UsageError, printable
from halfbyte.runtime.kernel_entry import (
    MANIFEST,
    KernelEntry,
    read_entry,
    remove_abandoned,
    remove_entry,
)

FOLDER_VARIABLE = "HALFBYTE_KERNEL_CACHE"
MOST_BYTES = 1 << 30  # entries take about 1 MB each

_log = logging.getLogger(__name__)


def find_cache_folder() -> Path:
    """Return the folder of the cache: HALFBYTE_KERNEL_CACHE, else one in the user's cache folder.

    Raises:
        UsageError: HALFBYTE_KERNEL_CACHE names the home of nobody.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return expand_folder(named, FOLDER_VARIABLE)
    return find_cache_home() / "halfbyte" / "kernels"


def expand_folder(name: str | os.PathLike[str], named_by: str) -> Path:
    """Return a folder that a user named as an absolute path, `~` put in.

    Raises:
        UsageError: it starts with the home of nobody; `named_by` says who named it.
    """
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"{named_by}: {printable(str(name))}: {error} Name a full path") from None


class KernelCache:
    """Entries by key in one folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        """Use `folder`, made on first writing; the least recently used goes above `most_bytes`."""
        self.folder = folder
        self.most_bytes = most_bytes

    def find(self, key: str) -> KernelEntry | None:
        """Return the entry of a key, or None: absent, or damaged and therefore removed."""
        if not self.is_safe():
            return None
        folder = self.get_place(key)
        try:
            entry = read_entry(folder)
        except CheckpointError as error:
            _log.warning("%s; it is built again", error)
            remove_entry(folder)
            return None
        if entry is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written
                os.utime(folder / MANIFEST)
        return entry

    def get_place(self, key: str) -> Path:
        """Return the folder of a key's entry."""
        return self.folder / key

    def make_folder(self) -> None:
        """Make the folder where it is missing: what fails here needs no compilation first.

        Raises:
            OSError: it cannot be made, or something else has its name.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {self.folder}")

    def is_safe(self) -> bool:
        """Whether nobody but this user (or root) may put files where they would be loaded from."""
        try:
            state = self.folder.stat()
        except OSError:
            return True  # there is nothing to load
        if not hasattr(os, "geteuid"):
            return True
        is_ours = state.st_uid in (os.geteuid(), 0)
        is_safe = is_ours and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_safe:
            _log.warning(
                "the kernel cache %s can be written by other users and is not used; "
                "chmod go-w it, or name another folder in %s",
                self.folder,
                FOLDER_VARIABLE,
            )
        return is_safe

    def trim(self) -> None:
        """Remove what killed processes left, and the least recently used above the limit."""
        remove_abandoned(self.folder)
        found = []
        with contextlib.suppress(OSError):
            for folder in self.folder.iterdir():
                with contextlib.suppress(OSError):
                    used = (folder / MANIFEST).stat().st_mtime
                    size = sum(path.stat().st_size for path in folder.iterdir())
                    found.append((used, size, folder))
        total = sum(size for _, size, _ in found)
        for _, size, folder in sorted(found):
            if total <= self.most_bytes:
                break
            remove_entry(folder)
            total -= size

    def clear(self) -> None:
        """Remove every entry; loaded kernels stay loaded."""
        shutil.rmtree(self.folder, ignore_errors=True)
