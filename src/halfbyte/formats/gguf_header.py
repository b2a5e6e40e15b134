"""The GGUF header, parsed with distrust and written deterministically.

A GGUF file, version 3, little-endian: "GGUF", u32 version, u64 tensors, u64 key-values; the
key-values (string key, u32 type, value); for every tensor its name, u32 dimensions, u64 sizes with
the fastest first, u32 type, u64 offset from the start of the data; then the data, each tensor at a
multiple of `general.alignment` (32). A string is a u64 length and its bytes.
Source: ggml's docs/gguf.md; types and block sizes as in the Python package gguf 0.19.

Invariant: whatever the bytes, `parse_gguf_header` returns tensors that lie inside the file, one
after the other, or raises CheckpointError.
"""

import base64
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import (
    FILE_DTYPES,
    SafetensorsHeader,
    TensorEntry,
    TensorSpec,
    quoted,
)

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_GGUF_HEADER_BYTES: Final = 256 * 2**20  # the vocabularies of large models take some 10 MiB
MAX_GGUF_DIMENSIONS: Final = 4  # GGML_MAX_DIMS
MAX_NESTING: Final = 4
DEFAULT_ALIGNMENT: Final = 32
# Metadata of a source: the key-values as they stand (base64), and [name, type] of every tensor.
KEY_VALUES_KEY: Final = "gguf.key_values"
TYPES_KEY: Final = "gguf.types"


@dataclass(frozen=True)
class GgufType:
    """A tensor type: elements of a block and its bytes; `dtype` for types of single numbers."""

    name: str
    number: int
    block: int
    block_bytes: int
    dtype: str | None = None


_TYPES = (
    GgufType("F32", 0, 1, 4, "F32"),
    GgufType("F16", 1, 1, 2, "F16"),
    GgufType("Q4_0", 2, 32, 18),
    GgufType("Q4_1", 3, 32, 20),
    GgufType("Q5_0", 6, 32, 22),
    GgufType("Q5_1", 7, 32, 24),
    GgufType("Q8_0", 8, 32, 34),
    GgufType("Q8_1", 9, 32, 40),
    GgufType("Q2_K", 10, 256, 84),
    GgufType("Q3_K", 11, 256, 110),
    GgufType("Q4_K", 12, 256, 144),
    GgufType("Q5_K", 13, 256, 176),
    GgufType("Q6_K", 14, 256, 210),
    GgufType("Q8_K", 15, 256, 292),
    GgufType("IQ2_XXS", 16, 256, 66),
    GgufType("IQ2_XS", 17, 256, 74),
    GgufType("IQ3_XXS", 18, 256, 98),
    GgufType("IQ1_S", 19, 256, 50),
    GgufType("IQ4_NL", 20, 32, 18),
    GgufType("IQ3_S", 21, 256, 110),
    GgufType("IQ2_S", 22, 256, 82),
    GgufType("IQ4_XS", 23, 256, 136),
    GgufType("I8", 24, 1, 1, "I8"),
    GgufType("I16", 25, 1, 2, "I16"),
    GgufType("I32", 26, 1, 4, "I32"),
    GgufType("I64", 27, 1, 8, "I64"),
    GgufType("F64", 28, 1, 8, "F64"),
    GgufType("IQ1_M", 29, 256, 56),
    GgufType("BF16", 30, 1, 2, "BF16"),
    GgufType("TQ1_0", 34, 256, 54),
    GgufType("TQ2_0", 35, 256, 66),
    GgufType("MXFP4", 39, 32, 17),
    GgufType("NVFP4", 40, 64, 36),
    GgufType("Q1_0", 41, 128, 18),
)
GGUF_TYPES: Final = {record.name: record for record in _TYPES}
_BY_NUMBER: Final = {record.number: record for record in _TYPES}
_BY_DTYPE: Final = {record.dtype: record for record in _TYPES if record.dtype}
# Key-value types by number: struct letter; 8 is a string, 9 an array.
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHeader:
    """A checked header.

    Attributes:
        tensors: by name, in the order of their bytes. A tensor of blocks is uint8
            [..., bytes of a row].
        types: tensor name -> name of its type.
        key_values: their bytes as they stand.
        scalars: strings and numbers among them.
        alignment: of every tensor.
        data_start: first byte of the data.
    """

    tensors: Mapping[str, TensorEntry]
    types: Mapping[str, str]
    key_values: bytes
    scalars: Mapping[str, str | int | float]
    alignment: int
    data_start: int


