"""The bytes of a module's global and constant variables, initialisers included."""

import struct
from collections.abc import Mapping

from halfbyte.errors import PtxError
from halfbyte.ptx.syntax import (
    Immediate,
    Initializer,
    InitializerList,
    SymbolOffset,
    Text,
    Variable,
)


def make_initial_bytes(variable: Variable, addresses: Mapping[str, int]) -> bytes:
    """Return the bytes that `variable` starts with; what has no initialiser is zero (PTX ISA).

    Args:
        variable: of the space `global` or `const`.
        addresses: where the module's other variables lie, for initialisers that name them.

    Raises PtxError for an initialiser that does not fit its variable.
    """
    size = variable.size_bytes
    if variable.initializer is None:
        return bytes(size)
    element = variable.element_bytes // variable.vector
    data = b"".join(
        _encode_item(item, element, variable, addresses) for item in _flatten(variable.initializer)
    )
    if len(data) > size:
        raise PtxError(
            f"line {variable.line}: {variable.name} has {size} bytes, its initialiser {len(data)}",
            variable.line,
        )
    return data.ljust(size, b"\0")


def _flatten(item: Initializer) -> list[Immediate | SymbolOffset | Text]:
    if isinstance(item, InitializerList):
        return [leaf for child in item.items for leaf in _flatten(child)]
    return [item]


def _encode_item(
    item: Immediate | SymbolOffset | Text,
    element: int,
    variable: Variable,
    addresses: Mapping[str, int],
) -> bytes:
    match item:
        case Text(value):
            return value.encode("latin-1") + b"\0"
        case SymbolOffset(name, offset, _, mask):
            if name not in addresses:
                raise PtxError(
                    f"line {variable.line}: initialiser of {variable.name} names {name!r}, "
                    "which is no variable of this module",
                    variable.line,
                )
            address = addresses[name] + offset
            if mask is not None:
                shift = (mask & -mask).bit_length() - 1
                address = (address & mask) >> shift
            return (address % (1 << 8 * element)).to_bytes(element, "little")
        case Immediate(bits=bits, float_bits=64) if element == 4:
            return struct.pack("<f", struct.unpack("<d", bits.to_bytes(8, "little"))[0])
        case Immediate(bits=bits):
            return (bits % (1 << 8 * element)).to_bytes(element, "little")
