"""mma.sync against float64 NumPy, with the fragment tables of the PTX ISA."""

import re

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.ptx.forms.mma_sync import FORMS
from tests.virtual.exec.number_codes import MINIFLOATS, encode_float, pack_words, pick_codes
from tests.virtual.run_ptx import run_lanes

LANES = np.arange(32)
GROUP = LANES >> 2
THREAD = LANES % 4
# Bits of the container that one element takes in a register.
CONTAINERS = {"f16": 16, "bf16": 16, "tf32": 32, "s4": 4, "u4": 4, "b1": 1, "f64": 64}


def _parse(name):
    shape = re.search(r"m(\d+)n8k(\d+)", name)
    tail = name[shape.end() :].split(".")
    types = [word for word in tail if word in (*CONTAINERS, *MINIFLOATS, "s8", "u8", "f32", "s32")]
    return int(shape[1]), int(shape[2]), types


def _container_bits(name, kind):
    if "mxf4" in name:
        return 4
    return CONTAINERS.get(kind, 8)


def _left_places(rows, per_register, registers):
    """Row and k of element i of every lane of A (PTX ISA, "Matrix fragments for mma")."""
    i = np.arange(per_register * registers)
    register, element = i // per_register, i % per_register
    halves = rows // 8
    row = GROUP[:, None] + 8 * (register % halves)[None, :]
    k = THREAD[:, None] * per_register + element[None, :]
    return row, k + (register // halves)[None, :] * 4 * per_register


def _right_places(per_register, registers):
    i = np.arange(per_register * registers)
    k = THREAD[:, None] * per_register + (i % per_register)[None, :]
    k = k + (i // per_register)[None, :] * 4 * per_register
    return k, np.broadcast_to(GROUP[:, None], k.shape)


def _result_places(rows):
    i = np.arange(rows // 4)
    return GROUP[:, None] + 8 * (i // 2)[None, :], THREAD[:, None] * 2 + (i % 2)[None, :]


def _to_containers(name, kind, codes):
    # kind::f8f6f4 wants the four bits of an e2m1 in the middle of the byte.
    return codes << 2 if kind == "e2m1" and "mxf4" not in name else codes


def _registers(name, kind, codes, places):
    bits = _container_bits(name, kind)
    fragment = _to_containers(name, kind, codes)[places]
    return fragment if bits == 64 else pack_words(fragment, bits)


def _run(name, operands, results):
    names = [f"%i{n}" for n in range(sum(part.shape[1] for part in operands))]
    inputs = [np.ascontiguousarray(column) for part in operands for column in part.T]
    texts, used = [], 0
    for part in operands:
        texts.append("{" + ", ".join(names[used : used + part.shape[1]]) + "}")
        used += part.shape[1]
    return inputs, texts


def _execute(name, operands, dtype, count, suffix=""):
    inputs, texts = _run(name, operands, count)
    outputs = ", ".join(f"%o{n}" for n in range(count))
    scales = texts[3:]
    body = f"{name} {{{outputs}}}, {texts[0]}, {texts[1]}, {texts[2]}{', ' if scales else ''}"
    body += f"{scales[0]}, {suffix[0]}, {scales[1]}, {suffix[1]};" if scales else ";"
    gpu = "rtx5090" if "kind::" in name else "h200"
    return np.stack(run_lanes(body, inputs, [dtype] * count, gpu=gpu), axis=1)


def _accumulators(rng, kind, rows):
    values = rng.integers(-50, 51, (rows, 8)).astype(np.float64)
    row, column = _result_places(rows)
    fragment = values[row, column]
    if kind == "f16":
        return values, pack_words(encode_float("f16", fragment), 16)
    if kind == "s32":
        return values, fragment.astype(np.int64).astype(np.uint32)
    return values, encode_float("tf32" if kind == "f32" else "f64", fragment)


def _decode_results(kind, rows, words):
    if kind == "f16":
        words = np.ascontiguousarray(words).view(np.float16)
    elif kind == "s32":
        words = words.view(np.int32)
    elif kind == "f32":
        words = words.view(np.float32)
    else:
        words = words.view(np.float64)
    found = np.zeros((rows, 8))
    found[_result_places(rows)] = words
    return found


DENSE = [f.name for f in FORMS if "block_scale" not in f.name and f.handler != "mma.sync.m8n8k4"]
SCALED = [f.name for f in FORMS if "block_scale" in f.name]
OLDEST = [f.name for f in FORMS if f.handler == "mma.sync.m8n8k4"]


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_form_multiplies_its_fragments(name):
    rng = np.random.default_rng(len(name))
    rows, depth, (result, left, right, _) = _parse(name)
    a_codes, a = pick_codes(rng, left, (rows, depth))
    b_codes, b = pick_codes(rng, right, (depth, 8))
    per_a, per_b = (max(1, 32 // _container_bits(name, kind)) for kind in (left, right))
    a_places = _left_places(rows, per_a, rows * depth // (32 * per_a))
    b_places = _right_places(per_b, 8 * depth // (32 * per_b))
    c, c_words = _accumulators(rng, result, rows)
    dtype = np.uint64 if result == "f64" else np.uint32
    operands = [
        _registers(name, left, a_codes, a_places),
        _registers(name, right, b_codes, b_places),
        c_words,
    ]  # fmt: skip
    words = _execute(name, operands, dtype, c_words.shape[1])
    product = a @ b
    if "xor" in name:
        product = (a[:, :, None] != b[None]).sum(axis=1)
    expected = product + c
    if result == "f16":
        expected = expected.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(_decode_results(result, rows, words), expected)


@pytest.mark.parametrize("name", SCALED)
def test_every_block_scaled_form_scales_its_blocks(name):
    rng = np.random.default_rng(len(name))
    rows, depth, (_, left, right, _, scale) = _parse(name)
    count = int(re.search(r"scale_vec::(\d)X", name)[1])
    a_codes, a = pick_codes(rng, left, (rows, depth))
    b_codes, b = pick_codes(rng, right, (depth, 8))
    legal = np.flatnonzero(
        np.isin(MINIFLOATS[scale], [0.5, 1, 2, 4, 1.5] if scale == "ue4m3" else [0.5, 1, 2, 4])
    )
    per_a, per_b = (32 // _container_bits(name, kind) for kind in (left, right))
    a_places = _left_places(rows, per_a, rows * depth // (32 * per_a))
    b_places = _right_places(per_b, 8 * depth // (32 * per_b))
    c, c_words = _accumulators(rng, "f32", rows)
    for byte_a, thread_a, byte_b, thread_b in _selectors(count):
        a_scale_codes = rng.choice(legal, (32, 4)).astype(np.uint8)
        b_scale_codes = rng.choice(legal, (32, 4)).astype(np.uint8)
        rows_of_a = np.arange(rows)
        a_lane = 4 * (rows_of_a % 8) + 2 * thread_a + rows_of_a // 8
        b_lane = 4 * np.arange(8) + thread_b
        table = np.array(MINIFLOATS[scale])
        a_scale = table[a_scale_codes[a_lane, byte_a : byte_a + count]].repeat(
            depth // count, axis=1
        )
        b_scale = table[b_scale_codes[b_lane, byte_b : byte_b + count]].repeat(
            depth // count, axis=1
        )
        operands = [
            _registers(name, left, a_codes, a_places),
            _registers(name, right, b_codes, b_places),
            c_words,
            a_scale_codes.view(np.uint32),
            b_scale_codes.view(np.uint32),
        ]
        suffix = (f"{{{byte_a}, {thread_a}}}", f"{{{byte_b}, {thread_b}}}")
        words = _execute(name, operands, np.uint32, 4, suffix)
        expected = (a * a_scale) @ (b * b_scale.T) + c
        np.testing.assert_array_equal(_decode_results("f32", rows, words), expected)


def _selectors(count):
    return {
        1: [(0, 0, 3, 0), (1, 1, 2, 1), (2, 0, 1, 2), (3, 1, 0, 3)],
        2: [(0, 0, 2, 3), (2, 1, 0, 2)],
        4: [(0, 0, 0, 1), (0, 1, 0, 0)],
    }[count]


@pytest.mark.parametrize("name", OLDEST)
def test_the_oldest_shape_multiplies_four_times(name):
    rng = np.random.default_rng(len(name))
    _, a_major, b_major = re.search(r"(m8n8k4)\.(\w+)\.(\w+)", name).groups()
    kind = name.rpartition(".")[2]
    a = rng.integers(-4, 5, (4, 8, 4)).astype(np.float64)
    b = rng.integers(-4, 5, (4, 4, 8)).astype(np.float64)
    c = rng.integers(-9, 10, (4, 8, 8)).astype(np.float64)
    pair, is_high, low = LANES % 16 // 4, LANES >= 16, LANES % 4
    i = np.arange(4)[None, :]
    own, other = (low + 4 * is_high)[:, None], i + 4 * is_high[:, None]
    a_fragment = (
        a[pair[:, None], own, i] if a_major == "row" else a[pair[:, None], other, low[:, None]]
    )
    b_fragment = (
        b[pair[:, None], low[:, None], other] if b_major == "row" else b[pair[:, None], i, own]
    )
    j = np.arange(8)[None, :]
    if kind == "f16":
        row, column = np.broadcast_arrays(own, j)
        c_words = pack_words(encode_float("f16", c[pair[:, None], row, column]), 16)
    else:
        row = (LANES & 1)[:, None] + (j & 2) + 4 * is_high[:, None]
        column = (j & 4) + (LANES & 2)[:, None] + (j & 1)
        c_words = encode_float("tf32", c[pair[:, None], row, column])
    halves = [pack_words(encode_float("f16", part), 16) for part in (a_fragment, b_fragment)]
    words = _execute(name, [*halves, c_words], np.uint32, c_words.shape[1])
    found = np.zeros((4, 8, 8))
    found[pair[:, None], row, column] = words.view(np.float16 if kind == "f16" else np.float32)
    np.testing.assert_array_equal(found, a @ b + c)


def test_saturation_stops_where_the_plain_form_wraps():
    ones = np.full((32, 1), 0x7F7F7F7F, np.uint32)
    full = np.full((32, 2), 2**31 - 1, np.uint32)
    plain = _execute(
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32", [ones, ones, full], np.uint32, 2
    )
    stopped = _execute(
        "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32", [ones, ones, full], np.uint32, 2
    )
    assert (plain == np.uint32(2**31 - 1 + 16 * 127 * 127)).all()
    assert (stopped == 2**31 - 1).all()


def test_destinations_may_be_sources_in_another_order():
    body = """mov.b32 %t0, %i0; mov.b32 %t1, %i1;
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%t1, %t0}, {%i2}, {%i2}, {%t0, %t1};
    mov.b32 %o0, %t1; mov.b32 %o1, %t0;"""
    first, second = LANES.astype(np.uint32), (100 + LANES).astype(np.uint32)
    low, high = run_lanes(body, [first, second, np.zeros(32, np.uint32)], [np.uint32, np.uint32])
    assert (low == first).all()
    assert (high == second).all()


def test_an_illegal_scale_selector_is_a_fault():
    name = next(name for name in SCALED if "scale_vec::2X" in name)
    operands = [np.zeros((32, n), np.uint32) for n in (4, 2, 4, 1, 1)]
    with pytest.raises(HalfbyteError, match="byte-id 1 and thread-id 0 of matrix A"):
        _execute(name, operands, np.uint32, 4, ("{1, 0}", "{0, 0}"))
