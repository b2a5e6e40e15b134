"""Tensor loads: boxes, fills, swizzles, modes, multicast against NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.exec.tensor_programs import (
    DTYPES,
    HEAD,
    PARAMETERS,
    POISON,
    SAVE,
    SHARED_BYTES,
    WAIT,
    check_shared,
    encode,
    make_tensor,
    run_load,
)
from tests.virtual.exec.tensor_reference import SWIZZLE_TABLES, swizzle_bytes, take_box, walk_im2col
from tests.virtual.run_ptx import launch


@pytest.mark.parametrize("dtype", ["u8", "u16", "f16", "u32", "s32", "f32", "u64", "s64", "f64"])
@pytest.mark.parametrize(("chunk", "row"), [(0, 0), (1, 3), (-3, -2), (9, 6), (40, 0)])
def test_a_box_is_dense_and_zero_outside_the_tensor(dtype, chunk, row):
    """Boxes start at any 16 bytes, before, in and behind a tensor of 12 x 16 bytes a row."""
    per_chunk = 16 // np.dtype(DTYPES[dtype]).itemsize
    tensor = make_tensor(DTYPES[dtype], 9, 12 * per_chunk)
    box, corner = (8 * per_chunk, 5), (chunk * per_chunk, row)
    out = run_load(tensor, encode(tensor, TensorBox(box)), corner, nbytes=5 * 128)
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


@pytest.mark.parametrize(("swizzle", "row"), [(128, 32), (128, 96), (64, 16)])
def test_rows_shorter_than_the_swizzle_lie_a_span_apart(swizzle, row):
    """Seen on an H200: the rest of each span is not written."""
    tensor = make_tensor(np.uint8, 16, 96)
    box = TensorBox((row, 16), swizzle=swizzle)
    out = run_load(tensor, encode(tensor, box), (0, 0), nbytes=16 * row)
    spans = np.full((16, swizzle), POISON, np.uint8)
    spans[:, :row] = tensor[:, :row]
    check_shared(out, swizzle_bytes(spans.reshape(-1), swizzle))


@pytest.mark.parametrize(("dtype", "pattern"), [("f16", 0x7FF7), ("f32", 0x7FF77FF7)])
def test_fill_with_nan_outside(dtype, pattern):
    """Seen on an H200: the same 16 bits, repeated for wider elements."""
    tensor = make_tensor(DTYPES[dtype], 4, 32)
    nbytes = 64 * tensor.itemsize
    out = run_load(tensor, encode(tensor, TensorBox((16, 4), fill="nan")), (24, 2), nbytes=nbytes)
    bits = tensor.view(f"u{tensor.itemsize}")
    check_shared(out, take_box(bits, (24, 2), (16, 4), fill=pattern))
    assert np.isnan(out[:nbytes].view(tensor.dtype)[-1])


@pytest.mark.parametrize("corner", [(0, 0, 0), (0, -3, 1), (4, 5, 2)])
def test_element_strides_skip_elements(corner):
    tensor = make_tensor(np.float32, 6, 9, 16)
    strides = (1, 2, 3)
    box = TensorBox((8, 5, 6), element_strides=strides)
    expected = take_box(tensor, corner, (8, 5, 6), strides)
    out = run_load(tensor, encode(tensor, box), corner, nbytes=expected.size)
    assert expected.size == 8 * 3 * 2 * 4
    check_shared(out, expected)


@pytest.mark.parametrize("corner", [(0, 1, 1, 0), (5, -1, 0, 1), (-2, 3, 2, 0)])
def test_interleave_counts_slices_and_takes_one_slice_of_channels(corner):
    """Dimensions W, H, C/8, N of 16-byte slices; seen on an H200 for the slice dimension."""
    tensor = make_tensor(np.complex128, 2, 3, 5, 9)  # one element: a slice
    layout = TensorLayout("f16", (9, 5, 3, 2), tensor.strides[::-1][1:])
    box = TensorBox((8, 2, 3, 2), interleave=16)
    tensor_map = encode_tensor_map(tensor.ctypes.data, layout, box)
    expected = take_box(tensor, corner, (8, 2, 1, 2))
    out = run_load(tensor, tensor_map, corner, nbytes=expected.size)
    check_shared(out, expected)


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


def test_the_flushing_type_keeps_subnormals_on_loads():
    """Seen on an H200."""
    tensor = make_tensor(np.float32, 2, 32)
    out = run_load(tensor, encode(tensor, TensorBox((32, 2)), "f32.ftz"), (0, 0), nbytes=256)
    check_shared(out, take_box(tensor.view(np.uint32), (0, 0), (32, 2)))


def test_tf32_loads_round_to_nearest_even():
    """Seen on an H200: 10 bits of fraction are kept."""
    tensor = make_tensor(np.uint32, 1, 32)
    tensor[0, :6] = [0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0x7F7FFFFF, 0x7FC12345]
    out = run_load(tensor, encode(tensor, TensorBox((32, 1)), "tf32"), (0, 0), nbytes=128)
    expected = [0x3F800000, 0x3F800000, 0x3F802000, 0x3F804000, 0x7F800000, 0x7FFFE000]
    assert (out[:24].view(np.uint32) == expected).all()


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


def test_the_reference_tells_a_wrong_swizzle():
    """A negative control: the comparison fails when the swizzle is another one."""
    tensor = make_tensor(np.uint8, 16, 128)
    box = TensorBox((128, 16), swizzle=128)
    out = run_load(tensor, encode(tensor, replace(box, swizzle=0)), (0, 0), nbytes=2048)
    assert (out[:2048] != swizzle_bytes(tensor.reshape(-1), 128)).any()
