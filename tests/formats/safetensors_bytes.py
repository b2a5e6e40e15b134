"""Builds safetensors files byte by byte, valid or hostile, without the code under test."""

import json
import struct
from pathlib import Path
from typing import Any


def make_header(table: dict[str, Any] | list[Any]) -> bytes:
    """Return length and JSON of `table`."""
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


def make_entry(dtype: str, shape: list[Any], start: Any, stop: Any) -> dict[str, Any]:
    """Return one header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write_raw(path: Path, table: Any, data: bytes = b"") -> Path:
    """Write header `table` and `data` to `path` and return it."""
    path.write_bytes(make_header(table) + data)
    return path
