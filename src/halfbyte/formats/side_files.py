"""What goes along with the shards of a checkpoint, and whether its files stay as they are."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from halfbyte.errors import CheckpointError
from halfbyte.formats.file_target import resolve_links
from halfbyte.formats.safetensors_checkpoint import INDEX_SUFFIX
from halfbyte.formats.safetensors_reader import open_regular_file

# Files beside the shards that belong to a model: configuration, tokenizer, licence. Code and other
# weights are not copied.
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab", ".md")
_SIDE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README")
MAX_SIDE_BYTES = 256 * 2**20

Stamp = tuple[int, int]  # size in bytes, modification time in ns


def check_unchanged(stamps: Mapping[Path, Stamp], doing: str) -> None:
    """Raise CheckpointError if a file was written to since its stamp was read.

    Args:
        stamps: by file.
        doing: what was done with the files meanwhile, e.g. "quantized".
    """
    for path, stamp in stamps.items():
        if read_stamp(path) != stamp:
            raise CheckpointError(
                f"{path}: changed while it was being {doing}; run again once it is complete"
            )


def read_stamp(path: Path) -> Stamp:
    """Return size in bytes and modification time in ns; CheckpointError if the file is gone."""
    try:
        state = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read any more ({error})") from error
    return state.st_size, state.st_mtime_ns


def find_side_files(
    folder: Path, shards: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of files that go along with `shards`, and of entries that do not.

    Only regular files inside the directory go along; a link that leads out of it does not.
    """
    inside = resolve_links(folder)
    taken, left = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in shards or entry.name.endswith(INDEX_SUFFIX):
            continue
        is_known = entry.name.endswith(_SIDE_SUFFIXES) or entry.name.split(".")[0] in _SIDE_NAMES
        is_inside = resolve_links(Path(entry.path)).is_relative_to(inside)
        is_file = Path(entry.path).is_file()  # entry.is_file raises for a loop of links
        is_wanted = is_known and is_inside and is_file and not entry.name.startswith(".")
        if is_wanted and entry.stat().st_size <= MAX_SIDE_BYTES:
            taken.append(entry.name)
        else:
            left.append(entry.name)
    return tuple(taken), tuple(left)


def read_side_file(folder: Path, name: str) -> bytes:
    """Return the bytes of one side file; CheckpointError if it cannot be read."""
    try:
        with open(open_regular_file(folder / name), "rb") as stream:
            return stream.read()
    except OSError as error:
        raise CheckpointError(f"{folder / name}: cannot be read ({error})") from error