def parse_gguf_header(path: Path, head: bytes, file_bytes: int) -> GgufHeader:
    """Return the header of a file.

    Args:
        path: for errors.
        head: the file's first bytes, at most MAX_GGUF_HEADER_BYTES of them.
        file_bytes: length of the whole file.

    Raises:
        CheckpointError: anything but a whole, little-endian file of a known version.
    """
    reader = _Reader(path, head)
    count, pairs = _read_counts(reader)
    start = reader.place
    scalars: dict[str, str | int | float] = {}
    for _ in range(pairs):
        key = reader.read_string("a key")
        if key in scalars:
            reader.fail(f"key {quoted(key)} twice", "each key once")
        scalars[key] = reader.read_value(0)
    key_values = head[start : reader.place]
    alignment = scalars.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or not isinstance(alignment, int) or alignment > 2**20:
        reader.fail(f"general.alignment {quoted(alignment)}", "a power of two")
    infos = [_read_tensor(reader) for _ in range(count)]
    data_start = round_up(reader.place, alignment)
    tensors = _place_tensors(reader, infos, (data_start, alignment, file_bytes))
    shown = {key: value for key, value in scalars.items() if value is not None}
    types = {name: kind.name for name, _, kind, _ in infos}
    return GgufHeader(tensors, types, key_values, shown, alignment, data_start)


def make_gguf_layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[SafetensorsHeader, bytes]:
    """Return where the tensors of a GGUF file lie, and the bytes before them.

    Args:
        specs: the tensors; uint8 ones are rows of blocks, of the type that TYPES_KEY names.
        metadata: TYPES_KEY, JSON [[name, type], ...], whose order the tensors take; KEY_VALUES_KEY,
            key-values to write as they stand. Other entries have no place in a GGUF file.

    Raises:
        CheckpointError: a dtype, a shape or a name that the format does not have.
    """
    metadata = metadata or {}
    stated = dict(json.loads(metadata.get(TYPES_KEY, "[]")))
    place_of = {name: place for place, name in enumerate(stated)}
    ordered = sorted(specs, key=lambda spec: (place_of.get(spec.name, len(stated)), spec.name))
    key_values = decode_key_values(metadata.get(KEY_VALUES_KEY, "")) or _default_key_values()
    pairs, alignment = _count_pairs(key_values)
    table, offset = bytearray(), 0
    offsets = []
    for spec in ordered:
        kind = _choose_type(spec, stated.get(spec.name))
        sizes = [*spec.shape[:-1], spec.shape[-1] // kind.block_bytes * kind.block]
        sizes = sizes if kind.dtype is None else list(spec.shape)
        table += _pack_string(spec.name) + struct.pack("<I", len(sizes))
        table += struct.pack(f"<{len(sizes)}Q", *reversed(sizes))
        table += struct.pack("<IQ", kind.number, offset)
        offsets.append(offset)
        offset = round_up(offset + spec.num_bytes, alignment)
    prefix = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(ordered), pairs) + key_values + table
    prefix += b"\0" * (-len(prefix) % alignment)
    entries = {
        spec.name: TensorEntry(spec.name, spec.dtype, spec.shape, len(prefix) + start)
        for spec, start in zip(ordered, offsets, strict=True)
    }
    return SafetensorsHeader(entries, {}, len(prefix), len(prefix) + offset), bytes(prefix)


def encode_key_values(key_values: bytes) -> str:
    """Return the text under KEY_VALUES_KEY."""
    return base64.b64encode(key_values).decode()


