"""What a converted layer's source held that our record does not hold bit for bit.

Another family may store a reciprocal, or a low-rank factor that sees the scaled x. The record has
what it means, rounded once; the origin keeps what stood there, so that converting back gives the
source's own bytes. Nothing of it is needed to run a layer. In a file the origin's tensors are
called `LAYER.origin.PART`, and the metadata entry `halfbyte_origins` lists them (docs/formats.md).
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import quoted, read_strict_json

ORIGINS_KEY = "halfbyte_origins"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of families, parts and facts


@dataclass(frozen=True, eq=False)
class LayerOrigin:
    """What a layer came from.

    Attributes:
        family: the source's family.
        parts: tensors by that family's part names.
        facts: what else decided how the source was read.
    """

    family: str
    parts: Mapping[str, torch.Tensor]
    facts: Mapping[str, str]


@dataclass(frozen=True)
class OriginRecord:
    """The JSON record of one layer's origin."""

    family: str
    facts: Mapping[str, str]
    parts: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {**asdict(self), "facts": dict(self.facts), "parts": list(self.parts)}


def make_origin_record(origin: LayerOrigin) -> OriginRecord:
    """Return the record of an origin."""
    return OriginRecord(origin.family, dict(origin.facts), tuple(sorted(origin.parts)))


def make_origin_name(layer: str, part: str) -> str:
    """Return the name of an origin's tensor in a file."""
    return f"{layer}.origin.{part}"


def encode_origins(records: Mapping[str, OriginRecord]) -> str:
    """Return the metadata entry of all origins of a file."""
    table = {name: records[name].to_json() for name in sorted(records)}
    return json.dumps(table, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def read_origin_records(
    path: Path, metadata: Mapping[str, str], layers: Collection[str]
) -> dict[str, OriginRecord]:
    """Return the origin records of one file by layer; {} where it has none.

    Raises:
        CheckpointError: no JSON object, a layer that the file does not hold, or a record that is
            none.
    """
    if ORIGINS_KEY not in metadata:
        return {}
    table = read_strict_json(path, metadata[ORIGINS_KEY].encode())
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: {ORIGINS_KEY} is no JSON object; convert the file again")
    for name in table:
        if name not in layers:
            raise CheckpointError(
                f"{path}: {ORIGINS_KEY} names layer {quoted(name)}, which the file does not hold; "
                "convert the file again"
            )
    return {name: _parse_record(f"{path}: {name}", value) for name, value in table.items()}


def _parse_record(where: str, value: Any) -> OriginRecord:
    keys = set(OriginRecord.__dataclass_fields__)
    if not isinstance(value, dict) or set(value) != keys:
        _fail(where, quoted(value))
    family, facts, parts = value["family"], value["facts"], value["parts"]
    names = [family, *(parts if isinstance(parts, list) else [None])]
    if isinstance(facts, dict):
        names += facts
    is_sound = isinstance(facts, dict) and all(isinstance(text, str) for text in facts.values())
    if not is_sound or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        _fail(where, quoted(value))
    if len(set(parts)) != len(parts):
        _fail(where, quoted(parts))
    return OriginRecord(family, facts, tuple(parts))


def _fail(where: str, came: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: {ORIGINS_KEY} got {came}, wanted family, facts (strings) and parts (names); "
        "convert the file again"
    )
