"""The input of a run, checked and fingerprinted in one pass before any work starts.

The pass reads every byte once: it hashes them (SHA-256) and looks for NaN and Inf in the weights
to quantize, so that a bad weight late in the file costs seconds and not hours. The fingerprint is
of content alone: a copied or touched file still counts as the same input.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_checkpoint import SafetensorsCheckpoint
from halfbyte.formats.safetensors_header import TensorEntry, quoted
from halfbyte.formats.side_files import Stamp, find_side_files, read_side_file, read_stamp

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
        stamps: of every shard, to notice a later change.
        side_files: names of the files that go along with a directory.
        not_copied: names in the directory that do not.
    """

    digest: str
    stamps: dict[Path, Stamp]
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
    stamps: dict[Path, Stamp] = {}
    for name, shard in sorted(checkpoint.shards.items()):
        hasher.update(f"{name}\0{shard.header.file_bytes}\0".encode(errors="surrogateescape"))
        hasher.update(shard.header_bytes)
        advance(len(shard.header_bytes))
        stamps[shard.path] = read_stamp(shard.path)
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
    side_files: tuple[str, ...] = ()
    not_copied: tuple[str, ...] = ()
    if checkpoint.is_directory:
        side_files, not_copied = find_side_files(checkpoint.path, checkpoint.shards)
    for name in side_files:
        hasher.update(f"{name}\0".encode(errors="surrogateescape"))
        hasher.update(hashlib.sha256(read_side_file(checkpoint.path, name)).digest())
    return CheckedInput(hasher.hexdigest(), stamps, side_files, not_copied)


def _count_not_finite(entry: TensorEntry, chunk: torch.Tensor) -> int:
    integer, mask = _EXPONENT_BITS[entry.dtype.name]
    return int(((chunk.view(integer) & mask) == mask).sum())
