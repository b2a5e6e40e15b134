"""Hostile safetensors headers: each a CheckpointError that names the file and what is wrong."""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import (
    FILE_DTYPES,
    MAX_HEADER_BYTES,
    TensorSpec,
    make_layout,
    make_spec,
)
from halfbyte.formats.safetensors_reader import SafetensorsFile

from .safetensors_bytes import make_entry, make_header, write_raw


def refuse(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


GOOD = make_entry("F32", [2, 2], 0, 16)

BAD_ENTRIES = {
    "unknown-dtype": (make_entry("F33", [4], 0, 16), "F33"),
    "dtype-not-a-string": ({**GOOD, "dtype": ["F32"]}, "dtype"),
    "dtype-null": ({**GOOD, "dtype": None}, "dtype"),
    "size-is-not-shape-times-dtype": (make_entry("F32", [2, 3], 0, 16), "24 bytes"),
    "negative-dimension": (make_entry("F32", [-2, -2], 0, 16), "-2"),
    "bool-dimension": (make_entry("F32", [True, 4], 0, 16), "True"),
    "float-dimension": (make_entry("F32", [4.0], 0, 16), "4.0"),
    "enormous-dimension": (make_entry("F32", [2**63], 0, 16), "integers from 0"),
    "product-overflows-64-bits": (make_entry("F32", [2**32, 2**32], 0, 16), "bytes"),
    "shape-not-a-list": ({**GOOD, "shape": 4}, "shape"),
    "shape-of-65-dimensions": (make_entry("F32", [1] * 65, 0, 4), "at most 64"),
    "offsets-reversed": (make_entry("F32", [4], 16, 0), "-16 bytes"),
    "offsets-negative": (make_entry("F32", [4], -16, 0), "data_offsets"),
    "offsets-bool": (make_entry("U8", [1], False, True), "data_offsets"),
    "offsets-float": (make_entry("F32", [4], 0.0, 16.0), "data_offsets"),
    "offsets-of-three": ({**GOOD, "data_offsets": [0, 8, 16]}, "data_offsets"),
    "offsets-beyond-the-file": (make_entry("F32", [5], 0, 20), "truncated"),
    "start-leaves-a-gap": (make_entry("F32", [3], 4, 16), "gap"),
    "entry-is-a-list": ([1, 2], "data_offsets"),
    "entry-is-null": (None, "data_offsets"),
    "key-missing": ({"dtype": "F32", "shape": [4]}, "data_offsets"),
    "key-too-many": ({**GOOD, "extra": {"a": [{}]}}, "extra"),
    "half-a-byte": (make_entry("F4", [3], 0, 1), "whole bytes"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_bad_entry_is_refused_by_name(case: str, tmp_path: Path) -> None:
    entry, word = BAD_ENTRIES[case]
    path = write_raw(tmp_path / "bad.safetensors", {"layer.weight": entry}, bytes(16))
    refuse(path, "'layer.weight'", word)


@pytest.mark.parametrize("second_start", [8, 12])
def test_overlapping_tensors_are_refused(second_start: int, tmp_path: Path) -> None:
    table = {"a": GOOD, "b": make_entry("F32", [4], second_start, second_start + 16)}
    path = write_raw(tmp_path / "bad.safetensors", table, bytes(second_start + 16))
    refuse(path, "'b'", "overlaps")


def test_two_tensors_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "bad.safetensors", {"a": GOOD, "b": GOOD}, bytes(16))
    refuse(path, "'b'", "overlaps")


def test_gap_between_tensors_is_refused(tmp_path: Path) -> None:
    table = {"a": GOOD, "b": make_entry("F32", [1], 20, 24)}
    refuse(write_raw(tmp_path / "bad.safetensors", table, bytes(24)), "'b'", "gap")


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    refuse(write_raw(tmp_path / "bad.safetensors", {"a": GOOD}, bytes(17)), "no tensor owns")


def test_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = make_header({"a": GOOD}) + bytes(range(16))
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refuse(path)


RAW_FILES = {
    "empty-file": (b"", "0 bytes"),
    "seven-bytes": (b"\x01" * 7, "7 bytes"),
    "header-length-zero": (bytes(16), "header length 0"),
    "header-length-one": (struct.pack("<Q", 1) + b"{}", "header length 1"),
    "header-length-beyond-file": (struct.pack("<Q", 3) + b"{}", "header length 3"),
    "header-length-above-100-MB": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
    "header-length-u64-max": (b"\xff" * 8 + b"{}", "at most"),
    "not-an-object": (make_header([1, 2]), "JSON object"),
    "leading-space": (struct.pack("<Q", 3) + b" {}", "JSON object"),
    "not-json": (struct.pack("<Q", 4) + b"{abc", "JSON"),
    "trailing-junk": (struct.pack("<Q", 4) + b"{}{}", "JSON"),
    "not-utf8": (struct.pack("<Q", 7) + b'{"\xff":1}', "UTF-8"),
    "nan-constant": (struct.pack("<Q", 9) + b'{"a":NaN}', "NaN"),
    "integer-of-5000-digits": (
        struct.pack("<Q", 5006) + b'{"a":' + b"9" * 5000 + b"}",
        "invalid JSON",
    ),
    "nested-100000-deep": (
        struct.pack("<Q", 100006) + b'{"a":' + b"[" * 100000 + b"}",
        "nested too deeply",
    ),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
}


@pytest.mark.parametrize("case", RAW_FILES)
def test_malformed_file_is_refused(case: str, tmp_path: Path) -> None:
    data, word = RAW_FILES[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    refuse(path, word)


def test_duplicate_keys_are_refused_at_any_level(tmp_path: Path) -> None:
    entry = json.dumps(GOOD)
    path = tmp_path / "twice.safetensors"
    for text in (
        f'{{"a":{entry},"a":{entry}}}',
        '{"a":{"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        f'{{"__metadata__":{{"k":"1","k":"2"}},"a":{entry}}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{entry}}}',
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(16))
        refuse(path, "twice")


@pytest.mark.parametrize("metadata", [None, [], "text", {"k": 1}, {"k": None}, {"k": {"n": "x"}}])
def test_metadata_that_is_not_strings_is_refused(metadata: object, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "meta.safetensors", {"__metadata__": metadata})
    refuse(path, "__metadata__")


def test_lone_surrogate_in_a_name_is_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "name.safetensors", {"\ud800": GOOD}, bytes(16))
    refuse(path, "surrogate")


def test_a_name_of_a_megabyte_is_shortened_in_the_message(tmp_path: Path) -> None:
    table = {"x" * 2**20: make_entry("F33", [4], 0, 16)}
    path = write_raw(tmp_path / "long.safetensors", table, bytes(16))
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert len(str(caught.value)) < 2000


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "directory")
    refuse(tmp_path / "absent.safetensors", "no such file")
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    refuse(pipe, "pipe")
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    refuse(loop, "loop")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "secret.safetensors", {"a": GOOD}, bytes(16))
    path.chmod(0)
    is_root = os.geteuid() == 0  # root reads everything: act as another user meanwhile
    if is_root:
        os.seteuid(65534)
    try:
        refuse(path, "permissions")
    finally:
        if is_root:
            os.seteuid(0)


