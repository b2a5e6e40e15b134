"""The files of an output and the units of work that fill them, known before a byte is written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.formats.safetensors_header import SafetensorsHeader

COPY_BATCH_BYTES = 64 * 2**20  # of small tensors that are copied as one unit of work


@dataclass(frozen=True)
class WorkUnit:
    """A piece of work that is finished or not: layers worked on together, or tensors to copy.

    Attributes:
        name: unique in the run.
        layers: the layers; empty for a copy.
        copies: the tensors to copy; empty for layers.
        num_bytes: bytes that the unit reads.
    """

    name: str
    layers: tuple[str, ...]
    copies: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class OutputFile:
    """One file of the output: its name, where its tensors go, and the bytes before them."""

    name: str
    layout: SafetensorsHeader
    prefix: bytes


def make_copy_units(sizes: Mapping[str, int]) -> list[WorkUnit]:
    """Return units that copy tensors, each of about COPY_BATCH_BYTES.

    Args:
        sizes: bytes by tensor name, in the order to copy them.
    """
    units: list[WorkUnit] = []
    batch: list[str] = []
    batch_bytes = 0
    for position, (name, num_bytes) in enumerate(sizes.items()):
        batch.append(name)
        batch_bytes += num_bytes
        if batch_bytes >= COPY_BATCH_BYTES or position == len(sizes) - 1:
            units.append(WorkUnit(f"copy {len(units)}", (), tuple(batch), batch_bytes))
            batch, batch_bytes = [], 0
    return units


def encode_index(files: Sequence[OutputFile]) -> bytes:
    """Return the bytes of the index of sharded `files`."""
    entries = {name: entry for file in files for name, entry in file.layout.tensors.items()}
    file_of = {name: file.name for file in files for name in file.layout.tensors}
    index = {
        "metadata": {"total_size": sum(entry.num_bytes for entry in entries.values())},
        "weight_map": dict(sorted(file_of.items())),
    }
    return encode_json(json.dumps(index, indent=2, ensure_ascii=False) + "\n")


def encode_report(report: Mapping[str, Any]) -> bytes:
    """Return the bytes of a report file."""
    return encode_json(json.dumps(report, indent=1, ensure_ascii=False)) + b"\n"


def encode_json(text: str) -> bytes:
    """Return JSON text as UTF-8; a lone surrogate (a path that is no Unicode) as its escape."""
    return text.encode(errors="backslashreplace")
