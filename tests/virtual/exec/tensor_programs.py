"""One-CTA programs around one tensor copy, and arrays for them."""

import numpy as np

from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.tensor_map import TensorLayout, encode_tensor_map
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


def put_box(tensor, corner, box, values, combine=lambda old, value: value):
    """Return `tensor` after the box of `values` (outermost first) was combined into it."""
    result = tensor.copy()
    for index in np.ndindex(values.shape):
        at = tuple(c + i for c, i in zip(corner[::-1], index, strict=True))
        if all(0 <= i < size for i, size in zip(at, tensor.shape, strict=True)):
            result[at] = combine(result[at], values[index])
    return result
