"""Tensor copies: boxes, fills, swizzles, modes, multicast, stores and reductions against NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import KernelFault
from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.exec.tensor_reference import (
    SWIZZLE_TABLES,
    swizzle_bytes,
    take_box,
    walk_im2col,
)
from tests.virtual.run_ptx import launch

RNG = np.random.default_rng(17)
POISON = 0xAB
SHARED_BYTES = 8192
HEAD = f"""
.reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .pred %p<4>;
.shared .align 1024 .b8 buffer[{SHARED_BYTES}]; .shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; mov.b64 %d10, p0; cvta.param.u64 %d11, %d10;
ld.param.u64 %d1, [p2]; mov.u32 %r1, buffer; mov.u32 %r2, bar;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared.b64 [bar], 1;
bar.sync 0;
"""
SAVE = f"""
mad.lo.u32 %r9, %r0, 4, %r1; mad.wide.u32 %d9, %r0, 4, %d1; mov.u32 %r8, 0;
SAVE: ld.shared.u32 %r7, [%r9]; st.global.u32 [%d9], %r7;
add.u32 %r9, %r9, 128; add.u64 %d9, %d9, 128; add.u32 %r8, %r8, 128;
setp.lt.u32 %p3, %r8, {SHARED_BYTES}; @%p3 bra SAVE;
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra W;"
LOAD = "cp.async.bulk.tensor.{rank}d.shared::cta.global{mode}.mbarrier::complete_tx::bytes"
PARAMETERS = [".align 64 .b8 p0[128]", ".u64 p1", ".u64 p2"]
DTYPES = {"u8": np.uint8, "u16": np.uint16, "f16": np.float16, "u32": np.uint32,
          "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64,
          "f64": np.float64, "bf16": np.uint16}  # fmt: skip


