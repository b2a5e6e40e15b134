"""Tensor maps for tensor copies, encoded without a GPU.

`encode_tensor_map` returns the 128 bytes that a kernel takes as a parameter: what the CUDA driver's
`cuTensorMapEncodeTiled` and `cuTensorMapEncodeIm2col` make. Dimension 0 is the innermost one, as
there. The bit layout is that of `machine/tensor_map.h`.
"""

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from halfbyte.errors import TensorMapError
from halfbyte.virtual.plain_values import read_integer, read_integers, show

__all__ = ["Im2colBox", "TensorBox", "TensorLayout", "encode_tensor_map"]

Key = TypeVar("Key")
Value = TypeVar("Value")

TENSOR_MAP_BYTES = 128
MAX_RANK = 5


@dataclass(frozen=True, slots=True)
class _ElementType:
    code: int
    bits: int  # in global memory
    is_tf32: bool = False
    is_padded: bool = False  # 16 elements fill 16 bytes of shared memory


# Element types by the PTX ISA's names; codes are those of the encoded field.
ELEMENT_TYPES = {
    "u8": _ElementType(0, 8),
    "u16": _ElementType(1, 16),
    "u32": _ElementType(2, 32),
    "s32": _ElementType(3, 32),
    "u64": _ElementType(4, 64),
    "s64": _ElementType(5, 64),
    "f16": _ElementType(6, 16),
    "f32": _ElementType(7, 32),
    "f32.ftz": _ElementType(8, 32),
    "f64": _ElementType(9, 64),
    "bf16": _ElementType(10, 16),
    "tf32": _ElementType(7, 32, is_tf32=True),
    "tf32.ftz": _ElementType(8, 32, is_tf32=True),
    "b4x16": _ElementType(11, 4),
    "b4x16_p64": _ElementType(12, 4, is_padded=True),
    "b6x16_p32": _ElementType(13, 6, is_padded=True),
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3, 96: 0}
SWIZZLE_ATOMS = {"16": 0, "32": 1, "32_flip_8": 2, "64": 3}
INTERLEAVES = {0: 0, 16: 1, 32: 2}
FILLS = {"zero": 0, "nan": 1}
_CORNER_BITS = {3: 16, 4: 8, 5: 5}  # of one im2col corner, by rank


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor in global memory.

    Attributes:
        dtype: a key of `ELEMENT_TYPES`.
        shape: elements of each dimension, innermost first, one to five of them.
        strides: bytes from one index to the next, of dimension 1 and up; packed rows when None.
    """

    dtype: str
    shape: Sequence[int]
    strides: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Im2colBox:
    """What im2col mode adds: corners of the bounding box in W, H, D order, size of a column."""

    lower: Sequence[int]
    upper: Sequence[int]
    channels: int
    pixels: int


@dataclass(frozen=True, slots=True)
class TensorBox:
    """What one copy takes, and how it lies in shared memory.

    Attributes:
        shape: elements of the box in each dimension; unused with `im2col`.
        element_strides: distance between elements taken, in each dimension; ones when None.
        swizzle: bytes of the swizzle's span: 0, 32, 64, 96 or 128.
        atom: bytes that a swizzle of 128 keeps together: "16", "32", "32_flip_8" or "64".
        interleave: bytes of a channel slice: 0, 16 or 32.
        fill: "zero" or "nan", outside the tensor.
        im2col: given for im2col mode.
    """

    shape: Sequence[int] = field(default_factory=tuple)
    element_strides: Sequence[int] | None = None
    swizzle: int = 0
    atom: str = "16"
    interleave: int = 0
    fill: str = "zero"
    im2col: Im2colBox | None = None


def encode_tensor_map(address: int, layout: TensorLayout, box: TensorBox) -> bytes:
    """Return the 128 bytes of the tensor map of the tensor at `address`.

    Raises TensorMapError naming the field, its value and the rule it breaks (CUDA Driver API,
    "Tensor Map Object Management"; PTX ISA, "Restriction on Tensor Copy instructions").
    """
    address, layout, box = _read_fields(address, layout, box)
    element = _find(ELEMENT_TYPES, layout.dtype, "dtype")
    rank = len(layout.shape)
    if not 1 <= rank <= MAX_RANK:
        raise TensorMapError(f"shape has {rank} dimensions; a tensor map has 1 to {MAX_RANK}")
    extents = _find_box_extents(box, rank)
    element_strides = tuple(box.element_strides or (1,) * rank)
    strides = _find_strides(layout, element)
    _check_address(address, strides, box, element)
    _check_extents(layout, extents, element_strides)
    _check_layout(rank, box, element_strides)
    row_step = 1 if box.interleave else element_strides[0]  # interleaved rows count slices
    _check_row(layout, box, element, -(-extents[0] // row_step))
    words = _encode_words(address, layout.shape, strides, extents, element_strides)
    words[1] |= _encode_flags(rank, layout, box, element, strides)
    if box.im2col is not None:
        words[7] |= _encode_im2col(rank, box.im2col)
    return struct.pack("<8Q", *words) + bytes(TENSOR_MAP_BYTES - 64)


def _read_fields(
    address: int, layout: TensorLayout, box: TensorBox
) -> tuple[int, TensorLayout, TensorBox]:
    """Return the arguments with plain integers; TensorMapError for what is no number."""
    for value, kind in ((layout, TensorLayout), (box, TensorBox)):
        if not isinstance(value, kind):
            raise TensorMapError(f"{show(value)} where a {kind.__name__} is wanted")
    column = box.im2col
    if column is not None:
        if not isinstance(column, Im2colBox):
            raise TensorMapError(f"im2col is {show(column)}; an Im2colBox or None is wanted")
        column = Im2colBox(
            _read_numbers(column.lower, "the lower corner"),
            _read_numbers(column.upper, "the upper corner"),
            read_integer(column.channels, "channels", TensorMapError),
            read_integer(column.pixels, "pixels", TensorMapError),
        )
    steps = box.element_strides
    return (
        read_integer(address, "the address", TensorMapError),
        replace(
            layout,
            shape=_read_numbers(layout.shape, "the shape"),
            strides=None if layout.strides is None else _read_numbers(layout.strides, "strides"),
        ),
        replace(
            box,
            shape=_read_numbers(box.shape, "the box"),
            element_strides=None if steps is None else _read_numbers(steps, "element strides"),
            im2col=column,
        ),
    )


def _read_numbers(values: Sequence[int], what: str) -> tuple[int, ...]:
    return read_integers(values, what, TensorMapError)


def _find(table: dict[Key, Value], key: Key, name: str) -> Value:
    if not isinstance(key, Hashable) or key not in table:
        known = ", ".join(map(repr, table))
        raise TensorMapError(f"{name} is {key!r}; one of {known} is wanted")
    return table[key]


def _find_box_extents(box: TensorBox, rank: int) -> tuple[int, ...]:
    """Return the box's extents; in im2col mode only the channels count."""
    if box.im2col is not None:
        return (box.im2col.channels, *(1,) * (rank - 1))
    if len(box.shape) != rank:
        raise TensorMapError(f"the box has {len(box.shape)} dimensions, the tensor {rank}")
    return tuple(box.shape)