def decode_key_values(text: str) -> bytes:
    """Return the bytes of a text under KEY_VALUES_KEY; CheckpointError for other texts."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CheckpointError(f"metadata {KEY_VALUES_KEY}: no base64 ({error})") from error


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple that is not below `number`."""
    return -(-number // multiple) * multiple


class _Reader:
    """Takes values from the front of a header; CheckpointError where it ends."""

    def __init__(self, path: Path, head: bytes) -> None:
        self._path, self._head = path, head
        self.place = 0

    def take(self, count: int, what: str) -> bytes:
        if count > len(self._head) - self.place:
            self.fail(
                f"{what} of {count} bytes at byte {self.place}",
                f"a header inside the file's first {len(self._head)} bytes (truncated?)",
            )
        self.place += count
        return self._head[self.place - count : self.place]

    def read_numbers(self, letters: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{letters}", self.take(struct.calcsize(f"<{letters}"), what))

    def read_string(self, what: str) -> str:
        (length,) = self.read_numbers("Q", f"the length of {what}")
        return self.take(length, what).decode("utf-8", errors="surrogateescape")

    def read_value(self, depth: int) -> Any:
        """Return a scalar or string; None for an array, whose elements are only checked."""
        (kind,) = self.read_numbers("I", "a value's type")
        if kind == _STRING:
            return self.read_string("a string")
        if kind in _SCALARS:
            return self.read_numbers(_SCALARS[kind], "a number")[0]
        if kind != _ARRAY:
            self.fail(f"value type {kind}", "one of 0 to 12")
        self._skip_array(depth)
        return None

    def _skip_array(self, depth: int) -> None:
        kind, count = self.read_numbers("IQ", "an array's type and length")
        if kind in _SCALARS:
            self.take(count * struct.calcsize(_SCALARS[kind]), "an array")
        elif kind == _STRING:
            if count > len(self._head):
                self.fail(f"an array of {count} strings", "one that fits the file")
            for _ in range(count):
                self.take(self.read_numbers("Q", "a string's length")[0], "a string")
        elif kind == _ARRAY and depth < MAX_NESTING and count <= len(self._head):
            for _ in range(count):
                self._skip_array(depth + 1)
        else:
            self.fail(f"{count} array values of type {kind}", "numbers, strings or arrays of them")

    def fail(self, came: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: GGUF header: got {came}, wanted {wanted}")


def _read_counts(reader: _Reader) -> tuple[int, int]:
    magic = reader.take(4, "the magic")
    if magic != MAGIC:
        reader.fail(f"magic {quoted(magic)}", quoted(MAGIC))
    (version,) = reader.read_numbers("I", "the version")
    if version not in VERSIONS:
        is_swapped = version & 0xFFFF == 0 and version
        came = "a big-endian file" if is_swapped else f"version {version}"
        reader.fail(came, "little-endian version 2 or 3")
    count, pairs = reader.read_numbers("QQ", "the counts")
    return count, pairs


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], GgufType, int]:
    name = reader.read_string("a tensor's name")
    (dimensions,) = reader.read_numbers("I", "a number of dimensions")
    if dimensions > MAX_GGUF_DIMENSIONS:
        reader.fail(f"tensor {quoted(name)} of {dimensions} dimensions", "at most 4")
    sizes = reader.read_numbers(f"{dimensions}Q", "sizes")
    number, offset = reader.read_numbers("IQ", "a type and an offset")
    kind = _BY_NUMBER.get(number)
    if kind is None:
        known = ", ".join(GGUF_TYPES)
        reader.fail(f"tensor {quoted(name)} of type {number}", f"one of {known}")
    if math.prod(sizes) >= 2**60 or (sizes or (1,))[0] % kind.block:
        reader.fail(
            f"tensor {quoted(name)} of sizes {list(sizes)}",
            f"rows of whole blocks of {kind.block} ({kind.name})",
        )
    if kind.dtype is not None:
        return name, tuple(reversed(sizes)), kind, offset
    row_bytes = sizes[0] // kind.block * kind.block_bytes
    return name, (*reversed(sizes[1:]), row_bytes), kind, offset


def _place_tensors(
    reader: _Reader,
    infos: list[tuple[str, tuple[int, ...], GgufType, int]],
    place: tuple[int, int, int],
) -> dict[str, TensorEntry]:
    data_start, alignment, file_bytes = place
    tensors: dict[str, TensorEntry] = {}
    expected = 0
    for name, shape, kind, offset in infos:
        entry = TensorEntry(name, FILE_DTYPES[kind.dtype or "U8"], shape, data_start + offset)
        if name in tensors or "\udc80" <= max(name, default="") <= "\udcff":
            reader.fail(f"tensor name {quoted(name)}", "UTF-8 names, each once")
        if offset != expected:
            reader.fail(f"tensor {quoted(name)} at offset {offset}", f"offset {expected}")
        if entry.stop > file_bytes:
            reader.fail(
                f"tensor {quoted(name)} up to byte {entry.stop}",
                f"at most the {file_bytes} bytes of the file (truncated?)",
            )
        tensors[name] = entry
        expected = round_up(offset + entry.num_bytes, alignment)
    if tensors and file_bytes > data_start + expected:
        reader.fail(f"{file_bytes} bytes", f"{data_start + expected}: more than the tensors take")
    return tensors


def _choose_type(spec: TensorSpec, stated: str | None) -> GgufType:
    plain = _BY_DTYPE.get(spec.dtype.name)
    if plain is not None:
        kind: GgufType | None = plain
    else:
        kind = GGUF_TYPES.get(stated or "") if spec.dtype.name == "U8" else None
        kind = None if kind is None or kind.dtype is not None else kind
    is_whole = kind is None or kind.dtype or (spec.shape and not spec.shape[-1] % kind.block_bytes)
    if kind is None or not is_whole or len(spec.shape) > MAX_GGUF_DIMENSIONS:
        raise CheckpointError(
            f"tensor {quoted(spec.name)}: {spec.dtype.name} {list(spec.shape)} has no place in a "
            "GGUF file: wanted F64, F32, F16, BF16 or signed integers of at most 4 dimensions"
        )
    return kind


def _count_pairs(key_values: bytes) -> tuple[int, int]:
    """Return the number of key-values and the alignment that they state."""
    reader = _Reader(Path(KEY_VALUES_KEY), key_values)
    count, alignment = 0, DEFAULT_ALIGNMENT
    while reader.place < len(key_values):
        key, value = reader.read_string("a key"), reader.read_value(0)
        if key == "general.alignment" and type(value) is int:
            alignment = value
        count += 1
    if not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        reader.fail(f"general.alignment {alignment}", "a power of two")
    return count, alignment


def _default_key_values() -> bytes:
    """Return what a file says that comes from no GGUF file: the one key that must be there."""
    architecture = _pack_string("general.architecture")
    architecture += struct.pack("<I", _STRING) + _pack_string("unknown")
    version = _pack_string("general.quantization_version") + struct.pack("<II", 4, 2)
    return architecture + version


def _pack_string(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data
