"""Tensor stores and reductions against NumPy; reuse of their buffers."""

import numpy as np
import pytest

from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.exec.tensor_programs import (
    DRAIN,
    DTYPES,
    LOAD,
    RNG,
    WAIT,
    encode,
    make_tensor,
    put_box,
    run_store,
)
from tests.virtual.exec.tensor_reference import swizzle_bytes, walk_im2col


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("corner", [(0, 0), (48, 5)])
def test_stores_write_what_lies_inside(swizzle, corner):
    row = swizzle or 64
    tensor = make_tensor(np.uint8, 9, 80)
    values = RNG.integers(0, 256, (8, row), dtype=np.uint8)
    expected = put_box(tensor, corner, None, values)
    report = run_store(
        tensor,
        encode(tensor, TensorBox((row, 8), swizzle=swizzle)),
        corner,
        swizzle_bytes(values.reshape(-1), swizzle),
        opcode="cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
    )
    assert (tensor == expected).all()
    assert report.findings == ()


def test_scatter_writes_four_rows_anywhere():
    tensor = make_tensor(np.float16, 30, 128)
    values = make_tensor(np.float16, 4, 64)
    expected = tensor.copy()
    for row, data in zip((3, 29, 0, 11), values, strict=True):
        expected[row, 64:] = data
    run_store(
        tensor,
        encode(tensor, TensorBox((64, 1), swizzle=128)),
        (64, 3, 29, 0, 11),
        swizzle_bytes(values.view(np.uint8).reshape(-1), 128),
        opcode="cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group",
    )
    assert (tensor.view(np.uint16) == expected.view(np.uint16)).all()


def test_im2col_stores_walk_the_pixels():
    tensor = make_tensor(np.float16, 2, 4, 5, 16)
    values = make_tensor(np.float16, 23, 16)
    expected = tensor.copy()
    walk = walk_im2col((5, 4, 2), (3, 1, 0), (0, 0), (0, 0), (1, 1), 23)
    for (column, row, image), data in zip(walk, values, strict=True):
        expected[image, row, column] = data
    run_store(
        tensor,
        encode(tensor, TensorBox(im2col=Im2colBox((0, 0), (0, 0), 16, 23))),
        (0, 3, 1, 0),
        values.view(np.uint8).reshape(-1),
        opcode="cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group",
    )
    assert (tensor.view(np.uint16) == expected.view(np.uint16)).all()


def test_six_bit_stores_drop_the_padding_bits():
    packed = make_tensor(np.uint8, 2, 96)
    codes = RNG.integers(0, 256, (2, 128), dtype=np.uint8)
    tensor_map = encode_tensor_map(
        packed.ctypes.data, TensorLayout("b6x16_p32", (128, 2)), TensorBox((128, 2))
    )
    run_store(
        packed,
        tensor_map,
        (0, 0),
        codes.reshape(-1),
        opcode="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group",
    )
    bits = np.unpackbits((codes & 63).reshape(-1, 1), axis=1, bitorder="little")[:, :6]
    assert (packed.reshape(-1) == np.packbits(bits.reshape(-1), bitorder="little")).all()


REDUCTIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        *(("add", t) for t in ("u32", "s32", "u64", "f16", "f32", "f64")),
        *((o, t) for o in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16")),
        *((o, t) for o in ("and", "or", "xor") for t in ("u32", "u64")),
        *((o, "u32") for o in ("inc", "dec")),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_reductions_combine_element_by_element(operation, dtype):
    tensor = make_tensor(DTYPES[dtype], 4, 32)
    values = make_tensor(DTYPES[dtype], 4, 16)
    for array in (tensor, values):
        if array.dtype.kind == "f":
            array[:] = RNG.normal(size=array.shape)
        elif operation in ("inc", "dec"):
            array[:] = RNG.integers(0, 9, array.shape)
    expected = put_box(tensor, (24, 1), None, values, REDUCTIONS[operation])
    run_store(
        tensor,
        encode(tensor, TensorBox((16, 4))),
        (24, 1),
        values.reshape(-1).view(np.uint8),
        opcode=f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group",
    )
    assert (tensor == expected).all()


def test_a_store_by_all_lanes_with_equal_operands_runs_once():
    tensor = make_tensor(np.int32, 4, 32)
    values = np.ones((4, 32), np.int32)
    expected = tensor + 1
    run_store(
        tensor,
        encode(tensor, TensorBox((32, 4))),
        (0, 0),
        values.reshape(-1).view(np.uint8),
        opcode="cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group",
        guard="",
    )
    assert (tensor == expected).all()


@pytest.mark.parametrize(("wait", "kinds"), [
    ("cp.async.bulk.wait_group.read 0;", []),
    ("cp.async.bulk.wait_group 0;", []),
    ("cp.async.bulk.wait_group.read 1;", ["write-in-flight"]),
])  # fmt: skip
def test_reuse_of_a_buffer_before_the_store_has_read_it_is_reported(wait, kinds):
    tensor = make_tensor(np.uint8, 8, 128)
    report = run_store(
        tensor,
        encode(tensor, TensorBox((128, 8))),
        (0, 0),
        np.arange(1024, dtype=np.uint8),
        opcode="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group",
        after=f"cp.async.bulk.commit_group; {wait}\n@%p0 st.shared.u32 [%r1], %r0;\n{DRAIN}",
    )
    assert [finding.kind for finding in report.findings] == kinds


def test_a_load_into_a_buffer_that_is_still_read_by_a_store_is_reported():
    tensor = make_tensor(np.uint8, 8, 128)
    report = run_store(
        tensor,
        encode(tensor, TensorBox((128, 8))),
        (0, 0),
        np.arange(1024, dtype=np.uint8),
        opcode="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group",
        after="@%p0 mbarrier.arrive.expect_tx.shared.b64 %d6, [bar], 1024;\n@%p0 "
        + LOAD.format(rank=2, mode="")
        + " [%r1], [%d11, {0, 0}], [%r2];\n"
        + WAIT
        + DRAIN,
    )
    assert [finding.kind for finding in report.findings] == ["write-in-flight"]
