"""The input of a run, checked and fingerprinted in one pass before any work starts.

The pass reads every byte once: it hashes them (SHA-256) and looks for NaN and Inf in the weights
to quantize, so that a bad weight late in the file costs seconds and not hours. The fingerprint is
of content alone: a copied or touched file still counts as the same input.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_checkpoint import INDEX_SUFFIX, SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import TensorEntry, quoted
from halfbyte.formats.safetensors_reader import open_regular_file
from halfbyte.svdquant.file_target import resolve_links

# Files beside the shards that belong to a model: configuration, tokenizer, licence. Code and other
# weights are not copied.
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab", ".md")
_SIDE_NAMES = ("LICENSE", "LICENCE", "NOTICE", "README")
MAX_SIDE_BYTES = 256 * 2**20
_EXPONENT_BITS = {  # a float is NaN or Inf exactly where all exponent bits are set (IEEE 754)
    "F32": (torch.int32, 0x7F800000),
    "F16": (torch.int16, 0x7C00),
    "BF16": (torch.int16, 0x7F80),
}


@dataclass(frozen=True)
class CheckedInput:
    """What the pass found.

    Attributes:
        digest: hex SHA-256 of every shard and side file, names and bytes.
        stamps: (size, modification time in ns) of every shard, to notice a later change.
        side_files: names of the files that go along with a directory.
        not_copied: names in the directory that do not.
    """

    digest: str
    stamps: dict[str, tuple[int, int]]
    side_files: tuple[str, ...]
    not_copied: tuple[str, ...]


def check_input(
    checkpoint: SafetensorsCheckpoint,
    weight_names: frozenset[str],
    advance: Callable[[int], None],
) -> CheckedInput:
    """Return the fingerprint of `checkpoint` after looking at every byte.

    Args:
        checkpoint: the open input.
        weight_names: tensors that must be finite.
        advance: called with the number of bytes just read.

    Raises:
        CheckpointError: NaN or Inf in a weight, naming the tensor; a read error.
    """
    hasher = hashlib.sha256()
    stamps = {}
    for name, shard in sorted(checkpoint.shards.items()):
        hasher.update(f"{name}\0{shard.header.file_bytes}\0".encode(errors="surrogateescape"))
        hasher.update(shard.header_bytes)
        advance(len(shard.header_bytes))
        stamps[name] = read_stamp(shard.path)
        for entry in shard.tensors.values():
            num_bad = 0
            for chunk in shard.iter_bytes(entry.name):
                hasher.update(chunk.numpy().data)
                if entry.name in weight_names:
                    num_bad += _count_not_finite(entry, chunk)
                advance(chunk.numel())
            if num_bad:
                raise CheckpointError(
                    f"{shard.path}: tensor {quoted(entry.name)}: contains NaN/Inf: {num_bad} of "
                    f"{entry.num_elements} values; mend the checkpoint or --exclude the layer"
                )
    side_files, not_copied = find_side_files(checkpoint) if checkpoint.is_directory else ((), ())
    for name in side_files:
        hasher.update(f"{name}\0".encode(errors="surrogateescape"))
        hasher.update(hashlib.sha256(read_side_file(checkpoint.path, name)).digest())
    return CheckedInput(hasher.hexdigest(), stamps, side_files, not_copied)


def check_input_unchanged(checkpoint: SafetensorsCheckpoint, checked: CheckedInput) -> None:
    """Raise CheckpointError if a shard was written to since it was checked."""
    for name, shard in checkpoint.shards.items():
        if read_stamp(shard.path) != checked.stamps[name]:
            raise CheckpointError(
                f"{shard.path}: changed while it was being quantized; run again once it is complete"
            )


def read_stamp(path: Path) -> tuple[int, int]:
    """Return size in bytes and modification time in ns; CheckpointError if the file is gone."""
    try:
        state = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read any more ({error})") from error
    return state.st_size, state.st_mtime_ns


def find_side_files(checkpoint: SafetensorsCheckpoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of files that go along with the shards, and of entries that do not.

    Only regular files inside the directory go along; a link that leads out of it does not.
    """
    inside = resolve_links(checkpoint.path)
    taken, left = [], []
    for entry in sorted(os.scandir(checkpoint.path), key=lambda entry: entry.name):
        if entry.name in checkpoint.shards or entry.name.endswith(INDEX_SUFFIX):
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


def _count_not_finite(entry: TensorEntry, chunk: torch.Tensor) -> int:
    integer, mask = _EXPONENT_BITS[entry.dtype.name]
    return int(((chunk.view(integer) & mask) == mask).sum())
