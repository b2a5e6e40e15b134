"""tensormap.replace field by field, and the copy to global memory with its fence."""

import numpy as np
import pytest

from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import KernelFault
from halfbyte.virtual.tensor_map import TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.run_ptx import launch

HEAD = """
.reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<2>; .shared .align 128 .b8 map[128];
mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; ld.param.u64 %d0, [p0]; mov.u32 %r1, map;
"""
LAYOUT = TensorLayout("f16", (256, 64, 8), (512, 32768))
BOX = TensorBox((64, 16, 2), swizzle=128)


def make_map(address=0x10000, layout=LAYOUT, box=BOX):
    data = make_aligned_bytes(128)
    data[:] = np.frombuffer(encode_tensor_map(address, layout, box), np.uint8)
    return data


@pytest.mark.parametrize(
    ("field", "operands", "expected"),
    [
        ("global_address.global.b1024.b64", "0x7f0000000100", {"address": 0x7F0000000100}),
        ("global_dim.global.b1024.b32", "1, 99", {"shape": (256, 99, 8)}),
        ("global_stride.global.b1024.b64", "1, 0x1000000010", {"strides": (512, 0x1000000010)}),
        ("box_dim.global.b1024.b32", "2, 8", {"box": (64, 16, 8)}),
        ("element_stride.global.b1024.b32", "1, 3", {"element_strides": (1, 3, 1)}),
        ("elemtype.global.b1024.b32", "10", {"dtype": "bf16"}),
        ("swizzle_mode.global.b1024.b32", "0", {"swizzle": 0}),
        ("swizzle_atomicity.global.b1024.b32", "1", {"atom": "32"}),
        ("interleave_layout.global.b1024.b32", "1", {"interleave": 16}),
        ("fill_mode.global.b1024.b32", "1", {"fill": "nan"}),
    ],
)
def test_a_replaced_field_equals_the_map_encoded_with_it(field, operands, expected):
    actual = make_map()
    launch(HEAD + f"@%p0 tensormap.replace.tile.{field} [%d0], {operands};", [actual])
    layout = TensorLayout(
        expected.get("dtype", LAYOUT.dtype),
        expected.get("shape", LAYOUT.shape),
        expected.get("strides", LAYOUT.strides),
    )
    names = ("swizzle", "atom", "interleave", "fill", "element_strides")
    box = TensorBox(
        expected.get("box", BOX.shape),
        **{name: expected.get(name, getattr(BOX, name)) for name in names},
    )
    wanted = make_map(expected.get("address", 0x10000), layout, box)
    wanted[10] = actual[10] & 0x20 | wanted[10] & 0xDF  # the size bit stays as it was
    assert (actual == wanted).all()


def test_a_rank_is_replaced_by_one_less():
    actual = make_map()
    launch(HEAD + "@%p0 tensormap.replace.tile.rank.global.b1024.b32 [%d0], 1;", [actual])
    assert actual[8] >> 4 & 7 == 1


def test_a_map_made_in_shared_memory_is_published_to_global_memory():
    start, target = make_map(), make_aligned_bytes(128)
    launch(
        HEAD + """
        ld.param.u64 %d1, [p1]; mul.wide.u32 %d2, %r0, 4; add.u64 %d3, %d0, %d2;
        ld.global.u32 %r2, [%d3]; mad.lo.u32 %r3, %r0, 4, %r1; st.shared.u32 [%r3], %r2;
        bar.warp.sync 0xffffffff; mov.u64 %d4, 0x20000;
        @%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %d4;
        bar.warp.sync 0xffffffff;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"""
        " [%d1], [%r1], 128;",
        [start, target],
    )
    assert (target == make_map(0x20000)).all()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("global_stride.global.b1024.b64 [%d0], 0, 24", "bad-tensor-map", "multiple of 16"),
        ("box_dim.global.b1024.b32 [%d0], 0, 257", "bad-tensor-map", "257"),
        ("global_dim.global.b1024.b32 [%d0], 5, 2", "bad-tensor-map", "ordinal 5"),
        ("rank.global.b1024.b32 [%d0+16], 1", "misaligned", "64 bytes"),
    ],
)
def test_what_no_map_can_hold_is_a_fault(body, kind, words):
    with pytest.raises(KernelFault) as caught:
        launch(HEAD + f"@%p0 tensormap.replace.tile.{body};", [make_map()])
    assert caught.value.report.fault.kind == kind
    assert words in caught.value.report.fault.message
