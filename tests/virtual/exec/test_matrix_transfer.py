"""ldmatrix, stmatrix and movmatrix, with the fragments of the PTX ISA."""

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.ptx.forms.matrix_transfer import FORMS
from tests.virtual.exec.number_codes import pack_words
from tests.virtual.run_ptx import run_lanes

LANE = np.arange(32)
SHARED = ".shared .align 128 .b8 memory[2048];"
LOADS = [f.name for f in FORMS if f.name.startswith("ldmatrix") and ".shared" in f.name]
STORES = [f.name for f in FORMS if f.name.startswith("stmatrix") and ".shared" in f.name]


def _count(name):
    return int(name.split(".x")[1][0])


def _fill(words):
    """Store each lane's 64 bytes (16 words, inputs 0 to 15) at 64 * lane."""
    lines = ["mov.u32 %t0, memory; shl.b32 %t1, %lane, 6; add.u32 %t1, %t0, %t1;"]
    lines += [f"st.shared.b32 [%t1+{4 * i}], %i{i};" for i in range(16)]
    return "\n".join([*lines, "bar.warp.sync 0xFFFFFFFF;"])


def _run(name, image, offsets, registers):
    words = image.view(np.uint32).reshape(32, 16)
    inputs = [*np.ascontiguousarray(words.T), offsets.astype(np.uint32)]
    outputs = ", ".join(f"%o{i}" for i in range(registers))
    body = f"{_fill(words)}\nadd.u32 %t2, %t0, %i16; {name} {{{outputs}}}, [%t2];"
    found = run_lanes(body, inputs, [np.uint32] * registers, registers=SHARED)
    return np.stack(found, axis=1)


def _rows(image, offsets, count):
    return np.stack([image[o : o + 16] for o in offsets[:count]])


def _spread(row, bits):
    """One byte per element of a row: 16 elements packed from bit 0 on."""
    stream = np.unpackbits(row, bitorder="little")[: 16 * bits].reshape(16, bits)
    return (stream << np.arange(bits)).sum(axis=1).astype(np.uint8)