def _find_strides(layout: TensorLayout, element: _ElementType) -> tuple[int, ...]:
    rank = len(layout.shape)
    if layout.strides is not None:
        if len(layout.strides) != rank - 1:
            raise TensorMapError(
                f"{len(layout.strides)} strides for rank {rank}; {rank - 1} are wanted: those of "
                "dimension 1 and up"
            )
        return tuple(layout.strides)
    strides = []
    size = layout.shape[0] * element.bits // 8
    for extent in layout.shape[1:]:
        strides.append(size)
        size *= extent
    return tuple(strides)


def _check_address(
    address: int, strides: tuple[int, ...], box: TensorBox, element: _ElementType
) -> None:
    alignment = 32 if box.interleave == 32 or element.is_padded else 16
    if address % alignment or not 0 <= address < 2**64:
        raise TensorMapError(f"address 0x{address:x} is not a multiple of {alignment}")
    for dimension, stride in enumerate(strides, 1):
        if stride % alignment or not 0 <= stride < 2**40:
            raise TensorMapError(
                f"stride {stride} of dimension {dimension}; a multiple of {alignment} below 2^40 "
                "bytes is wanted"
            )


def _check_extents(
    layout: TensorLayout, extents: tuple[int, ...], element_strides: tuple[int, ...]
) -> None:
    if len(element_strides) != len(layout.shape):
        raise TensorMapError(f"{len(element_strides)} element strides for rank {len(layout.shape)}")
    for dimension, (size, extent, stride) in enumerate(
        zip(layout.shape, extents, element_strides, strict=True)
    ):
        if not 1 <= size <= 2**32:
            raise TensorMapError(f"extent {size} of dimension {dimension}; 1 to 2^32 is wanted")
        if not 1 <= extent <= 256:
            raise TensorMapError(f"box extent {extent} of dimension {dimension}; 1 to 256")
        if not 1 <= stride <= 8:
            raise TensorMapError(f"element stride {stride} of dimension {dimension}; 1 to 8")


