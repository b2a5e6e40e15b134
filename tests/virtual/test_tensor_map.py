"""Tensor maps encoded in Python: bits seen in CuTe DSL's maps, and every rule's message."""

import struct

import pytest

from halfbyte.errors import TensorMapError
from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map

L2_PROMOTION = 3 << 17  # bits of word 1 that CuTe DSL sets and nothing here reads

# Words 1 to 7 that CuTe DSL 4.8.1 encodes for these tensors (host code of a compiled program).
OBSERVED = [
    (
        TensorLayout("u8", (1024, 256)),
        TensorBox((128, 64), swizzle=128),
        (0x4000246012, 0, 0, 0xFF000003FF, 0, 0x7F00000000000000, 0x3F),
    ),
    (
        TensorLayout("u8", (128, 8)),
        TensorBox((128, 8), swizzle=128),
        (0x800046012, 0, 0, 0x70000007F, 0, 0x7F00000000000000, 0x7),
    ),
    (
        TensorLayout("b4x16_p64", (1024, 256)),
        TensorBox((128, 64), swizzle=128),
        (0x2000246612, 0, 0, 0xFF000003FF, 0, 0x7F00000000000000, 0x3F),
    ),
    (
        TensorLayout("b6x16_p32", (1024, 256)),
        TensorBox((128, 64), swizzle=128),
        (0x3000246692, 0, 0, 0xFF000003FF, 0, 0x7F00000000000000, 0x3F),
    ),
    (
        TensorLayout("tf32", (1024, 256)),
        TensorBox((32, 64), swizzle=128),
        (0x10000256392, 0, 0, 0xFF000003FF, 0, 0x1F00000000000000, 0x3F),
    ),
    (
        TensorLayout("u8", (1024, 256)),
        TensorBox((128, 64), swizzle=128, atom="32"),
        (0x40002C6012, 0, 0, 0xFF000003FF, 0, 0x7F00000000000000, 0x3F),
    ),
    (
        TensorLayout("u8", (1024, 256), (1 << 37,)),
        TensorBox((128, 64), swizzle=128),
        (0x246012, 0, 0x200000000, 0xFF000003FF, 0, 0x7F00000000000000, 0x3F),
    ),
    (
        TensorLayout("f16", (64, 9, 14, 6, 4)),
        TensorBox(
            element_strides=(1, 1, 2, 3, 1),
            swizzle=64,
            im2col=Im2colBox((-1, -2, -3), (-4, -5, -6), 32, 64),
        ),
        (
            0x800244343,
            0x3F000000048,
            0x17A0,
            0x80000003F,
            0x50000000D,
            0x1F00044000000003,
            0x3F6B7C77DF,
        ),
    ),
]


@pytest.mark.parametrize(("layout", "box", "words"), OBSERVED)
def test_words_equal_those_of_cute_dsl(layout, box, words):
    encoded = struct.unpack("<16Q", encode_tensor_map(0x10000, layout, box))
    assert encoded[0] == 0x10000
    assert encoded[1] == words[0] & ~L2_PROMOTION
    assert encoded[2:8] == words[1:]
    assert encoded[8:] == (0,) * 8


PLAIN = TensorLayout("f16", (64, 8))


@pytest.mark.parametrize(
    ("address", "layout", "box", "words"),
    [
        (8, PLAIN, TensorBox((8, 8)), "address 0x8 is not a multiple of 16"),
        (0, TensorLayout("f16", ()), TensorBox(()), "0 dimensions"),
        (0, TensorLayout("f15", (8,)), TensorBox((8,)), "dtype is 'f15'"),
        (0, TensorLayout("f16", (64, 8), (24,)), TensorBox((8, 8)), "stride 24 of dimension 1"),
        (0, TensorLayout("f16", (64, 8), ()), TensorBox((8, 8)), "0 strides for rank 2"),
        (0, PLAIN, TensorBox((8,)), "the box has 1 dimensions, the tensor 2"),
        (0, PLAIN, TensorBox((8, 257)), "box extent 257 of dimension 1"),
        (0, PLAIN, TensorBox((4, 8)), "inner box rows of 8 bytes"),
        (0, PLAIN, TensorBox((64, 8), swizzle=64), "swizzle 64 allows at most 64"),
        (0, PLAIN, TensorBox((8, 8), swizzle=48), "swizzle is 48"),
        (0, PLAIN, TensorBox((8, 8), swizzle=64, atom="32"), "it wants swizzle 128"),
        (0, PLAIN, TensorBox((8, 8), interleave=16), "rank 3 to 5"),
        (0, PLAIN, TensorBox((8, 8), element_strides=(2, 1)), "without interleave it must be 1"),
        (0, PLAIN, TensorBox((8, 8), element_strides=(1, 9)), "element stride 9"),
        (
            0,
            TensorLayout("u8", (64, 8)),
            TensorBox((16, 8), fill="nan"),
            "it wants a floating type",
        ),
        (0, TensorLayout("b4x16_p64", (256, 8)), TensorBox((64, 8)), "box of 128"),
        (0, PLAIN, TensorBox(im2col=Im2colBox((), (), 8, 8)), "im2col with rank 2"),
        (
            0,
            TensorLayout("f16", (64, 8, 8, 8)),
            TensorBox(im2col=Im2colBox((0, -200), (0, 0), 8, 8)),
            "lower corner -200",
        ),
    ],
)
def test_what_no_gpu_accepts_is_refused_with_the_rule(address, layout, box, words):
    with pytest.raises(TensorMapError, match=words.replace("(", r"\(")):
        encode_tensor_map(address, layout, box)
