"""tcgen05.mma with block scaling against float64 NumPy."""

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from tests.virtual.exec.number_codes import MINIFLOATS
from tests.virtual.exec.tensor_machine import TensorProgram
from tests.virtual.exec.tensor_products import (
    Case,
    expect_accumulators,
    make_operands,
    place_operands,
    put_accumulators,
    scaled_descriptor,
)

D_COLUMN, A_COLUMN, SFA_COLUMN, SFB_COLUMN = 0, 256, 288, 304
SCALES = {"ue8m0": (0.25, 0.5, 1.0, 2.0, 4.0), "ue4m3": (0.5, 1.0, 1.5, 2.0, 3.0)}


def _case(kind, left, right, rows, columns, ctas, memory="shared", depth=0, swizzle="128"):
    return Case(
        kind,
        left,
        right,
        "f32",
        rows,
        columns,
        ctas,
        swizzle=swizzle,
        left_memory=memory,
        depth=depth,
    )


# Qualifier, scale format, and ids of A and B.
PLAIN = [
    (_case("mxf8f6f4", "e4m3", "e5m2", 128, 128, 1), "block32", "ue8m0", (0, 3)),
    (_case("mxf8f6f4", "e2m1", "e4m3", 128, 24, 1), "scale_vec::1X", "ue8m0", (1, 2)),
    (_case("mxf8f6f4", "e3m2", "e2m3", 256, 64, 2, swizzle="64"), "block32", "ue8m0", (2, 1)),
    (_case("mxf8f6f4", "e2m3", "e2m1", 128, 96, 2), "", "ue8m0", (3, 0)),
    (_case("mxf8f6f4", "e2m1", "e3m2", 128, 64, 1, "tensor"), "block32", "ue8m0", (2, 2)),
    (_case("mxf8f6f4", "e3m2", "e4m3", 256, 256, 2, "tensor"), "block32", "ue8m0", (1, 1)),
    (_case("mxf4", "e2m1", "e2m1", 128, 192, 1), "block32", "ue8m0", (0, 2)),
    (_case("mxf4", "e2m1", "e2m1", 128, 64, 2, swizzle="32"), "", "ue8m0", (2, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 256, 1), "block16", "ue4m3", (0, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 256, 256, 2), "block16", "ue4m3", (0, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 192, 2), "scale_vec::4X", "ue4m3", (0, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 256, 2, "tensor"), "block16", "ue8m0", (0, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 8, 1, swizzle="none"), "block16", "ue8m0", (0, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 256, 32, 2), "scale_vec::2X", "ue8m0", (2, 2)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 40, 1, "tensor"), "block32", "ue8m0", (2, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 128, 256, 1, depth=96), "block16", "ue4m3", (2, 0)),
    (_case("mxf4nvf4", "e2m1", "e2m1", 256, 128, 2, depth=96), "block32", "ue8m0", (3, 1)),
]  # fmt: skip


def _factors(kind, qualifier, depth):
    if kind == "mxf8f6f4":
        return 1
    return depth // (16 if qualifier in ("block16", "scale_vec::4X") else 32)


def _pick_scales(rng, kind, shape):
    table = np.array(MINIFLOATS[kind])
    codes = rng.choice([int(np.flatnonzero(table == value)[0]) for value in SCALES[kind]], shape)
    return codes.astype(np.uint8), table[codes]


def _put_scales(tensor, codes, column, first_byte, partitions):
    """Row r: lane r % 32 of the partitions, column r // 32; four factors per word, and the words of
    128 rows at a time are adjacent (PTX ISA, "Scale factor A ID", "Scale factor B ID")."""
    rows, factors = codes.shape
    as_bytes = tensor.view(np.uint8).reshape(tensor.shape[0], -1, 4)
    words = (rows + 127) // 128 * 4
    for row in range(rows):
        for factor in range(factors):
            word, byte = divmod(first_byte + factor, 4)
            place = column + row // 32 + word * words
            for partition in partitions:
                as_bytes[32 * partition + row % 32, place, byte] = codes[row, factor]


def _place_scales(program, case, a_codes, b_codes, ids):
    rows = case.rows // case.ctas
    is_two_by_two = case.ctas == 2 and case.rows == 128
    for cta in range(case.ctas):
        own = a_codes[cta * rows : (cta + 1) * rows]
        _put_scales(program.tensor[cta], own, SFA_COLUMN, ids[0], range(4))
        if is_two_by_two:
            half = case.columns // 2
            _put_scales(program.tensor[cta], b_codes[:half], SFB_COLUMN, ids[1], (0, 1))
            _put_scales(program.tensor[cta], b_codes[half:], SFB_COLUMN, ids[1], (2, 3))
        else:
            _put_scales(program.tensor[cta], b_codes, SFB_COLUMN, ids[1], range(4))