def test_empty_and_zero_dimensional_tensors_are_legal(tmp_path: Path) -> None:
    table = {
        "z": make_entry("F32", [], 0, 4),
        "empty_first": make_entry("F32", [0, 7], 0, 0),
        "empty_last": make_entry("BF16", [5, 0], 4, 4),
    }
    path = write_raw(tmp_path / "ok.safetensors", table, struct.pack("<f", 2.5))
    with SafetensorsFile(path) as file:
        assert file.read_tensor("z").item() == 2.5
        assert file.read_tensor("z").shape == ()
        assert file.read_tensor("empty_first").shape == (0, 7)
        assert file.read_tensor("empty_last").dtype == torch.bfloat16


def test_file_without_tensors_is_legal(tmp_path: Path) -> None:
    with SafetensorsFile(write_raw(tmp_path / "none.safetensors", {})) as file:
        assert not file.tensors


def test_every_torch_dtype_of_the_table_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    raw = torch.arange(64, dtype=torch.uint8)
    tensors = {
        record.name: (raw % 2).bool()
        if record.name == "BOOL"
        else raw.clone().view(record.torch_dtype)
        for record in FILE_DTYPES.values()
        if record.torch_dtype is not None
    }
    save_file(tensors, path)
    with SafetensorsFile(path) as file:
        assert set(file.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert file.entry(name).dtype.name == name
            assert file.read_tensor(name).dtype == tensor.dtype
            assert torch.equal(file.read_bytes(name), tensor.view(torch.uint8))


def test_sub_byte_tensor_is_read_as_bytes_only(tmp_path: Path) -> None:
    table = {"packed": make_entry("F4", [2, 4], 0, 4)}
    path = write_raw(tmp_path / "f4.safetensors", table, b"\x10\x32\x54\x76")
    with SafetensorsFile(path) as file:
        assert bytes(file.read_bytes("packed").tolist()) == b"\x10\x32\x54\x76"
        with pytest.raises(CheckpointError, match="F4 packs 4-bit"):
            file.read_tensor("packed")


def test_layout_refuses_a_name_twice_and_the_reserved_name() -> None:
    spec = make_spec("a", torch.float32, (2,))
    with pytest.raises(CheckpointError, match="twice"):
        make_layout([spec, spec])
    with pytest.raises(CheckpointError, match="reserved"):
        make_layout([TensorSpec("__metadata__", FILE_DTYPES["F32"], (2,))])


def test_layout_aligns_every_tensor_to_its_element() -> None:
    specs = [
        TensorSpec(name, FILE_DTYPES[dtype], (3,))
        for name, dtype in (("d", "U8"), ("a", "F16"), ("b", "F64"), ("c", "F32"))
    ]
    layout, prefix = make_layout(specs, {"k": "é"})
    assert list(layout.tensors) == ["b", "c", "a", "d"]
    assert len(prefix) % 8 == 0
    for entry in layout.tensors.values():
        assert entry.start % (entry.dtype.bits // 8) == 0


VALID = make_header(
    {
        "__metadata__": {"format": "pt"},
        "a.weight": make_entry("F32", [2, 2], 0, 16),
        "b": make_entry("BF16", [4], 16, 24),
        "c": make_entry("F8_E4M3", [0], 24, 24),
        "d": make_entry("U8", [], 24, 25),
    }
) + bytes(range(25))


@settings(max_examples=400, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 26), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_corrupt_header_bytes_give_an_error_or_a_correct_read(
    edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(VALID)
    for position, value in edits:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "corrupt.safetensors"
    path.write_bytes(data)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    with file:
        for name, entry in file.tensors.items():
            raw = bytes(data[entry.start : entry.stop])
            assert bytes(file.read_bytes(name).tolist()) == raw
            if entry.dtype.torch_dtype is not None:
                tensor = file.read_tensor(name)
                assert tuple(tensor.shape) == entry.shape
                assert tensor.numel() * tensor.element_size() == len(raw)


@settings(max_examples=200, deadline=None)
@given(text=st.binary(min_size=0, max_size=80))
def test_random_header_text_never_escapes_as_another_error(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    body = b"{" + text
    path.write_bytes(struct.pack("<Q", len(body)) + body)
    with contextlib.suppress(CheckpointError):
        SafetensorsFile(path).close()
