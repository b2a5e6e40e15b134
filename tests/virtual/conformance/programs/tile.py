"""Tensor copies (TMA) in tile mode: ranks, swizzles, interleaves, fills, stores, reductions."""

from collections.abc import Sequence

import numpy as np

from ..program import Buffer, ConformanceProgram, TensorMap, make_program, poison
from ..values import FLOAT32_EDGES, make_random

BYTES = {
    **dict.fromkeys(("uint8",), 1),
    **dict.fromkeys(("uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "float32_ftz", "tfloat32", "tfloat32_ftz"), 4),
    **dict.fromkeys(("uint64", "int64", "float64"), 8),
}
THREADS = 64

START = """
.shared .align 1024 .b8 tile[{size}]; .shared .align 8 .b64 bar;
mov.u32 %r1, tile; mov.u32 %r2, bar; setp.eq.u32 %p1, %thread, 0; mov.u32 %r9, 0;
@!%p1 bra READY; mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
"""


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the tile mode programs."""
    return (
        _rank_1(),
        _rank_2(),
        _rank_3(),
        _rank_4(),
        _rank_5(),
        *(_swizzle(span) for span in (32, 64, 128)),
        _interleave("16b", 16, "none"),
        _interleave("16b", 16, "64b"),
        _interleave("32b", 32, "32b"),
        _types(),
        _fills(),
        _element_strides(),
        _multicast(),
        _store(),
        _store_swizzled(),
        _reductions_integer(),
        _reductions_float(),
    )


def box_bytes(tensor_map: TensorMap) -> int:
    """Return the bytes one tile-mode copy of the map moves.

    With interleave, dimension 0 counts slices of 16 or 32 bytes, and of the last dimension but one,
    the slices of channels, a copy takes one (seen on an H200).
    """
    is_interleaved = tensor_map.interleave != "none"
    count = int(tensor_map.interleave[:2]) if is_interleaved else BYTES[tensor_map.dtype]
    for axis, (extent, step) in enumerate(zip(tensor_map.box, tensor_map.steps, strict=True)):
        if is_interleaved and axis == len(tensor_map.box) - 2:
            continue
        count *= -(-extent // step) if axis > 0 or is_interleaved else extent
    return count


def loads_body(copies: Sequence[tuple[str, int, str, int]], size: int, opcode: str = "") -> str:
    """Return a body that does one copy after the other and dumps the tile after each.

    A copy is (map, offset in the tile, operands after the map, bytes); the tile is 0xee before.
    """
    text = START.format(size=size)
    for number, (name, offset, operands, count) in enumerate(copies):
        rank = operands.split("}")[0].count(",") + 1
        form = opcode or f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile"
        extra = operands.partition("}")[2]
        coordinates = operands.partition("}")[0] + "}"
        text += f"""
        mov.u32 %r20, %thread;
        FILL{number}: mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], 0xeeeeeeee;
        add.u32 %r20, %r20, {THREADS}; setp.lt.u32 %p5, %r20, {size // 4}; @%p5 bra FILL{number};
        fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra WAIT{number};
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {count};
        {form}.mbarrier::complete_tx::bytes
          [%r1+{offset}], [%{name}_map, {coordinates}], [%r2]{extra};
        WAIT{number}: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], {number % 2};
        @!%p2 bra WAIT{number};
        mov.u32 %r20, %thread;
        DUMP{number}: mad.lo.u32 %r21, %r20, 4, %r1; ld.shared.u32 %r22, [%r21];
        mad.wide.u32 %d20, %r20, 4, %out; st.global.u32 [%d20+{number * size}], %r22;
        add.u32 %r20, %r20, {THREADS}; setp.lt.u32 %p5, %r20, {size // 4}; @%p5 bra DUMP{number};
        bar.sync 0;
        """
    return text


def loads_program(
    name: str,
    source: np.ndarray,
    maps: Sequence[TensorMap],
    copies: Sequence[tuple[str, int, str, int]],
    size: int,
    opcode: str = "",
) -> ConformanceProgram:
    """Return a program of loads (see `loads_body`) from one source."""
    labels = tuple(f"{copy[0]} {copy[2]}" for copy in copies)
    return make_program(
        name,
        loads_body(copies, size, opcode),
        threads=THREADS,
        inputs=[Buffer("source", source)],
        outputs=[Buffer("out", poison((len(copies), size // 4), np.uint32))],
        tensor_maps=maps,
        row_names={"out": labels},
    )


def _counted(count: int, dtype: type = np.uint16) -> np.ndarray:
    """Return 1, 2, 3, ...: every element says where it came from."""
    return np.arange(1, count + 1).astype(dtype)


def _tile_map(
    name: str, dtype: str, shape: tuple[int, ...], box: tuple[int, ...], **fields: object
) -> TensorMap:
    strides, step = [], BYTES[dtype]
    for extent in shape[:-1]:
        step *= extent
        strides.append(step)
    return TensorMap(name, "source", dtype, shape, tuple(strides), box, **fields)  # type: ignore[arg-type]


def _ranked(
    rank: int, dtype: str, shape: tuple[int, ...], box: tuple[int, ...], places: list[tuple]
) -> ConformanceProgram:
    tensor_map = _tile_map("t", dtype, shape, box)
    count = box_bytes(tensor_map)
    size = -(-count // 256) * 256
    copies = [("t", 0, "{" + ", ".join(map(str, place)) + "}", count) for place in places]
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[BYTES[dtype]]
    source = _counted(int(np.prod(shape)), kind)
    return loads_program(f"tile_load_{rank}d", source, [tensor_map], copies, size)


def _rank_1() -> ConformanceProgram:
    return _ranked(1, "uint32", (100,), (64,), [(0,), (8,), (60,), (-12,), (100,), (-64,), (96,)])


def _rank_2() -> ConformanceProgram:
    places = [(0, 0), (8, 5), (40, 28), (-8, -2), (-16, 3), (40, 31), (8, -8)]
    return _ranked(2, "uint16", (48, 32), (16, 8), places)


def _rank_3() -> ConformanceProgram:
    places = [(0, 0, 0), (8, 3, 2), (0, -1, -1), (8, 9, 6), (0, 9, -1), (-8, 0, 0)]
    return _ranked(3, "uint16", (16, 10, 7), (8, 4, 3), places)


def _rank_4() -> ConformanceProgram:
    places = [(0, 0, 0, 0), (4, 1, 2, 1), (-4, -1, -1, -1), (8, 4, 3, 2)]
    return _ranked(4, "uint32", (12, 5, 4, 3), (8, 3, 2, 2), places)


def _rank_5() -> ConformanceProgram:
    places = [(0, 0, 0, 0, 0), (4, 1, 1, 1, 1), (-4, -1, -1, -1, -1), (8, 3, 2, 2, 2)]
    places.append((0, 0, 0, 0, 5))
    return _ranked(5, "uint32", (12, 4, 3, 3, 3), (8, 2, 2, 2, 2), places)


def _swizzle(span: int) -> ConformanceProgram:
    columns = span // 2
    tensor_map = _tile_map("t", "uint16", (columns * 2, 40), (columns, 16), swizzle=f"{span}b")
    half = _tile_map("half", "uint16", (columns * 2, 40), (columns // 2, 8), swizzle=f"{span}b")
    count, half_count = box_bytes(tensor_map), box_bytes(half)
    copies = [("t", offset, "{8, 3}", count) for offset in (0, 128, 256, 512 + 384)]
    copies += [("t", 1024, "{-8, 30}", count), ("half", 256, "{0, 1}", half_count)]
    source = _counted(columns * 2 * 40)
    return loads_program(f"tile_swizzle_{span}b", source, [tensor_map, half], copies, 4096)


def _interleave(interleave: str, unit: int, swizzle: str) -> ConformanceProgram:
    """Return loads of a tensor whose channels lie in slices of 16 or 32 bytes.

    Memory is [image][slice][row][column][bytes of a slice]; dimensions of the map are column, row,
    slice, image.
    """
    shape = (20, 5, 3, 2)
    strides = (unit * 20, unit * 20 * 5, unit * 20 * 5 * 3)
    columns = unit // 2  # the driver wants whole slices, counted in elements
    maps = [
        TensorMap(
            name, "source", "uint16", shape, strides, (columns, 3, box_2, 2),
            element_strides=steps, interleave=interleave, swizzle=swizzle,
        )
        for name, box_2, steps in (("t", 1, ()), ("three", 3, ()), ("steps", 1, (2, 1, 1, 1)))
    ]  # fmt: skip
    places = ["{0, 0, 0, 0}", "{1, 1, 1, 0}", "{2, -1, 2, 1}", "{-1, 3, 0, 1}", "{18, 0, -1, 0}"]
    copies = [("t", 0, place, box_bytes(maps[0])) for place in places]
    copies.append(("t", 256, "{1, 2, 0, 0}", box_bytes(maps[0])))
    copies += [(m.name, 0, "{3, 1, 1, 0}", box_bytes(m)) for m in maps[1:]]
    suffix = "" if swizzle == "none" else f"_swizzle_{swizzle}"
    source = _counted(unit // 2 * 20 * 5 * 3 * 2)
    return loads_program(f"tile_interleave_{interleave}{suffix}", source, maps, copies, 4096)


def _types() -> ConformanceProgram:
    """Return one load through a map of every element type: what changes bits, what does not."""
    floats = np.concatenate(
        [FLOAT32_EDGES, make_random(13, 1).randint(0, 1 << 31, 93).astype(np.uint32)]
    )
    source = np.resize(floats, 512)
    # Halfway between two tf32 numbers, with an even and an odd one below; then one more bit.
    source[16:24] = [
        0x3F801000,
        0x3F803000,
        0xBF801000,
        0xBF803000,
        0x3F801001,
        0x1000,
        0x3000,
        0xFFF,
    ]
    maps, copies = [], []
    for dtype, size in BYTES.items():
        tensor_map = _tile_map(dtype, dtype, (256 // size, 4), (64 // size, 4))
        maps.append(tensor_map)
        copies.append((dtype, 0, f"{{{64 // size}, 0}}", box_bytes(tensor_map)))
        if dtype.startswith(("float32", "tfloat32")):
            copies += [
                (dtype, 0, f"{{{column}, 0}}", box_bytes(tensor_map)) for column in (0, 32, 48)
            ]
    return loads_program("tile_element_types", source, maps, copies, 256)


def _fills() -> ConformanceProgram:
    """Return loads across the border with zero fill and NaN fill."""
    maps, copies = [], []
    for dtype in ("float16", "bfloat16", "float32", "float64", "float32_ftz", "tfloat32"):
        for fill in ("none", "nan"):
            size = BYTES[dtype]
            name = f"{dtype}_{fill}"
            shape, box = (128 // size, 6), (64 // size, 4)
            maps.append(_tile_map(name, dtype, shape, box, oob_fill=fill))
            copies.append((name, 0, f"{{{96 // size}, -1}}", 256))
    return loads_program("tile_out_of_bounds_fill", _counted(1024), maps, copies, 256)


def _element_strides() -> ConformanceProgram:
    maps, copies = [], []
    for name, box, steps in (
        ("rows", (8, 8, 2), (1, 2, 1)),
        ("odd", (8, 7, 3), (1, 3, 2)),
        ("inner", (8, 4, 2), (2, 1, 1)),
        ("all", (16, 8, 4), (4, 4, 4)),
    ):
        tensor_map = _tile_map(name, "uint16", (24, 20, 6), box, element_strides=steps)
        maps.append(tensor_map)
        for place in ("{0, 0, 0}", "{8, 2, 1}", "{-8, -1, -1}", "{16, 17, 4}"):
            copies.append((name, 0, place, box_bytes(tensor_map)))
    return loads_program("tile_element_strides", _counted(24 * 20 * 6), maps, copies, 256)


def _multicast() -> ConformanceProgram:
    tensor_map = _tile_map("t", "uint16", (64, 16), (32, 8))
    body = (
        START.format(size=2048)
        + """
    mov.u32 %r20, %thread;
    FILL: mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], 0xeeeeeeee;
    add.u32 %r20, %r20, 64; setp.lt.u32 %p5, %r20, 512; @%p5 bra FILL;
    fence.proxy.async.shared::cta;
    mov.u32 %r5, %cluster_ctarank; mad.wide.u32 %d19, %r5, 2048, %out;
    mov.u32 %r6, 1024; setp.eq.u32 %p3, %r5, 3; @%p3 mov.u32 %r6, 512;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], %r6;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    and.b32 %r7, %r5, 1; setp.eq.u32 %p4, %r7, 0; and.pred %p4, %p4, %p1; @!%p4 bra WAIT;
    shr.u32 %r8, %r5, 1; mul.lo.u32 %r10, %r8, 1024; add.u32 %r11, %r1, %r10;
    mov.u16 %h1, 0x0007; setp.ne.u32 %p6, %r5, 0; @%p6 mov.u16 %h1, 0x000f; mul.lo.u32 %r12, %r8, 8;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
      [%r11], [%t_map, {%r12, %r8}], [%r2], %h1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra WAIT;
    mov.u32 %r20, %thread;
    DUMP: mad.lo.u32 %r21, %r20, 4, %r1; ld.shared.u32 %r22, [%r21];
    mad.wide.u32 %d20, %r20, 4, %d19; st.global.u32 [%d20], %r22;
    add.u32 %r20, %r20, 64; setp.lt.u32 %p5, %r20, 512; @%p5 bra DUMP;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    )
    return make_program(
        "tile_multicast",
        body,
        threads=THREADS,
        ctas=4,
        cluster=(4, 1, 1),
        inputs=[Buffer("source", _counted(64 * 16))],
        outputs=[Buffer("out", poison((4, 512), np.uint32))],
        tensor_maps=[tensor_map],
    )