def _check_layout(rank: int, box: TensorBox, element_strides: tuple[int, ...]) -> None:
    _find(SWIZZLES, box.swizzle, "swizzle")
    _find(INTERLEAVES, box.interleave, "interleave")
    _find(FILLS, box.fill, "fill")
    if _find(SWIZZLE_ATOMS, box.atom, "atom") and box.swizzle != 128:
        raise TensorMapError(f"atom {box.atom!r} with swizzle {box.swizzle}; it wants swizzle 128")
    if box.interleave and rank < 3:
        raise TensorMapError(f"interleave {box.interleave} with rank {rank}; rank 3 to 5 is wanted")
    if box.interleave == 32 and box.swizzle not in (0, 32):
        raise TensorMapError(f"interleave 32 with swizzle {box.swizzle}; swizzle 32 is wanted")
    if box.im2col is not None and rank not in _CORNER_BITS:
        raise TensorMapError(f"im2col with rank {rank}; rank 3 to 5 is wanted")
    if not box.interleave and element_strides[0] != 1:
        raise TensorMapError(
            f"element stride {element_strides[0]} of dimension 0; without interleave it must be 1"
        )


def _check_row(layout: TensorLayout, box: TensorBox, element: _ElementType, elements: int) -> None:
    """Check the innermost row of the box, of `elements` elements."""
    size = elements if element.is_padded else elements * element.bits // 8
    if element.is_padded and (elements != 128 or layout.shape[0] % 128):
        raise TensorMapError(
            f"{elements} elements of {layout.shape[0]} in dimension 0; {layout.dtype} wants a box "
            "of 128 and a tensor of a multiple of 128"
        )
    if size % 16:
        raise TensorMapError(f"inner box rows of {size} bytes; a multiple of 16 is wanted")
    if box.swizzle and size > box.swizzle and not box.interleave:
        raise TensorMapError(
            f"inner box rows of {size} bytes; swizzle {box.swizzle} allows at most {box.swizzle}"
        )
    if box.fill == "nan" and layout.dtype[0] not in "tf" and layout.dtype != "bf16":
        raise TensorMapError(f"fill 'nan' with dtype {layout.dtype}; it wants a floating type")


def _encode_flags(
    rank: int,
    layout: TensorLayout,
    box: TensorBox,
    element: _ElementType,
    strides: tuple[int, ...],
) -> int:
    """Return bits 64 to 95 of the map."""
    row = layout.shape[0] * element.bits // 8
    size = max((s * n for s, n in zip(strides, layout.shape[1:], strict=True)), default=row)
    return (
        int(box.im2col is not None)
        | 1 << 1
        | (rank - 1) << 4
        | element.code << 7
        | INTERLEAVES[box.interleave] << 11
        | SWIZZLES[box.swizzle] << 13
        | FILLS[box.fill] << 15
        | int(element.is_tf32) << 16
        | SWIZZLE_ATOMS[box.atom] << 19
        | int(size >= 128 * 1024) << 21
        | int(box.swizzle == 96) << 22
    )


def _encode_words(
    address: int,
    shape: Sequence[int],
    strides: tuple[int, ...],
    extents: tuple[int, ...],
    element_strides: tuple[int, ...],
) -> list[int]:
    """Return the eight 64-bit words without flags and im2col fields."""
    bits = address
    for i, stride in enumerate(strides):
        bits |= (stride // 16 & 0xFFFFFFFF) << (96 + 32 * i)
        bits |= (stride // 16 >> 32) << (224 + 4 * i)
    for i, size in enumerate(shape):
        bits |= (size - 1) << (256 + 32 * i)
    for i, stride in enumerate(element_strides):
        bits |= (stride - 1) << (416 + 3 * i)
    for i, extent in enumerate(extents):
        bits |= (extent - 1) << (440 + 8 * i)
    return [bits >> (64 * i) & (2**64 - 1) for i in range(8)]


def _encode_im2col(rank: int, box: Im2colBox) -> int:
    """Return the last word's corners and pixel count."""
    width = _CORNER_BITS[rank]
    if not 1 <= box.pixels <= 1024:
        raise TensorMapError(f"{box.pixels} pixels per column; 1 to 1024 is wanted")
    word = (box.pixels - 1) << 32
    for shift, name, corner in ((0, "lower", box.lower), (16, "upper", box.upper)):
        if len(corner) != rank - 2:
            raise TensorMapError(f"{len(corner)} numbers in the {name} corner; {rank - 2}: W, H, D")
        for i, value in enumerate(corner):
            limit = 1 << (width - 1)
            if not -limit <= value < limit:
                raise TensorMapError(
                    f"{name} corner {value}; {-limit} to {limit - 1} for this rank"
                )
            word |= (value & ((1 << width) - 1)) << (shift + width * i)
    return word