@pytest.mark.parametrize(("case", "qualifier", "scale", "ids"), PLAIN, ids=str)
def test_blocks_are_scaled(case, qualifier, scale, ids):
    rng = np.random.default_rng(case.columns)
    program = TensorProgram(case.ctas, columns=352, gpu="b300" if case.depth == 96 else "b200")
    a_codes, a, b_codes, b = make_operands(case, rng)
    factors = _factors(case.kind, qualifier, case.k)
    sfa_codes, sfa = _pick_scales(rng, scale, (case.rows, factors))
    sfb_codes, sfb = _pick_scales(rng, scale, (case.columns, factors))
    old = rng.integers(-20, 21, (case.rows, case.columns)).astype(np.float64)
    put_accumulators(program, case, D_COLUMN, old)
    _place_scales(program, case, sfa_codes, sfb_codes, ids)
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    word = f".{qualifier}" if qualifier else ""
    program.lines.append(
        f"tcgen05.mma.cta_group::{case.ctas}.kind::{case.kind}.block_scale{word} [{D_COLUMN}], "
        f"{a_text}, {b_text}, {scaled_descriptor(case, scale, ids):#x}, [{SFA_COLUMN}], "
        f"[{SFB_COLUMN}], %yes;"
    )
    found, report = program.run()
    assert not report.findings
    block = case.k // factors
    values = (a * sfa.repeat(block, axis=1)) @ (b * sfb.repeat(block, axis=1)).T + old
    before = program.tensor[:, :, :352]
    expected = expect_accumulators(before, case, D_COLUMN, values)
    np.testing.assert_array_equal(found[:, :, :352], expected)


@pytest.mark.parametrize("partition", range(4))
def test_every_partition_scales_with_its_own_copy(partition):
    case = _case("mxf4nvf4", "e2m1", "e2m1", 128, 64, 1)
    rng = np.random.default_rng(partition)
    program = TensorProgram(columns=352)
    a_codes, a, b_codes, b = make_operands(case, rng)
    one = np.full((128, 4), int(np.flatnonzero(np.array(MINIFLOATS["ue4m3"]) == 1)[0]), np.uint8)
    two = np.full((128, 4), int(np.flatnonzero(np.array(MINIFLOATS["ue4m3"]) == 2)[0]), np.uint8)
    _put_scales(program.tensor[0], one, SFA_COLUMN, 0, range(4))
    _put_scales(program.tensor[0], one[:64], SFB_COLUMN, 0, range(4))
    _put_scales(program.tensor[0], two[:64], SFB_COLUMN, 0, [partition])
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    program.lines.append(
        f"tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [0], {a_text}, {b_text}, "
        f"{scaled_descriptor(case, 'ue4m3', (0, 0)):#x}, [{SFA_COLUMN}], [{SFB_COLUMN}], %no;"
    )
    found, _ = program.run()
    values = a @ b.T
    values[32 * partition : 32 * partition + 32] *= 2
    np.testing.assert_array_equal(found[0, :, :64].view(np.float32), values)


@pytest.mark.parametrize(
    ("kind", "qualifier", "flip", "message"),
    [
        ("mxf8f6f4", "block32", 1 << 23, "field 'scale type'"),
        ("mxf8f6f4", "block32", 1 << 31, "field 'K dimension'"),
        ("mxf4nvf4", "block16", 1 << 29, "field 'scale factor id of A'"),
        ("mxf4", "block32", 1 << 4, "field 'scale factor id of B'"),
        ("mxf4", "block32", 1 << 24, "field 'reserved'"),
        ("mxf4", "block32", 1 << 15, "field 'transpose A'"),
        ("mxf4nvf4", "block16", 2 << 7, "field 'A type'"),
        ("mxf8f6f4", "block32", 2 << 7, "field 'A type'"),
        ("mxf8f6f4", "block32", 3 << 27, "M = 256"),
        ("mxf4nvf4", "block32", 1 << 31, "sm_103a alone"),
    ],
)
def test_an_illegal_descriptor_names_the_field(kind, qualifier, flip, message):
    element = "e4m3" if kind == "mxf8f6f4" else "e2m1"
    case = _case(kind, element, element, 128, 64, 1)
    program = TensorProgram(columns=352)
    a_codes, _, b_codes, _ = make_operands(case, np.random.default_rng(0))
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    bits = scaled_descriptor(case, "ue8m0", (0, 0)) ^ flip
    program.lines.append(
        f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale.{qualifier} [0], {a_text}, {b_text}, "
        f"{bits:#x}, [{SFA_COLUMN}], [{SFB_COLUMN}], %no;"
    )
    with pytest.raises(HalfbyteError, match=message):
        program.run()
