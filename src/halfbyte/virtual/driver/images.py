"""Kernel images: where one ends in memory, and the PTX that belongs to it.

A compiled CuTe DSL function hands the runtime a fat binary: a header (magic 0xBA55ED50, u16
version, u16 header bytes, u64 body bytes) and entries (u16 kind, u16 flags, u32 header bytes, u64
body bytes), of which kind 2 is a cubin and kind 1 is PTX; seen in the images that CuTe DSL 4.8
makes. Kernel names are not unique, so that the image is what connects a launch to its PTX: the
compile hook puts the PTX into the image as one more entry, where it also survives in exported
object files and in compile caches.
"""

import ctypes
import hashlib
import struct
from pathlib import Path

from halfbyte.errors import FormatError

FAT_BINARY_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ENTRY_HEADER_BYTES = 64
_KIND_PTX, _KIND_CUBIN = 1, 2
_ENTRY_VERSION = 0x0101
_ARCH_OFFSET = 28  # u32 in an entry's header
_LONGEST_PTX = 1 << 30


def read_image(address: int) -> bytes:
    """Return the bytes of the kernel image that starts at `address`: fat binary, ELF or PTX text.

    Raises:
        FormatError: no known kind of image starts there.
    """
    start = ctypes.string_at(address, 4)
    if struct.unpack("<I", start)[0] == FAT_BINARY_MAGIC:
        _, _, header_bytes, body_bytes = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
        return ctypes.string_at(address, header_bytes + body_bytes)
    if start == ELF_MAGIC:
        return ctypes.string_at(address, _measure_elf(ctypes.string_at(address, 64)))
    text = ctypes.string_at(address)  # up to the NUL byte, as the driver reads PTX
    if b".version" in text[:4096]:
        return text
    raise FormatError(
        f"the kernel image starts with {start.hex()}; wanted a fat binary (50ed55ba), an ELF cubin "
        "(7f454c46) or PTX text"
    )


def _measure_elf(header: bytes) -> int:
    """Return the bytes of a 64-bit ELF file: the section or program headers come last."""
    program_offset, section_offset = struct.unpack_from("<QQ", header, 32)
    program_bytes, programs, section_bytes, sections = struct.unpack_from("<HHHH", header, 54)
    return max(
        int(section_offset + section_bytes * sections),
        int(program_offset + program_bytes * programs),
    )


def find_ptx(image: bytes) -> str | None:
    """Return the PTX that an image carries in plain text, or None."""
    if not image.startswith(struct.pack("<I", FAT_BINARY_MAGIC)):
        return image.decode(errors="replace") if b".version" in image[:4096] else None
    _, _, offset, _ = _HEADER.unpack_from(image)
    while offset + _ENTRY.size <= len(image):
        kind, _, header_bytes, body_bytes = _ENTRY.unpack_from(image, offset)
        body = image[offset + header_bytes : offset + header_bytes + body_bytes]
        if kind == _KIND_PTX and b".version" in body[:4096]:
            return body.rstrip(b"\0").decode()
        if header_bytes == 0 or body_bytes > _LONGEST_PTX:
            return None
        offset += header_bytes + body_bytes
    return None


def add_ptx(image: bytes, ptx: str) -> bytes:
    """Return the fat binary `image` with `ptx` as one more entry.

    Raises:
        FormatError: `image` is no fat binary.
    """
    if not image.startswith(struct.pack("<I", FAT_BINARY_MAGIC)):
        raise FormatError("PTX can be added to a fat binary only; the image has another magic")
    magic, version, header_bytes, body_bytes = _HEADER.unpack_from(image)
    text = ptx.encode() + b"\0"
    text += bytes(-len(text) % 8)
    entry = bytearray(_ENTRY_HEADER_BYTES)
    _ENTRY.pack_into(entry, 0, _KIND_PTX, _ENTRY_VERSION, _ENTRY_HEADER_BYTES, len(text))
    entry[_ARCH_OFFSET : _ARCH_OFFSET + 4] = image[
        header_bytes + _ARCH_OFFSET : header_bytes + _ARCH_OFFSET + 4
    ]
    body = image[header_bytes : header_bytes + body_bytes] + bytes(entry) + text
    return _HEADER.pack(magic, version, header_bytes, len(body)) + image[16:header_bytes] + body


def strip_ptx(image: bytes) -> bytes:
    """Return the fat binary `image` without its PTX entries: machine code alone.

    Raises:
        FormatError: `image` is no fat binary, or its entries run past its end.
    """
    if not image.startswith(struct.pack("<I", FAT_BINARY_MAGIC)):
        raise FormatError("PTX can be taken out of a fat binary only; the image has another magic")
    magic, version, offset, body_bytes = _HEADER.unpack_from(image)
    header, end, kept = image[:offset], offset + body_bytes, b""
    while offset + _ENTRY.size <= end:
        kind, _, entry_header_bytes, entry_bytes = _ENTRY.unpack_from(image, offset)
        next_offset = offset + entry_header_bytes + entry_bytes
        if entry_header_bytes < _ENTRY.size or next_offset > end:
            raise FormatError(f"the fat binary's entry at byte {offset} runs past its end")
        kept += b"" if kind == _KIND_PTX else image[offset:next_offset]
        offset = next_offset
    return _HEADER.pack(magic, version, len(header), len(kept)) + header[_HEADER.size :] + kept


class PtxStore:
    """The PTX of images that do not carry it themselves, by the image's SHA-256."""

    def __init__(self) -> None:
        """Start empty."""
        self._texts: dict[str, str] = {}

    def add(self, image: bytes, ptx: str) -> None:
        """Remember that `image` was compiled from `ptx`."""
        self._texts[hashlib.sha256(image).hexdigest()] = ptx

    def find(self, image: bytes) -> str:
        """Return the PTX of an image.

        Raises:
            FormatError: the image carries none and was not compiled in this process.
        """
        ptx = find_ptx(image) or self._texts.get(hashlib.sha256(image).hexdigest())
        if ptx is None:
            raise FormatError(
                f"no PTX is known for a kernel image of {len(image)} bytes: it holds machine code "
                "only and was compiled outside halfbyte; compile it again under `halfbyte run`, "
                "which keeps the PTX in the image (empty the cache it came from)"
            )
        return ptx


def read_image_file(path: str) -> bytes:
    """Return the bytes of a cubin, fat binary or PTX file."""
    return Path(path).read_bytes()
