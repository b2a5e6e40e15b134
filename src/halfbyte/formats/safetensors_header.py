"""The safetensors header, parsed with distrust and written deterministically.

A safetensors file is a little-endian u64 header length, that many bytes of UTF-8 JSON
`{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {str: str}}`, then the data; offsets
count from the end of the header and must tile the data without gap or overlap.
Source of the layout: the format section of the safetensors README.

Invariant: whatever the bytes, `parse_header` returns a header in which every tensor lies inside
the file and has exactly shape x dtype bytes, or raises CheckpointError.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from halfbyte.errors import CheckpointError

LENGTH_BYTES = 8  # the u64 before the JSON
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_DIMENSIONS = 64  # torch's own limit for a tensor
MAX_DIMENSION = 2**63 - 1  # torch sizes are int64
METADATA_KEY = "__metadata__"
GGUF_MAGIC = b"GGUF"  # the first bytes of another format that is often taken for this one
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_SHOWN_CHARACTERS = 160  # of a name or value in an error message


@dataclass(frozen=True)
class FileDtype:
    """A dtype word of the header: its bits and the torch dtype of whole-byte elements."""

    name: str
    bits: int
    torch_dtype: torch.dtype | None


# Names and widths: the Dtype enumeration of safetensors 0.8; sub-byte ones have no torch dtype of
# one element, so they are copied as bytes and never read as numbers.
_FILE_DTYPES = (
    FileDtype("BOOL", 8, torch.bool),
    FileDtype("F4", 4, None),
    FileDtype("F6_E2M3", 6, None),
    FileDtype("F6_E3M2", 6, None),
    FileDtype("U8", 8, torch.uint8),
    FileDtype("I8", 8, torch.int8),
    FileDtype("F8_E5M2", 8, torch.float8_e5m2),
    FileDtype("F8_E4M3", 8, torch.float8_e4m3fn),
    FileDtype("F8_E8M0", 8, torch.float8_e8m0fnu),
    FileDtype("F8_E4M3FNUZ", 8, torch.float8_e4m3fnuz),
    FileDtype("F8_E5M2FNUZ", 8, torch.float8_e5m2fnuz),
    FileDtype("I16", 16, torch.int16),
    FileDtype("U16", 16, torch.uint16),
    FileDtype("F16", 16, torch.float16),
    FileDtype("BF16", 16, torch.bfloat16),
    FileDtype("I32", 32, torch.int32),
    FileDtype("U32", 32, torch.uint32),
    FileDtype("F32", 32, torch.float32),
    FileDtype("C64", 64, torch.complex64),
    FileDtype("F64", 64, torch.float64),
    FileDtype("I64", 64, torch.int64),
    FileDtype("U64", 64, torch.uint64),
)
FILE_DTYPES: dict[str, FileDtype] = {record.name: record for record in _FILE_DTYPES}
_BY_TORCH_DTYPE = {record.torch_dtype: record for record in _FILE_DTYPES if record.torch_dtype}


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is, before it has a place in a file."""

    name: str
    dtype: FileDtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The product of the shape; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file (a sub-byte tensor fills whole bytes)."""
        return self.num_elements * self.dtype.bits // 8


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor with its place: `start` counts bytes from the beginning of the file."""

    start: int

    @property
    def stop(self) -> int:
        """The first byte of the file after this tensor."""
        return self.start + self.num_bytes


