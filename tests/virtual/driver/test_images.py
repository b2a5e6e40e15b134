"""Kernel images end where their headers say, and carry their PTX."""

import ctypes
import struct

import pytest

from halfbyte.errors import FormatError
from halfbyte.virtual.driver.images import PtxStore, add_ptx, find_ptx, read_image, strip_ptx

PTX = ".version 8.8\n.target sm_100a\n.visible .entry k()\n{ ret; }\n"
CUBIN = b"\x7fELF" + bytes(60)


def make_fat_binary(cubin: bytes = CUBIN) -> bytes:
    """Build a fat binary with one cubin, its entry header 64 bytes, arch 100."""
    entry = bytearray(64)
    struct.pack_into("<HHIQ", entry, 0, 2, 0x0101, 64, len(cubin))
    struct.pack_into("<I", entry, 28, 100)
    body = bytes(entry) + cubin
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_an_image_that_carries_ptx_gives_it_back_and_keeps_its_cubin() -> None:
    image = add_ptx(make_fat_binary(), PTX)
    assert find_ptx(image) == PTX
    assert image[16 : 16 + 64 + len(CUBIN)] == make_fat_binary()[16:]
    assert find_ptx(make_fat_binary()) is None


def test_an_image_without_its_ptx_is_what_it_was_before() -> None:
    image = make_fat_binary()
    assert strip_ptx(add_ptx(add_ptx(image, PTX), PTX)) == image
    assert strip_ptx(image) == image


def test_an_entry_that_runs_past_the_image_is_refused() -> None:
    image = bytearray(add_ptx(make_fat_binary(), PTX))
    struct.pack_into("<Q", image, 16 + 8, 1 << 40)  # bytes of the first entry
    with pytest.raises(FormatError, match="entry at byte 16 runs past its end"):
        strip_ptx(bytes(image))
    with pytest.raises(FormatError, match="fat binary only"):
        strip_ptx(CUBIN)


def test_an_image_is_read_to_the_end_that_its_header_names() -> None:
    image = add_ptx(make_fat_binary(), PTX)
    memory = ctypes.create_string_buffer(image + b"\xee" * 64)
    assert read_image(ctypes.addressof(memory)) == image


def test_an_elf_image_ends_with_its_section_headers() -> None:
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<QQ", header, 32, 64, 200)  # offsets of program and section headers
    struct.pack_into("<HHHH", header, 54, 56, 1, 64, 3)  # 1 of 56 bytes, 3 of 64 bytes
    memory = ctypes.create_string_buffer(bytes(header) + b"\xee" * 1000)
    assert len(read_image(ctypes.addressof(memory))) == 200 + 3 * 64


def test_plain_ptx_is_an_image() -> None:
    memory = ctypes.create_string_buffer(PTX.encode())
    assert find_ptx(read_image(ctypes.addressof(memory))) == PTX


def test_bytes_of_no_known_image_are_refused_with_their_first_word() -> None:
    memory = ctypes.create_string_buffer(b"\x01\x02\x03\x04nothing")
    with pytest.raises(FormatError, match="starts with 01020304"):
        read_image(ctypes.addressof(memory))
    with pytest.raises(FormatError, match="fat binary only"):
        add_ptx(CUBIN, PTX)


def test_a_cubin_compiled_elsewhere_is_refused_with_the_way_out() -> None:
    store = PtxStore()
    with pytest.raises(FormatError, match="compile it again under `halfbyte run`"):
        store.find(make_fat_binary())
    store.add(make_fat_binary(), PTX)
    assert store.find(make_fat_binary()) == PTX