def stores_body(stores: Sequence[tuple[str, str, str, int]], words: int) -> str:
    """Return a body that fills the tile and issues stores (map, operands, opcode, offset)."""
    text = (
        START.format(size=words * 4)
        + f"""
    mov.u32 %r20, %thread;
    COPY_IN: mad.wide.u32 %d20, %r20, 4, %source; ld.global.u32 %r22, [%d20];
    mad.lo.u32 %r21, %r20, 4, %r1; st.shared.u32 [%r21], %r22;
    add.u32 %r20, %r20, {THREADS}; setp.lt.u32 %p5, %r20, {words}; @%p5 bra COPY_IN;
    fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra DONE;
    """
    )
    for name, operands, opcode, offset in stores:
        text += f"{opcode}.bulk_group [%{name}_map, {operands}], [%r1+{offset}];\n"
    return text + "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\nDONE: bar.sync 0;\n"


def _output_map(
    name: str,
    buffer: str,
    dtype: str,
    shape: tuple[int, ...],
    box: tuple[int, ...],
    **fields: object,
) -> TensorMap:
    tensor_map = _tile_map(name, dtype, shape, box, **fields)
    return TensorMap(**{**vars(tensor_map), "buffer": buffer})


def _store() -> ConformanceProgram:
    """Return stores of every rank, over the borders too: what lies outside is not written."""
    layouts = {
        1: ((56,), (32,), ["{0}", "{32}", "{56}"]),
        2: ((24, 12), (8, 4), ["{8, 4}", "{0, 0}", "{20, 10}"]),
        3: ((8, 6, 5), (4, 3, 2), ["{4, 2, 2}", "{0, 0, 0}", "{4, 5, 4}"]),
        4: ((8, 4, 3, 3), (4, 2, 2, 2), ["{0, 0, 0, 0}", "{4, 3, 2, 2}"]),
        5: ((8, 3, 3, 2, 2), (4, 2, 2, 2, 1), ["{0, 0, 0, 0, 0}", "{4, 2, 2, 1, 1}"]),
    }
    maps, outputs, stores = [], [], []
    for rank, (shape, box, places) in layouts.items():
        name = f"out{rank}"
        maps.append(_output_map(f"t{rank}", name, "uint32", shape, box))
        outputs.append(Buffer(name, poison(shape[::-1], np.uint32)))
        opcode = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile"
        stores += [(f"t{rank}", place, opcode, 128 * k) for k, place in enumerate(places)]
    body = stores_body(stores, 512)
    return make_program(
        "tile_store",
        body,
        threads=THREADS,
        inputs=[Buffer("source", _counted(512, np.uint32))],
        outputs=outputs,
        tensor_maps=maps,
    )


