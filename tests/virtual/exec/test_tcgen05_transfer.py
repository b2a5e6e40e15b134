"""tcgen05.ld and .st of every shape: which cell each register of each lane is."""

import re

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.ptx.forms.tcgen05_transfer import FORMS
from tests.virtual.exec.tensor_machine import TensorProgram

LANE = np.arange(32)[:, None]
SPLIT = 130
NAMES = [f.name for f in FORMS if f.handler in ("tcgen05.ld", "tcgen05.st")]
REDUCTIONS = [f.name for f in FORMS if f.handler == "tcgen05.ld.red" and ".x8." in f.name]


def _parse(name):
    shape, repetition = re.search(r"aligned\.(\w+)\.x(\d+)", name).groups()
    return shape, int(repetition), "pack::16b" in name


def _cells(shape, repetition):
    """Row and column (from the base address) of register i of every lane, [32][registers].

    PTX ISA, "Matrix fragments for shape ..."; the halves of .16x32bx2 are SPLIT columns apart.
    """
    per = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    i = np.arange(per * repetition)[None, :]
    if shape == "32x32b":
        return np.broadcast_arrays(LANE, i)
    if shape == "16x64b":
        return np.broadcast_arrays(LANE // 4 + LANE % 2 * 8, 2 * i + LANE // 2 % 2)
    if shape == "16x128b":
        return LANE // 4 + i % 2 * 8, i // 2 * 4 + LANE % 4
    if shape == "16x256b":
        return LANE // 4 + i // 2 % 2 * 8, i // 4 * 8 + LANE % 4 * 2 + i % 2
    return np.broadcast_arrays(LANE % 16, i)


def _first_column(name):
    """4, but where the access spans all columns."""
    shape, repetition, is_packed = _parse(name)
    _, column = _cells(shape, repetition)
    return 4 if (int(column.max()) + 1) * (2 if is_packed else 1) <= 508 else 0


def _places(name, warp):
    shape, repetition, is_packed = _parse(name)
    row, column = _cells(shape, repetition)
    lane = 32 * warp + row + (16 if shape != "32x32b" else 0)
    column = column * (2 if is_packed else 1) + _first_column(name)
    if shape == "16x32bx2":
        column = column + np.where(LANE >= 16, SPLIT, 0)
    return lane, column


def _address(name):
    half = 0 if _parse(name)[0] == "32x32b" else 16 << 16
    return f"shl.b32 %r50, %warp, 21; add.u32 %r50, %r50, {half + _first_column(name)};"


def _is_too_wide(name):
    shape, repetition, is_packed = _parse(name)
    return shape == "16x32bx2" and repetition * (2 if is_packed else 1) > SPLIT


def _make_program(name, registers):
    rng = np.random.default_rng(len(name))
    program = TensorProgram(columns=512)
    program.tensor[:] = rng.integers(0, 2**32, program.tensor.shape, dtype=np.uint64)
    program.extra = rng.integers(0, 2**32, (128, registers), dtype=np.uint64).astype(np.uint32)
    program.warp_lines = [
        f".reg .b32 %x<{registers}>;",
        f"ld.param.u64 %a2, [p3]; mad.wide.u32 %a3, %thread, {4 * registers}, %a2;",
        _address(name),
    ]
    return program


def _vector(registers):
    return "{" + ", ".join(f"%x{i}" for i in range(registers)) + "}"


@pytest.mark.parametrize("name", [n for n in NAMES if ".ld." in n and not _is_too_wide(n)])
def test_loads_of_every_shape(name):
    registers = _places(name, 0)[0].shape[1]
    program = _make_program(name, registers)
    split = f", {SPLIT}" if "16x32bx2" in name else ""
    program.warp_lines += [
        f"{name} {_vector(registers)}, [%r50]{split}; tcgen05.wait::ld.sync.aligned;",
        *(f"st.global.b32 [%a3+{4 * i}], %x{i};" for i in range(registers)),
    ]
    program.run()
    for warp in range(4):
        lane, column = _places(name, warp)
        expected = program.tensor[0, lane, column]
        if "pack::16b" in name:
            expected = expected & 0xFFFF | program.tensor[0, lane, column + 1] << 16
        np.testing.assert_array_equal(program.extra[32 * warp : 32 * warp + 32], expected)


@pytest.mark.parametrize("name", [n for n in NAMES if ".st." in n and not _is_too_wide(n)])
def test_stores_of_every_shape(name):
    registers = _places(name, 0)[0].shape[1]
    program = _make_program(name, registers)
    split = f"{SPLIT}, " if "16x32bx2" in name else ""
    program.warp_lines += [
        *(f"ld.global.b32 %x{i}, [%a3+{4 * i}];" for i in range(registers)),
        f"{name} [%r50], {split}{_vector(registers)}; tcgen05.wait::st.sync.aligned;",
    ]
    found, report = program.run()
    assert not report.findings
    expected = program.tensor.copy()
    for warp in range(4):
        lane, column = _places(name, warp)
        words = program.extra[32 * warp : 32 * warp + 32]
        if "unpack::16b" in name:
            expected[0, lane, column] = words & 0xFFFF
            expected[0, lane, column + 1] = words >> 16
        else:
            expected[0, lane, column] = words
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reducing_loads(name):
    program = _make_program(name, 9)
    rng = np.random.default_rng(3)
    kind = name.rpartition(".")[2]
    if kind == "f32":
        values = rng.integers(-99, 100, program.tensor.shape).astype(np.float32)
        program.tensor[:] = values.view(np.uint32)
    split = f", {SPLIT}" if "16x32bx2" in name else ""
    program.warp_lines += [
        f"{name} {_vector(8)}, %x8, [%r50]{split}; tcgen05.wait::ld.sync.aligned;",
        *(f"st.global.b32 [%a3+{4 * i}], %x{i};" for i in range(9)),
    ]
    program.gpu = "b300"
    program.run()
    for warp in range(4):
        lane, column = _places(name, warp)
        words = program.tensor[0, lane, column]
        values = words.view({"f32": np.float32, "u32": np.uint32, "s32": np.int32}[kind])
        values = np.abs(values) if ".abs" in name else values
        reduced = values.max(axis=1) if ".max" in name else values.min(axis=1)
        found = program.extra[32 * warp : 32 * warp + 32]
        np.testing.assert_array_equal(found[:, :8], words)
        np.testing.assert_array_equal(np.ascontiguousarray(found[:, 8]).view(values.dtype), reduced)


def test_the_reduction_ignores_nan_unless_asked():
    for flag, expected in (("", 5.0), (".NaN", np.nan)):
        program = TensorProgram(columns=32)
        program.tensor[:] = np.full(program.tensor.shape, 5.0, np.float32).view(np.uint32)
        program.tensor[0, :, 1] = 0x7FC00000
        program.extra = np.zeros(128, np.uint32)
        program.warp_lines = [
            ".reg .b32 %x<3>; ld.param.u64 %a2, [p3]; mad.wide.u32 %a3, %thread, 4, %a2;",
            f"shl.b32 %r50, %warp, 21; tcgen05.ld.red.sync.aligned.32x32b.x2.max{flag}.f32",
            "{%x0, %x1}, %x2, [%r50]; st.global.b32 [%a3], %x2;",
        ]
        program.run()
        np.testing.assert_array_equal(
            program.extra.view(np.float32), np.full(128, expected, np.float32)
        )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "shl.b32 %r50, %warp, 21; add.u32 %r50, %r50, 512;",
            "there are 128 lanes and 512 columns",
        ),
        ("shl.b32 %r50, %warp, 21; add.u32 %r50, %r50, 511;", "column 512 is not allocated"),
    ],
)
def test_a_warp_outside_the_columns_is_a_fault(address, message):
    program = TensorProgram(columns=32)
    program.warp_lines = [
        f".reg .b32 %x<2>; {address} tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%x0, %x1}}, [%r50];"
    ]
    with pytest.raises(HalfbyteError, match=message):
        program.run()


@pytest.mark.parametrize(
    "address", ["mov.b32 %r50, 0;", "shl.b32 %r50, %warp, 21; xor.b32 %r50, %r50, 0x200000;"]
)
def test_a_warp_reaches_its_own_lanes_whatever_the_address_says(address):
    program = TensorProgram(columns=32)
    program.tensor[:] = np.arange(128, dtype=np.uint32)[None, :, None]
    program.warp_lines = [
        f".reg .b32 %x<2>; .reg .pred %q; {address}",
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%x0}, [%r50];",
        "setp.ne.u32 %q, %x0, %thread; @%q trap;",
    ]
    _, report = program.run()
    assert "tensor-memory-lanes" in {finding.kind for finding in report.findings}