@dataclass(frozen=True)
class SafetensorsHeader:
    """A checked header.

    Attributes:
        tensors: entries by name, in the order of their bytes.
        metadata: the `__metadata__` map.
        data_start: bytes before the data: 8 plus the header length.
        file_bytes: length of the whole file.
    """

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def quoted(value: object) -> str:
    """Return `value` as a short printable literal for an error message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...({len(text)})"


def make_spec(name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorSpec:
    """Return the spec of a torch tensor; CheckpointError for a dtype the format lacks."""
    if dtype not in _BY_TORCH_DTYPE:
        raise CheckpointError(
            f"tensor {quoted(name)}: safetensors has no dtype for {dtype}; convert it to one of: "
            + ", ".join(record.name for record in _FILE_DTYPES if record.torch_dtype)
        )
    return TensorSpec(name, _BY_TORCH_DTYPE[dtype], tuple(int(size) for size in shape))


def make_layout(
    specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[SafetensorsHeader, bytes]:
    """Return the header of a file that holds `specs`, and its first `data_start` bytes.

    Tensors are laid out widest dtype first, then by name, and the JSON is padded with spaces to 8
    bytes, so that every tensor is aligned to its element and equal input gives equal bytes.
    Raises CheckpointError for two tensors of one name and for a reserved or unencodable name.
    """
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.bits, spec.name))
    table: dict[str, Any] = {}
    if metadata:
        table[METADATA_KEY] = {key: metadata[key] for key in sorted(metadata)}
    offset = 0
    for spec in ordered:
        _check_name(spec.name, "new file")
        if spec.name in table:
            raise CheckpointError(f"tensor {quoted(spec.name)} is written twice; rename one")
        end = offset + spec.num_bytes
        table[spec.name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}")
    prefix = struct.pack("<Q", len(text)) + text
    entries = {
        spec.name: TensorEntry(
            spec.name, spec.dtype, spec.shape, len(prefix) + table[spec.name]["data_offsets"][0]
        )
        for spec in ordered
    }
    return (
        SafetensorsHeader(entries, dict(metadata or {}), len(prefix), len(prefix) + offset),
        prefix,
    )


def read_header(path: Path, fd: int, file_bytes: int) -> tuple[SafetensorsHeader, bytes]:
    """Return the checked header of the open file `fd` and its raw bytes (length and JSON)."""
    if file_bytes < LENGTH_BYTES:
        _fail(
            path,
            f"the file has {file_bytes} bytes",
            "a safetensors file starts with 8 bytes of header length",
        )
    prefix = os.pread(fd, LENGTH_BYTES, 0)
    length = check_header_length(path, prefix, file_bytes)
    raw = bytearray(prefix)
    while len(raw) < LENGTH_BYTES + length:
        piece = os.pread(fd, LENGTH_BYTES + length - len(raw), len(raw))
        if not piece:
            _fail(path, f"the file ends inside its header at byte {len(raw)}", f"{length} bytes")
        raw += piece
    return parse_header(path, bytes(raw[LENGTH_BYTES:]), file_bytes), bytes(raw)


def check_header_length(path: Path, prefix: bytes, file_bytes: int) -> int:
    """Return the header length in `prefix`, checked against the limits and the file's length."""
    (length,) = struct.unpack("<Q", prefix)
    if prefix[:4] == GGUF_MAGIC:
        raise CheckpointError(
            f"{path}: got a GGUF file, wanted a safetensors file; this version quantizes "
            "safetensors alone, convert the model or take its original"
        )
    if length > MAX_HEADER_BYTES:
        _fail(path, f"header length {length}", f"at most {MAX_HEADER_BYTES} bytes")
    if length < 2:
        _fail(path, f"header length {length}", "at least the 2 bytes of an empty JSON object")
    if LENGTH_BYTES + length > file_bytes:
        _fail(
            path,
            f"header length {length} in a file of {file_bytes} bytes",
            f"at most {file_bytes - LENGTH_BYTES}",
        )
    return int(length)