def _expect_load(name, image, offsets):
    count, is_turned = _count(name), ".trans" in name
    if name.endswith(".b16"):
        matrices = _rows(image, offsets, 8 * count).view(np.uint16).reshape(count, 8, 8)
        if is_turned:
            matrices = matrices.transpose(0, 2, 1)
        pairs = np.ascontiguousarray(matrices).reshape(count, 32, 2)
        return pack_words(pairs, 16)[..., 0].T
    bits = 6 if "b6x16" in name else 4 if "b4x16" in name else 8
    height = 16 if "m16n16" in name else 8
    rows = _rows(image, offsets, height * count)
    if bits < 8:
        rows = np.stack([_spread(row, bits) for row in rows])
    matrices = rows.reshape(count, height, 16)
    if is_turned:
        matrices = matrices.transpose(0, 2, 1)
    columns = []
    for matrix in matrices:
        for first in range(0, height, 8):
            part = matrix[first + LANE // 4]
            picked = np.stack([part[LANE, 4 * (LANE % 4) + i] for i in range(4)], axis=1)
            columns.append(pack_words(picked, 8)[:, 0])
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("name", LOADS)
def test_loads_give_each_lane_its_fragment(name):
    rng = np.random.default_rng(len(name))
    image = rng.integers(0, 256, 2048).astype(np.uint8)
    offsets = rng.permutation(128)[:32] * 16
    expected = _expect_load(name, image, offsets)
    np.testing.assert_array_equal(_run(name, image, offsets, expected.shape[1]), expected)


def _expect_store(name, words, offsets):
    image = np.full(2048, 0xEE, np.uint8)
    for m in range(_count(name)):
        if name.endswith(".b16"):
            matrix = np.ascontiguousarray(words[:, m]).view(np.uint16).reshape(8, 8)
            rows = np.ascontiguousarray(matrix.T if ".trans" in name else matrix).view(np.uint8)
        else:
            # Bytes 0 and 1 of lane 4r + c: row r, columns 2c and 2c + 1; bytes 2 and 3: row r + 8.
            parts = np.ascontiguousarray(words[:, m]).view(np.uint8).reshape(32, 4)
            matrix = np.zeros((16, 8), np.uint8)
            for i in range(4):
                matrix[LANE // 4 + 8 * (i // 2), 2 * (LANE % 4) + i % 2] = parts[:, i]
            rows = np.ascontiguousarray(matrix.T)
        for row in range(8):
            start = offsets[8 * m + row]
            image[start : start + 16] = rows[row]
    return image


@pytest.mark.parametrize("name", STORES)
def test_stores_put_each_fragment_in_its_row(name):
    rng = np.random.default_rng(len(name))
    count = _count(name)
    words = rng.integers(0, 2**32, (32, count), dtype=np.uint64).astype(np.uint32)
    offsets = (rng.permutation(128)[:32] * 16).astype(np.uint32)
    sources = ", ".join(f"%i{i}" for i in range(count))
    body = "\n".join(
        [
            "mov.u32 %t0, memory; shl.b32 %t1, %lane, 6; add.u32 %t1, %t0, %t1;",
            "mov.b32 %t3, 0xEEEEEEEE;",
            *(f"st.shared.b32 [%t1+{4 * i}], %t3;" for i in range(16)),
            f"bar.warp.sync 0xFFFFFFFF; add.u32 %t2, %t0, %i{count};",
            f"{name} [%t2], {{{sources}}};",
            "bar.warp.sync 0xFFFFFFFF;",
            *(f"ld.shared.b32 %o{i}, [%t1+{4 * i}];" for i in range(16)),
        ]
    )
    inputs = [*np.ascontiguousarray(words.T), offsets]
    found = run_lanes(body, inputs, [np.uint32] * 16, registers=SHARED)
    image = np.ascontiguousarray(np.stack(found, axis=1)).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(image, _expect_store(name, words, offsets))


def test_generic_addresses_reach_shared_memory():
    image = np.arange(2048).astype(np.uint8)
    words = np.ascontiguousarray(image.view(np.uint32).reshape(32, 16).T)
    body = (
        f"{_fill(words)}\ncvt.u64.u32 %d0, %t0; cvta.shared.u64 %d0, %d0;"
        "mul.wide.u32 %d1, %lane, 16;"
        "add.u64 %d0, %d0, %d1; ldmatrix.sync.aligned.m8n8.x1.b16 {%o0}, [%d0];"
    )
    (found,) = run_lanes(body, list(words), [np.uint32], registers=SHARED)
    np.testing.assert_array_equal(found, image[:128].view(np.uint32))


def test_movmatrix_transposes():
    values = np.arange(64).astype(np.uint16)
    (found,) = run_lanes(
        "movmatrix.sync.aligned.m8n8.trans.b16 %o0, %i0;", [values.view(np.uint32)], [np.uint32]
    )
    expected = np.ascontiguousarray(values.reshape(8, 8).T).view(np.uint32).reshape(-1)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("offset", "message"), [(8, "align"), (1 << 20, "shared"), (2048 + 16, "shared|bounds")]
)
def test_a_bad_row_address_is_a_fault(offset, message):
    body = (
        f"mov.u32 %t0, memory; add.u32 %t0, %t0, {offset};"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%o0}, [%t0];"
    )
    with pytest.raises(HalfbyteError, match=message):
        run_lanes(body, [], [np.uint32], registers=SHARED)


def test_addresses_of_lanes_that_name_no_row_are_not_read():
    image = np.arange(2048).astype(np.uint8)
    offsets = np.where(LANE < 8, 16 * LANE, 1 << 22)
    found = _run("ldmatrix.sync.aligned.m8n8.x1.shared.b16", image, offsets, 1)
    np.testing.assert_array_equal(found[:, 0], image[:128].view(np.uint32))


def test_a_divergent_warp_is_a_fault():
    body = (
        "mov.u32 %t0, memory; setp.lt.u32 %p0, %lane, 16; @!%p0 bra out;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%o0}, [%t0]; out:"
    )
    with pytest.raises(HalfbyteError):
        run_lanes(body, [], [np.uint32], registers=SHARED)