def make_tensor(dtype, *shape):
    """Return random bytes as a tensor, outermost dimension first, at an aligned address."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = make_aligned_bytes(count)
    data[:] = RNG.integers(0, 256, count, dtype=np.uint8)
    return data.view(dtype).reshape(shape)


def encode(tensor, box, dtype=None):
    names = {np.dtype(v): k for k, v in DTYPES.items() if k not in ("bf16",)}
    layout = TensorLayout(
        dtype or names[tensor.dtype], tensor.shape[::-1], tensor.strides[::-1][1:]
    )
    return encode_tensor_map(tensor.ctypes.data, layout, box)


def run_load(tensor, tensor_map, corner, *, mode="", nbytes, offset=0, extra="", options=None):
    """Return shared memory after one load of `nbytes` at `offset`, and the report."""
    rank = 2 if "gather" in mode else len(corner)
    opcode = LOAD.format(rank=rank, mode=mode)
    coordinates = ", ".join(map(str, corner))
    out = np.zeros(SHARED_BYTES, np.uint8)
    report = launch(
        HEAD
        + f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %d6, [bar], {nbytes};\n"
        + f"@%p0 {opcode} [%r1+{offset}], [%d11, {{{coordinates}}}], [%r2]{extra};\n"
        + WAIT
        + SAVE,
        [tensor_map, tensor, out],
        parameters=PARAMETERS,
        options=options,
    )
    assert report.findings == ()
    return out


def check_shared(out, expected, offset=0):
    """The expected bytes are there and nothing else was written."""
    end = offset + expected.size
    assert (out[offset:end] == expected).all()
    assert (out[:offset] == POISON).all()
    assert (out[end:] == POISON).all()


@pytest.mark.parametrize("dtype", ["u8", "u16", "f16", "u32", "s32", "f32", "u64", "s64", "f64"])
@pytest.mark.parametrize("corner", [(0, 0), (16, 3), (-5, -2), (40, 6), (200, 0)])
def test_a_box_is_dense_and_zero_outside_the_tensor(dtype, corner):
    tensor = make_tensor(DTYPES[dtype], 9, 48)
    box = (32, 5)
    out = run_load(tensor, encode(tensor, TensorBox(box)), corner, nbytes=160 * tensor.itemsize)
    check_shared(out, take_box(tensor, corner, box))


@pytest.mark.parametrize(
    ("shape", "box", "corner"),
    [
        ((64,), (32,), (8,)),
        ((64,), (32,), (48,)),
        ((3, 4, 16), (16, 2, 2), (0, 1, 2)),
        ((2, 3, 5, 16), (8, 3, 2, 2), (8, -1, 2, 1)),
        ((2, 2, 3, 4, 16), (16, 2, 2, 1, 2), (4, 3, -1, 1, 1)),
    ],
)
def test_boxes_of_one_to_five_dimensions(shape, box, corner):
    tensor = make_tensor(np.float32, *shape)
    nbytes = 4 * int(np.prod(box))
    out = run_load(tensor, encode(tensor, TensorBox(box)), corner, nbytes=nbytes)
    check_shared(out, take_box(tensor, corner, box))


@pytest.mark.parametrize(("swizzle", "atom"), [*SWIZZLE_TABLES, (128, "32_flip_8")])
@pytest.mark.parametrize("offset", [0, 128, 896])
def test_swizzles_permute_lines_by_their_address(swizzle, atom, offset):
    row = swizzle or 64
    tensor = make_tensor(np.uint8, 24, 2 * row)
    box = TensorBox((row, 20), swizzle=swizzle, atom=atom)
    out = run_load(tensor, encode(tensor, box), (row, 1), nbytes=20 * row, offset=offset)
    dense = take_box(tensor, (row, 1), (row, 20))
    whole = dense[: dense.size // 128 * 128]
    expected = swizzle_bytes(whole, swizzle, atom, offset)
    assert (out[offset : offset + expected.size] == expected).all()


def test_a_swizzle_wider_than_the_row_still_goes_by_address():
    tensor = make_tensor(np.uint8, 64, 64)
    box = TensorBox((32, 16), swizzle=128)
    out = run_load(tensor, encode(tensor, box), (0, 0), nbytes=512)
    check_shared(out, swizzle_bytes(take_box(tensor, (0, 0), (32, 16)), 128))


@pytest.mark.parametrize(("dtype", "pattern"), [("f16", 0x7FFF), ("f32", 0x7FFFFFFF)])
def test_fill_with_nan_outside(dtype, pattern):
    tensor = make_tensor(DTYPES[dtype], 4, 32)
    out = run_load(
        tensor,
        encode(tensor, TensorBox((16, 4), fill="nan")),
        (24, 2),
        nbytes=64 * tensor.itemsize,
    )
    bits = tensor.view(f"u{tensor.itemsize}")
    check_shared(out, take_box(bits, (24, 2), (16, 4), fill=pattern))
    assert np.isnan(out[: 64 * tensor.itemsize].view(tensor.dtype)[-1])


@pytest.mark.parametrize("corner", [(0, 0, 0), (0, -3, 1), (4, 5, 2)])
def test_element_strides_skip_elements(corner):
    tensor = make_tensor(np.float32, 6, 9, 16)
    strides = (1, 2, 3)
    box = TensorBox((8, 5, 6), element_strides=strides)
    expected = take_box(tensor, corner, (8, 5, 6), strides)
    out = run_load(tensor, encode(tensor, box), corner, nbytes=expected.size)
    assert expected.size == 8 * 3 * 2 * 4
    check_shared(out, expected)


def test_interleaved_channels_are_boxes_of_slices():
    tensor = make_tensor(np.float16, 2, 5, 6, 8)  # N C/8 H W C8 without N: [C/8, H, W, C8]
    box = TensorBox((8, 3, 2, 2), interleave=16)
    corner = (0, 4, 4, 1)
    out = run_load(tensor, encode(tensor, box), corner, nbytes=8 * 3 * 2 * 2 * 2)
    check_shared(out, take_box(tensor, corner, (8, 3, 2, 2)))


def test_gather_takes_four_rows_anywhere():
    tensor = make_tensor(np.float16, 30, 128)
    rows = (7, 0, 29, 30)
    box = TensorBox((64, 1), swizzle=128)
    out = run_load(tensor, encode(tensor, box), (32, *rows), mode=".tile::gather4", nbytes=4 * 128)
    dense = np.concatenate([take_box(tensor, (32, row), (64, 1)) for row in rows])
    check_shared(out, swizzle_bytes(dense, 128))


def unpack_groups(packed, nbytes):
    """Return 16 bytes for each `nbytes` of packed data: the rest is padding, kept as it was."""
    groups = packed.reshape(-1, nbytes)
    padded = np.full((groups.shape[0], 16), POISON, np.uint8)
    padded[:, :nbytes] = groups
    return padded.reshape(-1)


@pytest.mark.parametrize(("dtype", "group"), [("b4x16_p64", 8), ("b6x16_p32", 12)])
def test_sub_byte_types_are_padded_to_bytes_and_count_as_packed(dtype, group):
    packed = make_tensor(np.uint8, 6, 2 * group * 8)
    layout = TensorLayout(dtype, (256, 6), (packed.shape[1],))
    tensor_map = encode_tensor_map(packed.ctypes.data, layout, TensorBox((128, 4), swizzle=128))
    out = run_load(packed, tensor_map, (128, 1), nbytes=4 * group * 8)
    dense = unpack_groups(packed[1:5, group * 8 :].reshape(-1), group)
    check_shared(out, swizzle_bytes(dense, 128))


def test_packed_nibbles_are_copied_as_they_are():
    packed = make_tensor(np.uint8, 6, 64)
    layout = TensorLayout("b4x16", (128, 6))
    tensor_map = encode_tensor_map(packed.ctypes.data, layout, TensorBox((64, 3)))
    out = run_load(packed, tensor_map, (96, 4), nbytes=96)
    check_shared(out, take_box(packed, (48, 4), (32, 3)))


def test_flushing_type_loads_zero_for_subnormals():
    tensor = make_tensor(np.float32, 2, 32)
    tensor[:] = 1.0
    tensor[0, :3] = [2.0**-140, -(2.0**-130), 2.0**-126]
    out = run_load(tensor, encode(tensor, TensorBox((32, 2)), "f32.ftz"), (0, 0), nbytes=256)
    values = out[:12].view(np.float32)
    assert (values == [0, 0, 2.0**-126]).all()
    assert np.signbit(values[1])


IM2COL_CASES = [
    # spatial W(, H(, D)), lower, upper, strides, start, offsets
    ((9,), (-1,), (-1,), (1,), (4,), (1,)),
    ((9, 6), (-1, -1), (-1, -1), (1, 1), (4, 3), (0, 2)),
    ((9, 6), (0, 0), (-2, -2), (1, 1), (0, 0), (2, 1)),
    ((9, 7), (-1, -1), (-1, -1), (2, 2), (-1, 1), (1, 0)),
    ((5, 4, 3), (-1, 0, -1), (-1, 0, -1), (1, 2, 1), (3, 2, 0), (2, 0, 1)),
]


@pytest.mark.parametrize("case", IM2COL_CASES)
def test_im2col_walks_the_bounding_box_and_the_images(case):
    spatial, lower, upper, strides, start, offsets = case
    images, channels, pixels = 2, 24, 37
    tensor = make_tensor(np.float16, images, *spatial[::-1], channels)
    box = TensorBox(
        element_strides=(1, *strides, 1), im2col=Im2colBox(lower, upper, 16, pixels), swizzle=32
    )
    rows = []
    for *position, image in walk_im2col(
        (*spatial, images), (*start, 0), lower, upper, strides, pixels
    ):
        at = [p + o for p, o in zip(position, offsets, strict=True)]
        rows.append(take_box(tensor, (16, *at, image), (16, *[1] * (len(spatial) + 1))))
    out = run_load(
        tensor,
        encode(tensor, box),
        (16, *start, 0),
        mode=".im2col",
        nbytes=pixels * 32,
        extra=", {" + ", ".join(map(str, offsets)) + "}",
    )
    dense = np.concatenate(rows)
    whole = dense.size // 128 * 128
    assert (out[:whole] == swizzle_bytes(dense[:whole], 32)).all()


@pytest.mark.parametrize(("mode", "halo", "offset"), [("im2col::w", 2, 0), ("im2col::w", 1, 1),
                                                      ("im2col::w::128", 2, 1)])  # fmt: skip
def test_wide_im2col_appends_halo_pixels(mode, halo, offset):
    images, height, width, channels = 12, 3, 7, 8
    tensor = make_tensor(np.float16, images, height, width, channels)
    pixels = 128 if mode.endswith("128") else 20
    box = TensorBox(im2col=Im2colBox((-1, 0), (-1, 0), 8, pixels))
    per_halo = 32 if mode.endswith("128") else pixels
    rows = []
    walk = walk_im2col((width, images), (-1, 1), (-1,), (-1,), (1,), pixels)
    for n, (column, image) in enumerate(walk, 1):
        shifts = range(halo + 1) if n % per_halo == 0 else (0,)
        rows += [
            take_box(tensor, (0, column + offset + shift, 2, image), (8, 1, 1, 1))
            for shift in shifts
        ]
    expected = np.concatenate(rows)
    out = run_load(
        tensor,
        encode(tensor, box),
        (0, -1, 2, 1),
        mode=f".{mode}",
        nbytes=expected.size,
        extra=f", {{{halo}, {offset}}}",
    )
    check_shared(out, expected)


@pytest.mark.parametrize("seed", [0, 3])
def test_multicast_reaches_every_cta_of_the_mask_and_its_mbarrier(seed):
    tensor = make_tensor(np.uint8, 8, 128)
    out = np.zeros((2, SHARED_BYTES), np.uint8)
    report = launch(
        HEAD + f"""
        mov.u32 %r3, %cluster_ctarank; mad.wide.u32 %d1, %r3, {SHARED_BYTES}, %d1;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 %d6, [bar], 1024; mov.u16 %h1, 3;
        setp.eq.and.u32 %p2, %r3, 1, %p0;
        @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"""
        ".multicast::cluster [%r1], [%d11, {0, 0}], [%r2], %h1;\n"
        + WAIT
        + SAVE
        + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        [encode(tensor, TensorBox((128, 8), swizzle=128)), tensor, out],
        parameters=PARAMETERS,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        options=LaunchOptions(latency_seed=seed),
    )
    assert report.findings == ()
    expected = swizzle_bytes(tensor.reshape(-1), 128)
    for rank in range(2):
        check_shared(out[rank], expected)


@pytest.mark.parametrize("multicast", [False, True])
def test_a_pair_signals_the_even_cta(multicast):
    """`& 0xFEFFFFFF` names the leader's mbarrier; both CTAs' copies count there."""
    tensor = make_tensor(np.uint8, 8, 128)
    out = np.zeros((2, SHARED_BYTES), np.uint8)
    mask = ".multicast::cluster" if multicast else ""
    issuer = "setp.eq.and.u32 %p2, %r3, 1, %p0;" if multicast else "setp.ne.or.u32 %p2, 0, 0, %p0;"
    launch(
        HEAD + f"""
        mov.u32 %r3, %cluster_ctarank; mad.wide.u32 %d1, %r3, {SHARED_BYTES}, %d1;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.eq.and.u32 %p3, %r3, 0, %p0; mov.u16 %h1, 3;
        @%p3 mbarrier.arrive.expect_tx.shared.b64 %d6, [bar], 2048;
        and.b32 %r4, %r2, 0xFEFFFFFF; {issuer}
        @%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{mask}"""
        f".cta_group::2 [%r1], [%d11, {{0, 0}}], [%r4]{', %h1' if multicast else ''};\n"
        "setp.ne.u32 %p2, %r3, 0; @%p2 bra JOIN;\n"
        + WAIT
        + "JOIN: barrier.cluster.arrive; barrier.cluster.wait;"
        + SAVE,
        [encode(tensor, TensorBox((128, 8), swizzle=128)), tensor, out],
        parameters=PARAMETERS,
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )
    expected = swizzle_bytes(tensor.reshape(-1), 128)
    for rank in range(2):
        check_shared(out[rank], expected)


FILL = f"""
ld.param.u64 %d0, [p2]; mad.lo.u32 %r9, %r0, 4, %r1; mad.wide.u32 %d9, %r0, 4, %d0;
mov.u32 %r8, 0;
FILL: ld.global.u32 %r7, [%d9]; st.shared.u32 [%r9], %r7;
add.u32 %r9, %r9, 128; add.u64 %d9, %d9, 128; add.u32 %r8, %r8, 128;
setp.lt.u32 %p3, %r8, {SHARED_BYTES}; @%p3 bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
"""
DRAIN = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def run_store(tensor, tensor_map, corner, shared, *, opcode, guard="@%p0 ", after=DRAIN):
    """Fill shared memory with `shared`, run one store from its start; return the report."""
    image = make_aligned_bytes(SHARED_BYTES)
    image[: shared.size] = shared
    coordinates = ", ".join(map(str, corner))
    return launch(
        HEAD + FILL + f"{guard}{opcode} [%d11, {{{coordinates}}}], [%r1];\n{after}",
        [tensor_map, tensor, image],
        parameters=PARAMETERS,
    )


def put_box(tensor, corner, box, values, combine=lambda old, new: new):
    """Return `tensor` after the box of `values` (outermost first) was combined into it."""
    result = tensor.copy()
    for index in np.ndindex(values.shape):
        at = tuple(c + i for c, i in zip(corner[::-1], index, strict=True))
        if all(0 <= i < size for i, size in zip(at, tensor.shape, strict=True)):
            result[at] = combine(result[at], values[index])
    return result


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
    "inc": lambda old, new: 0 if old >= new else old + 1,
    "dec": lambda old, new: new if old == 0 or old > new else old - 1,
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


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("[%r1+64], [%d11, {0, 0}], [%r2]", "misaligned", "128 bytes"),
        ("[%r1+8192], [%d11, {0, 0}], [%r2]", "out-of-bounds", "shared memory ends"),
        ("[%r1], [%d11+32, {0, 0}], [%r2]", "misaligned", "64 bytes"),
        ("[%r1], [%d1, {0, 0}], [%r2]", "bad-tensor-map", "not legal"),
        ("[%r3], [%d11, {0, 0}], [%r2]", "wrong-cta", "executing CTA"),
    ],
)
def test_faults_name_the_operand_and_the_rule(body, kind, words):
    tensor = make_tensor(np.uint8, 8, 128)
    garbage = make_aligned_bytes(256)
    garbage[:] = 0xFF
    opcode = LOAD.format(rank=2, mode="")
    with pytest.raises(KernelFault) as caught:
        launch(
            HEAD + f"xor.b32 %r3, %r1, 0x01000000; @%p0 {opcode} {body};" + WAIT,
            [encode(tensor, TensorBox((128, 8))), tensor, garbage],
            parameters=PARAMETERS,
        )
    fault = caught.value.report.fault
    assert fault.kind == kind
    assert words in fault.message


def test_a_map_of_another_rank_is_a_fault():
    tensor = make_tensor(np.uint8, 8, 128)
    with pytest.raises(KernelFault, match="rank 2 for an instruction of 3 dimensions"):
        run_load(tensor, encode(tensor, TensorBox((128, 8))), (0, 0, 0), nbytes=1024)


def test_a_map_of_the_other_mode_is_a_fault():
    tensor = make_tensor(np.uint8, 2, 8, 128)
    with pytest.raises(KernelFault, match="im2col mode and the map was encoded for tile"):
        run_load(
            tensor, encode(tensor, TensorBox((128, 8, 1))), (0, 0, 0), mode=".im2col", nbytes=1024,
            extra=", {0}",
        )  # fmt: skip


def test_a_box_outside_every_buffer_names_the_tensor():
    tensor = make_tensor(np.uint8, 8, 128)
    layout = TensorLayout("u8", (128, 1 << 20))
    tensor_map = encode_tensor_map(tensor.ctypes.data, layout, TensorBox((128, 8)))
    with pytest.raises(KernelFault) as caught:
        run_load(tensor, tensor_map, (0, 1 << 19), nbytes=1024)
    assert caught.value.report.fault.kind == "out-of-bounds"
    assert "{0, 524288}" in caught.value.report.fault.message
    assert "u8 [128, 1048576]" in caught.value.report.fault.message


def test_the_reference_tells_a_wrong_swizzle():
    """A negative control: the comparison fails when the swizzle is another one."""
    tensor = make_tensor(np.uint8, 16, 128)
    box = TensorBox((128, 16), swizzle=128)
    out = run_load(tensor, encode(tensor, replace(box, swizzle=0)), (0, 0), nbytes=2048)
    assert (out[:2048] != swizzle_bytes(tensor.reshape(-1), 128)).any()
