"""cuTensorMapEncodeTiled: the driver's numbers to `halfbyte.virtual.tensor_map`.

The tables follow the public enumerations CUtensorMapDataType, -Swizzle and -Interleave (CUDA 13).
"""

import ctypes
from collections.abc import Sequence

from halfbyte.virtual.tensor_map import TensorBox, TensorLayout, encode_tensor_map

_TYPES = (
    *("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"),
    *("f32.ftz", "tf32", "tf32.ftz", "b4x16", "b4x16_p64", "b6x16_p32"),
)
# (bytes of the span, atom)
_SWIZZLES = (
    *((0, "16"), (32, "16"), (64, "16"), (128, "16")),
    *((128, "32"), (128, "32_flip_8"), (128, "64")),
)
_INTERLEAVES = (0, 16, 32)
_FILLS = ("zero", "nan")


def _read(
    kind: type[ctypes.c_uint32] | type[ctypes.c_uint64], address: int, count: int
) -> list[int]:
    return list((kind * count).from_address(address)) if count else []


def _number(word: int) -> int:
    return word & 0xFFFFFFFF


def encode_tiled(words: Sequence[int]) -> None:
    """Write the tensor map that the arguments of cuTensorMapEncodeTiled describe.

    Raises:
        TensorMapError: they break a rule; the driver answers CUDA_ERROR_INVALID_VALUE.
    """
    target, kind, rank, address, sizes, strides, extents, steps = words[:8]
    interleave, swizzle, _, fill = (_number(word) for word in words[8:12])
    rank = _number(rank)
    span, atom = _SWIZZLES[swizzle]
    layout = TensorLayout(
        dtype=_TYPES[_number(kind)],
        shape=_read(ctypes.c_uint64, sizes, rank),
        strides=_read(ctypes.c_uint64, strides, rank - 1),
    )
    box = TensorBox(
        shape=_read(ctypes.c_uint32, extents, rank),
        element_strides=_read(ctypes.c_uint32, steps, rank),
        swizzle=span,
        atom=atom,
        interleave=_INTERLEAVES[interleave],
        fill=_FILLS[fill],
    )
    encoded = encode_tensor_map(address, layout, box)
    ctypes.memmove(target, encoded, len(encoded))
