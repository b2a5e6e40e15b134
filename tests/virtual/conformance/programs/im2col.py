"""Tensor copies (TMA) in im2col mode, and tensor maps that the kernel itself replaces."""

import numpy as np

from ..program import Buffer, ConformanceProgram, TensorMap, make_program, poison
from .tile import BYTES, THREADS, loads_program, stores_body


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the im2col programs and the tensor-map programs."""
    return (_rank_3(), _rank_4(), _rank_5(), _swizzled(), _store(), _replaced(), _prefetched())


def _map(
    name: str,
    shape: tuple[int, ...],
    lower: tuple[int, ...],
    upper: tuple[int, ...],
    box: tuple[int, int],
    dtype: str = "uint16",
    buffer: str = "source",
    **fields: object,
) -> TensorMap:
    strides, step = [], BYTES[dtype]
    for extent in shape[:-1]:
        step *= extent
        strides.append(step)
    return TensorMap(
        name,
        buffer,
        dtype,
        shape,
        tuple(strides),
        box,
        pixel_lower=lower,
        pixel_upper=upper,
        **fields,  # type: ignore[arg-type]
    )


def _loads(
    name: str, maps: list[TensorMap], places: list[tuple[str, str]], size: int = 1024
) -> ConformanceProgram:
    """Return loads (map, coordinates and offsets) of one source that counts its elements."""
    by_name = {tensor_map.name: tensor_map for tensor_map in maps}
    copies = []
    for key, operands in places:
        tensor_map = by_name[key]
        count = tensor_map.box[0] * tensor_map.box[1] * BYTES[tensor_map.dtype]
        copies.append((key, 0, operands, count))
    rank = len(maps[0].shape)
    source = np.arange(1, max(int(np.prod(m.shape)) for m in maps) + 1).astype(np.uint16)
    opcode = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col"
    return loads_program(name, source, maps, copies, size, opcode)


def _rank_3() -> ConformanceProgram:
    """Return loads of N W C tensors: one offset."""
    maps = [
        _map("t", (16, 9, 3), (-1,), (-1,), (8, 12)),
        _map("u", (16, 9, 3), (0,), (-2,), (16, 5)),
    ]
    starts = ((0, -1, 0, 0), (0, -1, 0, 1), (8, -1, 0, 2), (0, 3, 1, 1), (8, 6, 2, 0), (0, 0, 2, 2))
    places = [("t", f"{{{c}, {w}, {n}}}, {{{o}}}") for c, w, n, o in starts]
    places += [("u", "{0, 0, 0}, {0}"), ("u", "{0, 4, 1}, {2}"), ("u", "{0, 6, 0}, {1}")]
    return _loads("im2col_load_3d", maps, places)


def _rank_4() -> ConformanceProgram:
    """Return loads of N H W C tensors: offsets of a 3 x 3 filter."""
    maps = [
        _map("t", (8, 7, 6, 2), (-1, -1), (-1, -1), (8, 20)),
        _map("s", (8, 7, 6, 2), (-1, -1), (-1, -1), (8, 6), element_strides=(1, 2, 2, 1)),
        _map("w", (8, 7, 6, 2), (-2, 0), (0, -3), (8, 25)),
        _map("v", (16, 7, 6, 2), (0, 0), (-2, -2), (8, 33)),
    ]
    starts = ((-1, -1, 0, 0, 0), (-1, -1, 0, 1, 1), (-1, -1, 0, 2, 2), (3, 2, 0, 0, 1))
    starts += ((5, 4, 1, 1, 0), (2, 3, 1, 2, 1))
    places = [("t", f"{{0, {w}, {h}, {n}}}, {{{x}, {y}}}") for w, h, n, x, y in starts]
    places += [
        ("s", "{0, -1, -1, 0}, {0, 0}"),
        ("s", "{0, -1, -1, 0}, {1, 2}"),
        ("s", "{0, 3, 1, 1}, {2, 0}"),
    ]
    places += [
        ("v", "{8, 0, 0, 0}, {0, 0}"),
        ("v", "{0, 2, 1, 1}, {2, 1}"),
        ("v", "{8, 4, 3, 0}, {1, 1}"),
    ]
    places += [("w", "{0, -2, 0, 0}, {0, 0}"), ("w", "{0, 1, 1, 0}, {2, 1}")]
    return _loads("im2col_load_4d", maps, places)


def _rank_5() -> ConformanceProgram:
    """Return loads of N D H W C tensors: three offsets."""
    maps = [_map("t", (8, 5, 4, 3, 2), (-1, -1, -1), (-1, -1, -1), (8, 24))]
    maps.append(_map("u", (8, 5, 4, 3, 2), (-2, 0, -1), (1, -1, 0), (8, 31)))
    places = [
        ("t", "{0, -1, -1, -1, 0}, {0, 0, 0}"),
        ("t", "{0, -1, -1, -1, 0}, {1, 1, 1}"),
        ("t", "{0, 2, 1, 0, 0}, {2, 0, 1}"),
        ("t", "{0, 3, 2, 1, 1}, {0, 2, 2}"),
        ("u", "{0, -2, 0, -1, 0}, {0, 0, 0}"),
        ("u", "{0, 1, 1, 1, 0}, {1, 0, 2}"),
    ]
    return _loads("im2col_load_5d", maps, places)


def _swizzled() -> ConformanceProgram:
    maps = [
        _map("a", (32, 6, 5, 2), (-1, -1), (-1, -1), (32, 14), swizzle="64b"),
        _map("b", (64, 6, 5, 1), (-1, -1), (-1, -1), (64, 14), swizzle="128b"),
        _map("n", (16, 6, 5, 2), (-1, -1), (-1, -1), (16, 14), dtype="float16", oob_fill="nan"),
    ]
    places = [(key, f"{{0, {w}, 2, 0}}, {{{o}, 1}}") for key in "abn" for w, o in ((-1, 0), (3, 2))]
    return _loads("im2col_swizzle_and_fill", maps, places, 2048)


def _store() -> ConformanceProgram:
    shape = (16, 6, 5, 2)
    maps = [
        _map("t", shape, (0, 0), (0, 0), (8, 16), buffer="out"),
        _map("u", shape, (0, 0), (0, 0), (8, 10), buffer="second"),
    ]
    opcode = "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs"
    stores = [("t", "{0, 0, 0, 0}", opcode, 0), ("t", "{0, 3, 3, 1}", opcode, 512)]
    stores += [("u", "{8, 0, 0, 0}", opcode, 1024), ("u", "{0, 2, 1, 1}", opcode, 1280)]
    return make_program(
        "im2col_store",
        stores_body(stores, 512),
        threads=THREADS,
        inputs=[Buffer("source", np.arange(1, 1025).astype(np.uint16).view(np.uint32))],
        outputs=[Buffer(name, poison(shape[::-1], np.uint16)) for name in ("out", "second")],
        tensor_maps=maps,
    )


def _replaced() -> ConformanceProgram:
    """Return a load through a tensor map that the kernel copies, changes and publishes."""
    tensor_map = TensorMap("t", "source", "uint16", (32, 16), (64,), (16, 4))
    body = """
    .shared .align 128 .b8 descriptor[128]; .shared .align 1024 .b8 tile[1024];
    .shared .align 8 .b64 bar;
    mov.u32 %r1, tile; mov.u32 %r2, bar; mov.u32 %r3, descriptor; setp.eq.u32 %p1, %thread, 0;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;
    setp.ge.u32 %p2, %thread, 32; @%p2 bra READY;
    mad.wide.u32 %d1, %thread, 4, %t_map; ld.u32 %r4, [%d1]; mad.lo.u32 %r5, %thread, 4, %r3;
    st.shared.u32 [%r5], %r4; bar.warp.sync 0xffffffff; cvta.global.u64 %d2, %source;
    add.s64 %d2, %d2, 1024; @!%p1 bra CHANGED;
    tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r3], %d2;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r3], 0, 24;
    tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r3], 1, 6;
    tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r3], 0, 48;
    tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r3], 1, 8;
    tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [%r3], 1, 1;
    tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r3], 1;
    tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r3], 6;
    tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r3], 1;
    CHANGED: bar.warp.sync 0xffffffff;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
      [%map], [%r3], 128;
    READY: bar.sync 0;
    mov.u32 %r20, %thread;
    FILL: mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], 0xeeeeeeee;
    add.u32 %r20, %r20, 64; setp.lt.u32 %p5, %r20, 256; @%p5 bra FILL;
    fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra WAIT;
    cvta.global.u64 %d3, %map;
    fence.proxy.tensormap::generic.acquire.gpu [%d3], 128;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      [%r1], [%d3, {16, -1}], [%r2];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0; @!%p3 bra WAIT;
    mov.u32 %r20, %thread;
    DUMP: mad.lo.u32 %r21, %r20, 4, %r1; ld.shared.u32 %r22, [%r21];
    mad.wide.u32 %d20, %r20, 4, %out; st.global.u32 [%d20], %r22;
    add.u32 %r20, %r20, 64; setp.lt.u32 %p5, %r20, 256; @%p5 bra DUMP;
    bar.sync 0; @!%p1 bra END;
    """
    # The map holds an address of this run: the program leaves zeros behind.
    body += "mov.u64 %d5, 0;\n" + "".join(
        f"st.global.u64 [%map+{k}], %d5;\n" for k in range(0, 128, 8)
    )
    return make_program(
        "im2col_tensormap_replace",
        body + "END:\n",
        threads=THREADS,
        inputs=[Buffer("source", np.arange(1, 1025).astype(np.uint16))],
        outputs=[Buffer("map", np.zeros(128, np.uint8)), Buffer("out", poison(256, np.uint32))],
        tensor_maps=[tensor_map],
    )


def _prefetched() -> ConformanceProgram:
    """Return prefetches, which change nothing but must be accepted, then the load."""
    tensor_map = _map("t", (8, 7, 6, 2), (-1, -1), (-1, -1), (8, 20))
    program = _loads("im2col_prefetch_first", [tensor_map], [("t", "{0, 1, 1, 0}, {1, 0}")])
    prefetch = "prefetch.tensormap [%t_map];\ncp.async.bulk.prefetch.tensor.4d.L2.global.im2col "
    prefetch += "[%t_map, {0, 1, 1, 0}], {1, 0};\n"
    text = program.ptx.replace("READY: bar.sync 0;", prefetch + "READY: bar.sync 0;")
    return ConformanceProgram(**{**vars(program), "ptx": text})
