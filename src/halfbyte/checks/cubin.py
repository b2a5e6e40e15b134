"""What a cubin says about its kernels beside their code: registers, stack, shared memory.

A cubin is an ELF file. Registers per thread and the stack frame stand in the section `.nv.info` as
attributes (u8 format, u8 attribute, u16 bytes, then u32 symbol and u32 value); static shared memory
is the size of `.nv.shared.<kernel>`, the system's reserved part included. Seen in the cubins of
ptxas 12.9 and 13.
"""

import struct
from dataclasses import dataclass

from halfbyte.errors import FormatError

ELF_MAGIC = b"\x7fELF"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_FORMAT_WITH_SIZE = 4
_FRAME_SIZE, _REGISTER_COUNT = 0x11, 0x2F  # EIATTR numbers
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_TEXT = ".text."


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """One kernel of a cubin.

    Attributes:
        name: the entry's name.
        num_registers: per thread.
        frame_bytes: of the stack in local memory, per thread; spilled registers lie there.
        shared_bytes: static shared memory, the part that the system reserves included.
    """

    name: str
    num_registers: int
    frame_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class _ElfSection:
    name: str
    kind: int
    data: bytes
    size: int
    link: int


def read_cubin(image: bytes) -> tuple[CubinKernel, ...]:
    """Return the kernels of a cubin; FormatError for bytes that are none."""
    if not image.startswith(ELF_MAGIC):
        raise FormatError(f"a cubin starts with 7f454c46 (ELF); {image[:4].hex()} came")
    try:
        sections = _read_sections(image)
        symbols = _read_symbols(sections)
        registers, frames = _read_attributes(sections)
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"the cubin of {len(image)} bytes is cut or damaged: {error}") from None
    sizes = {section.name: section.size for section in sections}
    return tuple(
        CubinKernel(
            name=name,
            num_registers=registers.get(number, 0),
            frame_bytes=frames.get(number, 0),
            shared_bytes=sizes.get(f".nv.shared.{name}", 0),
        )
        for number, name in symbols.items()
        if _TEXT + name in sizes and number in registers
    )


def _read_sections(image: bytes) -> tuple[_ElfSection, ...]:
    table = struct.unpack_from("<Q", image, 40)[0]
    size, count, names = struct.unpack_from("<HHH", image, 58)
    headers = [_SECTION.unpack_from(image, table + size * number) for number in range(count)]
    names_at = headers[names][4]

    def read_name(offset: int) -> str:
        start = names_at + offset
        return image[start : image.index(b"\0", start)].decode(errors="replace")

    return tuple(
        _ElfSection(read_name(name), kind, image[offset : offset + nbytes], nbytes, link)
        for name, kind, _, _, offset, nbytes, link, *_ in headers
    )


def _read_symbols(sections: tuple[_ElfSection, ...]) -> dict[int, str]:
    """Return the names of symbols by their number in the table."""
    table = next(section for section in sections if section.kind == _SYMBOL_TABLE)
    strings = sections[table.link].data
    names = {}
    for number in range(len(table.data) // _SYMBOL.size):
        start = _SYMBOL.unpack_from(table.data, number * _SYMBOL.size)[0]
        names[number] = strings[start : strings.index(b"\0", start)].decode(errors="replace")
    return names


def _read_attributes(sections: tuple[_ElfSection, ...]) -> tuple[dict[int, int], dict[int, int]]:
    """Return registers and frame bytes by symbol number."""
    found: dict[int, dict[int, int]] = {_REGISTER_COUNT: {}, _FRAME_SIZE: {}}
    data = next((section.data for section in sections if section.name == ".nv.info"), b"")
    offset = 0
    while offset + 4 <= len(data):
        form, attribute, nbytes = struct.unpack_from("<BBH", data, offset)
        if form == _FORMAT_WITH_SIZE:
            if attribute in found and nbytes == 8:
                symbol, value = struct.unpack_from("<II", data, offset + 4)
                found[attribute][symbol] = value
            offset += nbytes
        offset += 4
    return found[_REGISTER_COUNT], found[_FRAME_SIZE]
