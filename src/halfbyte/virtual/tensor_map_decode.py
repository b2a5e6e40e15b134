"""Tensor maps read back: the fields of the 128 bytes that a kernel takes as a parameter.

The inverse of `tensor_map.encode_tensor_map`, by the bits that `machine/tensor_map.h` lists.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

from halfbyte.errors import TensorMapError
from halfbyte.virtual.tensor_map import (
    ELEMENT_TYPES,
    FILLS,
    INTERLEAVES,
    MAX_RANK,
    SWIZZLE_ATOMS,
    SWIZZLES,
    TENSOR_MAP_BYTES,
    TensorBox,
    TensorLayout,
)

__all__ = ["TensorMap", "decode_tensor_map"]

Key = TypeVar("Key")

_USED_BYTES = 64  # the rest is not read by a GPU and may hold anything
_IS_SET = 1 << 1  # of the second word; set in every tensor map seen


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map of tile mode.

    Attributes:
        address: of the tensor in global memory.
        layout: element type, extents and strides of the tensor.
        box: what one copy takes.
    """

    address: int
    layout: TensorLayout
    box: TensorBox

    @property
    def element_bits(self) -> int:
        """Bits of one element in global memory."""
        return ELEMENT_TYPES[self.layout.dtype].bits

    @property
    def row_bytes(self) -> int:
        """Bytes that the innermost row of the box takes in shared memory."""
        element = ELEMENT_TYPES[self.layout.dtype]
        elements = self.box.shape[0]
        return elements if element.is_padded else elements * element.bits // 8

    @property
    def box_bytes(self) -> int:
        """Bytes of one copy, what the mbarrier counts: those outside the tensor included."""
        return self.row_bytes * math.prod(self.box.shape[1:])

    def __str__(self) -> str:
        """Return one line: element type, extents, box, swizzle."""
        extents = "x".join(map(str, self.layout.shape))
        box = "x".join(map(str, self.box.shape))
        return (
            f"{self.layout.dtype} [{extents}], box [{box}] = {self.box_bytes} bytes, "
            f"swizzle {self.box.swizzle or 'none'}"
        )


def decode_tensor_map(encoded: bytes) -> TensorMap:
    """Return the fields of a tensor map of tile mode.

    Raises TensorMapError for bytes that are none: too few, an element type that does not exist,
    im2col mode.
    """
    if len(encoded) < _USED_BYTES:
        raise TensorMapError(
            f"{len(encoded)} bytes are no tensor map; {TENSOR_MAP_BYTES} are wanted"
        )
    bits = int.from_bytes(encoded[:_USED_BYTES], "little")
    flags = bits >> 64 & 0xFFFFFFFF
    if flags & 1:
        raise TensorMapError("a tensor map of im2col mode; tile mode is wanted")
    rank = (flags >> 4 & 7) + 1
    if not flags & _IS_SET or rank > MAX_RANK:
        raise TensorMapError(f"word 0x{flags:08x} behind the address is not that of a tensor map")
    strides = tuple(
        ((bits >> 96 + 32 * i & 0xFFFFFFFF) | (bits >> 224 + 4 * i & 0xF) << 32) * 16
        for i in range(rank - 1)
    )
    layout = TensorLayout(
        dtype=_find_element(flags >> 7 & 0xF, bool(flags >> 16 & 1)),
        shape=tuple((bits >> 256 + 32 * i & 0xFFFFFFFF) + 1 for i in range(rank)),
        strides=strides,
    )
    box = TensorBox(
        shape=tuple((bits >> 440 + 8 * i & 0xFF) + 1 for i in range(rank)),
        element_strides=tuple((bits >> 416 + 3 * i & 7) + 1 for i in range(rank)),
        swizzle=96 if flags >> 22 & 1 else _find_key(SWIZZLES, flags >> 13 & 3),
        atom=_find_key(SWIZZLE_ATOMS, flags >> 19 & 3),
        interleave=_find_key(INTERLEAVES, flags >> 11 & 3),
        fill=_find_key(FILLS, flags >> 15 & 1),
    )
    return TensorMap(bits & (1 << 64) - 1, layout, box)


def _find_element(code: int, is_tf32: bool) -> str:
    for name, element in ELEMENT_TYPES.items():
        if element.code == code and element.is_tf32 == is_tf32:
            return name
    raise TensorMapError(f"element type {code} of a tensor map does not exist")


def _find_key(table: dict[Key, int], code: int) -> Key:
    for key, value in table.items():
        if value == code:
            return key
    raise TensorMapError(f"field value {code} of a tensor map does not exist; {list(table)} do")