def _store_swizzled() -> ConformanceProgram:
    maps, outputs, stores = [], [], []
    for number, span in enumerate((32, 64, 128)):
        columns = span // 2
        name = f"out{span}"
        shape, box = (columns, 20), (columns, 16)
        maps.append(_output_map(f"t{span}", name, "uint16", shape, box, swizzle=f"{span}b"))
        outputs.append(Buffer(name, poison(shape[::-1], np.uint16)))
        opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile"
        stores.append((f"t{span}", "{8, 8}", opcode, 1024 * number + 256))
    return make_program(
        "tile_store_swizzled",
        stores_body(stores, 2048),
        threads=THREADS,
        inputs=[Buffer("source", _counted(4096).view(np.uint32))],
        outputs=outputs,
        tensor_maps=maps,
    )


def _reduction(name: str, forms: list[tuple[str, str]], source: np.ndarray, start: np.ndarray):
    """Return reductions (operation, element type), one 2-d tensor of 128 bytes x 4 rows each."""
    maps, outputs, stores = [], [], []
    for number, (operation, dtype) in enumerate(forms):
        size = BYTES[dtype]
        label = f"{operation}_{dtype}"
        shape, box = (128 // size, 4), (64 // size, 3)
        maps.append(_output_map(f"m_{label}", f"o_{label}", dtype, shape, box))
        outputs.append(Buffer(f"o_{label}", start[number].reshape(4, 32)))
        opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile"
        stores.append((f"m_{label}", f"{{{32 // size}, 0}}", opcode, 256 * number))
    return make_program(
        name,
        stores_body(stores, len(source)),
        threads=THREADS,
        inputs=[Buffer("source", source)],
        outputs=outputs,
        tensor_maps=maps,
    )


def _reductions_integer() -> ConformanceProgram:
    forms = [(op, kind) for op in ("add", "min", "max") for kind in ("uint32", "int32", "uint64")]
    forms += [("min", "int64"), ("max", "int64"), ("inc", "uint32"), ("dec", "uint32")]
    forms += [(op, kind) for op in ("and", "or", "xor") for kind in ("uint32", "uint64")]
    random = make_random(13, 2)
    source = np.frombuffer(random.bytes(64 * 4 * len(forms)), np.uint32).reshape(-1, 64).copy()
    start = np.frombuffer(random.bytes(128 * 4 * len(forms)), np.uint32).reshape(-1, 128).copy()
    for number, (operation, _) in enumerate(forms):
        if operation in ("inc", "dec"):
            source[number] %= 7
            start[number] %= 7
    return _reduction("tile_reduce_integers", forms, source.reshape(-1), start)


def _reductions_float() -> ConformanceProgram:
    forms = [("add", "float32"), ("add", "float16"), ("add", "bfloat16")]
    forms += [(op, kind) for op in ("min", "max") for kind in ("float16", "bfloat16")]
    random = make_random(13, 3)

    def draw(kind: str, words: int) -> np.ndarray:
        count = words * 4 // BYTES[kind]
        values = random.standard_normal(count) * np.exp2(random.randint(-14, 8, count))
        values[:5] = [0.0, -0.0, np.inf, np.nan, 1e-40]
        if kind == "bfloat16":
            return (
                (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
            )
        return values.astype(kind).view(np.uint32)

    source = np.concatenate([draw(kind, 64) for _, kind in forms])
    start = np.stack([draw(kind, 128)[::-1].copy() for _, kind in forms])
    return _reduction("tile_reduce_floats", forms, source, start)