def parse_header(path: Path, text: bytes, file_bytes: int) -> SafetensorsHeader:
    """Return the header whose JSON is `text`, of a file of `file_bytes` bytes.

    Args:
        path: named in errors.
        text: the JSON bytes, without the u64 length.
        file_bytes: length of the whole file.

    Raises:
        CheckpointError: for any byte sequence that is not a well-formed header of such a file.
    """
    if not text.startswith(b"{"):
        _fail(path, f"a header that starts with {quoted(text[:8])}", "a JSON object")
    table = read_strict_json(path, text)
    if not isinstance(table, dict):
        _fail(path, f"a header of JSON type {type(table).__name__}", "a JSON object")
    metadata = _checked_metadata(path, table.pop(METADATA_KEY, {}))
    data_start = LENGTH_BYTES + len(text)
    entries = [_checked_entry(path, name, value, data_start) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_tiling(path, entries, data_start, file_bytes)
    return SafetensorsHeader(
        {entry.name: entry for entry in entries}, metadata, data_start, file_bytes
    )


def read_strict_json(path: Path | str, text: bytes) -> Any:
    """Return the JSON value in `text`; duplicate keys, NaN and bad UTF-8 are CheckpointErrors."""

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                _fail(path, f"key {quoted(key)} twice", "each key once")
            table[key] = value
        return table

    def refuse_constant(word: str) -> NoReturn:
        _fail(path, f"the constant {word}", "plain JSON")

    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=refuse_duplicates,
            parse_constant=refuse_constant,
        )
    except UnicodeDecodeError as error:
        _fail(path, f"byte {error.object[error.start]:#04x} at {error.start}", "UTF-8 JSON")
    except RecursionError:
        _fail(path, "JSON nested too deeply", "a flat JSON object")
    except CheckpointError:
        raise
    except ValueError as error:
        _fail(path, f"invalid JSON ({quoted(str(error))})", "a JSON object")


def _checked_metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        _fail(path, f"{METADATA_KEY} {quoted(value)}", "an object of strings")
    for key, item in value.items():
        if not isinstance(item, str):
            _fail(path, f"{METADATA_KEY}[{quoted(key)}] = {quoted(item)}", "a string")
        _check_name(key, path)
        _check_name(item, path)
    return dict(value)


def _checked_entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    _check_name(name, path)
    if not isinstance(value, dict) or set(value) != _ENTRY_KEYS:
        came = sorted(value) if isinstance(value, dict) else value
        _fail(path, quoted(came), f"an object with {sorted(_ENTRY_KEYS)}", name)
    word = value["dtype"]
    if not isinstance(word, str) or word not in FILE_DTYPES:
        _fail(path, f"dtype {quoted(word)}", "one of " + ", ".join(FILE_DTYPES), name)
    shape, offsets = value["shape"], value["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        _fail(path, f"shape {quoted(shape)}", f"a list of at most {MAX_DIMENSIONS} sizes", name)
    if not all(_is_size(size) for size in shape):
        _fail(path, f"shape {quoted(shape)}", f"integers from 0 to {MAX_DIMENSION}", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _fail(path, f"data_offsets {quoted(offsets)}", "two integers, start and end", name)
    start, stop = offsets
    dtype = FILE_DTYPES[word]
    bits = math.prod(shape) * dtype.bits
    if bits % 8:
        _fail(path, f"{quoted(shape)} x {word} = {bits} bits", "whole bytes", name)
    if stop - start != bits // 8:
        _fail(
            path,
            f"data_offsets {quoted(offsets)}, {stop - start} bytes",
            f"{quoted(shape)} x {word} = {bits // 8} bytes",
            name,
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start)


def _check_tiling(path: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    position = data_start
    for entry in entries:
        if entry.stop > file_bytes:
            _fail(
                path,
                f"bytes up to {entry.stop}",
                f"at most the {file_bytes} bytes of the file (truncated?)",
                entry.name,
            )
        if entry.start != position:
            word = "overlaps the tensor before it" if entry.start < position else "leaves a gap"
            _fail(path, f"a start at byte {entry.start}, which {word}", f"{position}", entry.name)
        position = entry.stop
    if position != file_bytes:
        _fail(path, f"{file_bytes - position} bytes that no tensor owns", "data covered by tensors")


def _is_size(value: Any) -> bool:
    # bool is an int in Python and `true` is not a size
    return type(value) is int and 0 <= value <= MAX_DIMENSION


def _check_name(name: str, where: object) -> None:
    if name == METADATA_KEY:
        raise CheckpointError(f"{where}: {METADATA_KEY} is reserved; rename the tensor")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{where}: {quoted(name)} holds a lone surrogate; names must be valid Unicode text"
        ) from None


def _fail(path: Path | str, came: str, wanted: str, tensor: str | None = None) -> NoReturn:
    place = f"{path}: tensor {quoted(tensor)}" if tensor is not None else f"{path}"
    raise CheckpointError(
        f"{place}: got {came}, wanted {wanted}; the file is corrupt or no safetensors file, "
        "fetch or export it again"
    )
