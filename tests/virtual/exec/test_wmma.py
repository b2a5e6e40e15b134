"""wmma.load, .mma and .store together: D = A*B + C from memory to memory."""

import re

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.forms.wmma import FORMS
from tests.virtual.exec.number_codes import encode_float, pick_codes
from tests.virtual.run_ptx import launch

BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
NUMPY = {"f16": np.float16, "f32": np.float32, "s32": np.int32, "f64": np.float64}
PRODUCTS = [f.name for f in FORMS if f.handler == "wmma.mma"]
PRODUCTS += [
    "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16",
    "wmma.mma.sync.aligned.col.row.m16n16k16.f16.f32",
    "wmma.mma.sync.aligned.col.col.m32n8k16.f32.bf16.bf16.f32",
    "wmma.mma.sync.aligned.row.row.m8n32k16.s32.u8.s8.s32",
    "wmma.mma.and.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32",
]


def _store(element, codes, layout, padding):
    """Bytes of a matrix [rows][columns] in a layout, rows (or columns) `padding` elements apart."""
    matrix = codes if layout == "row" else codes.T
    wide = np.zeros((matrix.shape[0], matrix.shape[1] + padding), codes.dtype)
    wide[:, : matrix.shape[1]] = matrix
    bits = BITS.get(element, 0)
    if bits == 1:
        data = np.packbits(wide, axis=1, bitorder="little")
    elif bits == 4:
        data = (wide[:, 0::2] | wide[:, 1::2] << 4).astype(np.uint8)
    else:
        data = wide
    return np.ascontiguousarray(data).view(np.uint8).reshape(-1), wide.shape[1]


def _declare(name, operand):
    count, width = (
        INSTRUCTION_FORMS[name].patterns[operand].count,
        INSTRUCTION_FORMS[name].patterns[operand].width,
    )
    return [f"%{'dabc'[operand]}{i}" for i in range(count)], width


def _accumulator(kind, values):
    return values.astype(np.int32) if kind == "s32" else values.astype(NUMPY[kind])


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_products_from_memory_to_memory(name, space):
    rng = np.random.default_rng(len(name))
    a_layout, b_layout = re.search(r"aligned\.(row|col)\.(row|col)", name).groups()
    shape = re.search(r"m(\d+)n(\d+)k(\d+)", name)
    m, n, k = map(int, shape.groups())
    types = name[shape.end() + 1 :].split(".")
    result, addend = types[0], types[-1]
    left, right = types[1:3] if len(types) == 4 else ("f16", "f16")
    a_codes, a = pick_codes(rng, left, (m, k))
    b_codes, b = pick_codes(rng, right, (k, n))
    c = rng.integers(-9, 10, (m, n)).astype(np.float64)
    padding = 0 if BITS.get(left) in (1, 4) else 16
    a_bytes, a_stride = _store(left, a_codes, a_layout, padding)
    b_bytes, b_stride = _store(right, b_codes, b_layout, padding)
    c_words = _accumulator(addend, c)
    d_words = np.full((n, m), 99).astype(NUMPY[result])
    parts = [_declare(name, i) for i in range(4)]
    where = shape[0]
    d_text, a_text, b_text, c_text = ("{" + ", ".join(names) + "}" for names, _ in parts)
    lines = [
        *(f".reg .{width} {', '.join(names)};" for names, width in parts),
        ".reg .b64 %p<4>;",
        *(f"ld.param.u64 %p{i}, [p{i}];" for i in range(4)),
        f"wmma.load.a.sync.aligned.{a_layout}.{where}.global.{left} {a_text}, [%p0], {a_stride};",
        f"wmma.load.b.sync.aligned.{b_layout}.{where}.global.{right} {b_text}, [%p1], {b_stride};",
        f"wmma.load.c.sync.aligned.row.{where}.global.{addend} {c_text}, [%p2];",
        f"{name} {d_text}, {a_text}, {b_text}, {c_text};",
    ]
    if space == "shared":
        lines += [
            ".reg .b32 %s; mov.u32 %s, tile;",
            f"wmma.store.d.sync.aligned.row.{where}.shared.{result} [%s], {d_text};",
            f"wmma.load.c.sync.aligned.row.{where}.shared.{result} {d_text}, [%s];",
        ]
    lines.append(f"wmma.store.d.sync.aligned.col.{where}.global.{result} [%p3], {d_text};")
    launch(
        "\n".join(lines), [a_bytes, b_bytes, c_words, d_words], gpu="h200",
        head=".shared .align 128 .b8 tile[4096];",
    )  # fmt: skip
    product = a @ b
    if "xor" in name:
        product = (a[:, :, None] != b[None]).sum(axis=1)
    np.testing.assert_array_equal(d_words.T, _accumulator(result, product + c))


def test_a_load_past_its_buffer_is_a_fault():
    source = encode_float("f16", np.zeros((16, 15)))
    body = (
        ".reg .b64 %p; .reg .b32 %a<8>; ld.param.u64 %p, [p0];"
        "wmma.load.a.sync.aligned.row.m16n16k16.global.f16"
        "{%a0, %a1, %a2, %a3, %a4, %a5, %a6, %a7}, [%p];"
    )
    with pytest.raises(HalfbyteError, match="out-of-bounds"):
        launch(body, [source], gpu="h200")
