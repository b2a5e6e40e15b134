"""tcgen05.cp of every shape and tcgen05.shift."""

import re

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.ptx.forms.tcgen05_copy import FORMS
from tests.virtual.exec.tensor_machine import TensorProgram, lay_out_k_major

COLUMN = 12
LANES = np.arange(128)
# Rows and bytes per row of the source; by lane, the source row it gets (-1: none).
SHAPES = {
    "128x256b": (128, 32, LANES),
    "128x128b": (128, 16, LANES),
    "4x256b": (4, 32, np.where(LANES % 32 == 0, LANES // 32, -1)),
    "64x128b.warpx2::02_13": (64, 16, LANES % 64),
    "64x128b.warpx2::01_23": (64, 16, LANES % 32 + LANES // 64 * 32),
    "32x128b.warpx4": (32, 16, LANES % 32),
}
COPIES = [f.name for f in FORMS if f.handler == "tcgen05.cp"]


def _decompress(rows, bits):
    """Groups of 16 elements, padded to 16 bytes, to one byte each: e2m1 in bits 2 to 5."""
    groups = rows.reshape(-1, 16)
    stream = np.unpackbits(groups, axis=1, bitorder="little")[:, : 16 * bits].reshape(-1, 16, bits)
    values = (
        (stream.astype(np.uint8) << np.arange(bits, dtype=np.uint8)).sum(axis=2).astype(np.uint8)
    )
    return (values << (2 if bits == 4 else 0)).astype(np.uint8).reshape(rows.shape)


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("swizzle", ["none", "128"])
def test_copies_of_every_shape(name, swizzle):
    rng = np.random.default_rng(len(name))
    ctas = int(re.search(r"cta_group::(\d)", name)[1])
    shape = next(shape for shape in SHAPES if f".{shape}" in name)
    rows, width, source_rows = SHAPES[shape]
    program = TensorProgram(ctas, columns=32)
    sources = [rng.integers(0, 256, (rows, width)).astype(np.uint8) for _ in range(ctas)]
    text = program.add_shared([lay_out_k_major(source, swizzle) for source in sources])
    program.lines.append(f"{name} [{COLUMN}], {text};")
    found, report = program.run()
    assert not report.findings
    expected = program.tensor.copy()
    for cta, source in enumerate(sources):
        data = source
        if "b8x16" in name:
            data = _decompress(source, 6 if "b6x16" in name else 4)
        words = np.ascontiguousarray(data).view(np.uint32)
        lanes = np.flatnonzero(source_rows >= 0)
        expected[cta, lanes, COLUMN : COLUMN + width // 4] = words[source_rows[lanes]]
    np.testing.assert_array_equal(found[:, :, :32], expected[:, :, :32])


def test_copy_and_product_run_in_the_order_of_issue():
    rng = np.random.default_rng(9)
    program = TensorProgram(columns=32)
    sources = [rng.integers(0, 256, (128, 32)).astype(np.uint8) for _ in range(2)]
    for source in sources:
        text = program.add_shared([lay_out_k_major(source, "128")])
        program.lines.append(f"tcgen05.cp.cta_group::1.128x256b [0], {text};")
    found, _ = program.run()
    np.testing.assert_array_equal(found[0, :, :8], sources[1].view(np.uint32))


@pytest.mark.parametrize("ctas", [1, 2])
def test_shift_moves_rows_of_one_partition_down(ctas):
    rng = np.random.default_rng(2)
    program = TensorProgram(ctas, columns=32)
    program.tensor[:] = rng.integers(0, 2**32, program.tensor.shape, dtype=np.uint64)
    program.lines.append(f"tcgen05.shift.cta_group::{ctas}.down [{(64 << 16) + 8}];")
    found, _ = program.run()
    expected = program.tensor[:, :, :32].copy()
    # Row r takes row r + 1: observed on a B200 (see shift_rows_down).
    expected[:, 64:95, 8:16] = program.tensor[:, 65:96, 8:16]
    np.testing.assert_array_equal(found[:, :, :32], expected)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("tcgen05.cp.cta_group::1.128x256b [508], S;", "column 512 is not allocated"),
        ("tcgen05.cp.cta_group::1.128x256b [0x100000], S;", "begins at lane 0"),
        ("mov.u64 S, 0; tcgen05.cp.cta_group::1.128x128b [0], S;", "bits 46-48 are 0"),
        (
            "or.b64 S, S, 0x6000000000000000; tcgen05.cp.cta_group::1.128x128b [0], S;",
            "swizzling mode",
        ),
        ("tcgen05.shift.cta_group::1.down [0x100000];", "multiple of 32"),
        ("add.u64 S, S, 0x1000; tcgen05.cp.cta_group::1.128x128b [0], S;", "tcgen05.cp"),
    ],
)
def test_bad_operands_are_faults(lines, message):
    program = TensorProgram(columns=32)
    text = program.add_shared([lay_out_k_major(np.zeros((128, 32), np.uint8), "none")])
    program.lines.append(lines.replace("S", text))
    with pytest.raises(HalfbyteError, match=message):
        program.run()
