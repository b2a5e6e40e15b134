"""Conformance vectors: a small JSON file with which any implementation can test itself.

`vectors.json` is made by `tools/make_conformance_vectors.py`; its "about" entry explains the
fields. It needs no halfbyte to be used: numbers are float32 bits in hexadecimal.
"""

import json
from importlib.resources import files
from typing import Any


def read_vectors() -> dict[str, Any]:
    """Return the parsed vectors; keys as in the "about" entry."""
    text = files(__name__).joinpath("vectors.json").read_text(encoding="ascii")
    vectors: dict[str, Any] = json.loads(text)
    return vectors
