"""tcgen05.mma without block scaling against float64 NumPy."""

import itertools

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from tests.virtual.exec.tensor_machine import TensorProgram
from tests.virtual.exec.tensor_products import (
    Case,
    expect_accumulators,
    make_operands,
    place_operands,
    plain_descriptor,
    put_accumulators,
)

D_COLUMN, A_COLUMN = 0, 256
ELEMENTS = {
    "f16": (("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "bf16", "f32")),
    "tf32": (("tf32", "tf32", "f32"),),
    "i8": (("s8", "u8", "s32"), ("u8", "s8", "s32"), ("s8", "s8", "s32")),
    "f8f6f4": (
        ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("e2m1", "e4m3", "f32"),
        ("e3m2", "e2m3", "f32"), ("e2m3", "e2m1", "f16"),
    ),
}  # fmt: skip
SUB_BYTE = ("e2m1", "e2m3", "e3m2")


def _shapes():
    yield from ((1, 64, 8), (1, 64, 48), (1, 128, 16), (1, 128, 256), (2, 128, 32), (2, 256, 64))


def _modes(kind, left, right):
    swizzles = ("none", "32", "64", "128")
    yield from ((s, "k", "k", "shared") for s in swizzles)
    yield ("128", "k", "k", "tensor")
    if left in SUB_BYTE or right in SUB_BYTE:
        return
    transposed = ("128/32",) if kind == "tf32" else swizzles
    yield from ((s, "mn", "mn", "shared") for s in transposed)
    yield (transposed[-1], "mn", "k", "shared")
    yield (transposed[-1], "k", "mn", "tensor")


def _is_legal(case):
    n, step = case.columns, 8 * case.ctas
    if case.kind == "i8":
        step = 32 if case.ctas == 2 else 16 if n > 32 else 8
    if case.right_major == "mn" and case.kind in ("i8", "f8f6f4"):
        step = 16 * case.ctas
    # An MN-major swizzle atom spans more than a small operand: nothing to lay out.
    span = {"none": 16, "32": 32, "64": 64, "128": 128, "128/32": 128}[case.swizzle]
    width = {"f16": 2, "tf32": 4}.get(case.kind, 1)
    is_wide = case.right_major == "k" or n // case.ctas * width % span == 0
    return n % step == 0 and is_wide


def _list_cases():
    """Every kind with every format, shape and mode, each pair of them at least once."""
    cases = []
    for kind, elements in ELEMENTS.items():
        for i, ((left, right, result), (ctas, rows, columns)) in enumerate(
            itertools.product(elements, _shapes())
        ):
            modes = list(_modes(kind, left, right))
            for j in range(3):
                swizzle, a_major, b_major, memory = modes[(3 * i + j) % len(modes)]
                case = Case(
                    kind,
                    left,
                    right,
                    result,
                    rows,
                    columns,
                    ctas,
                    a_major,
                    b_major,
                    swizzle,
                    memory,
                )
                cases += [case] if _is_legal(case) else []
    return list(dict.fromkeys(cases))


def _issue(program, case, a_text, b_text, *, accumulate, idesc=None, rest="", suffix=""):
    word = "tcgen05.mma.ws" if case.stationary else "tcgen05.mma"
    descriptor = plain_descriptor(case) if idesc is None else idesc
    predicate = "%yes" if accumulate else "%no"
    rest = rest.replace("PRED", predicate) or predicate
    program.lines.append(
        f"{word}.cta_group::{case.ctas}.kind::{case.kind}{suffix} "
        f"[{D_COLUMN}], {a_text}, {b_text}, {descriptor:#x}, {rest};"
    )


def _run(case, *, accumulate=True, seed=0, rest="", suffix="", scale=1.0):
    rng = np.random.default_rng(seed)
    program = TensorProgram(case.ctas, columns=288)
    a_codes, a, b_codes, b = make_operands(case, rng)
    old = rng.integers(-20, 21, (case.rows, case.columns)).astype(np.float64)
    put_accumulators(program, case, D_COLUMN, old)
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    _issue(program, case, a_text, b_text, accumulate=accumulate, rest=rest, suffix=suffix)
    found, report = program.run()
    assert not report.findings
    signs = [-1.0 if flag else 1.0 for flag in case.negate]
    values = (signs[0] * a) @ (signs[1] * b).T + (scale * old if accumulate else 0)
    return program.tensor[:, :, :288], found[:, :, :288], values, old


@pytest.mark.parametrize("case", _list_cases(), ids=str)
def test_products_of_every_kind_format_shape_and_layout(case):
    before, found, values, _ = _run(case, accumulate=case.columns != 48)
    np.testing.assert_array_equal(found, expect_accumulators(before, case, D_COLUMN, values))


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("memory", ["shared", "tensor"])
@pytest.mark.parametrize(("kind", "left", "result"), [("f16", "f16", "f32"), ("i8", "s8", "s32")])
def test_weight_stationary_products(rows, memory, kind, left, result):
    case = Case(kind, left, left, result, rows, 64, left_memory=memory, stationary=True)
    before, found, values, _ = _run(case, suffix=".collector::b1::fill")
    np.testing.assert_array_equal(found, expect_accumulators(before, case, D_COLUMN, values))


def test_zero_columns_of_a_stationary_product():
    # PTX ISA, "Zero-column mask descriptor", example 3: M = 64, runs of 4 used and 3 zero columns.
    case = Case("f16", "f16", "f16", "f32", 64, 64, stationary=True)
    bits = 1 << 32 | 1 << 39 | 2 << 40 | 3 << 48
    before, found, values, old = _run(case, rest=f"PRED, {bits:#x}")
    zeros = np.array(([1, 1, 1, 0, 0, 0, 0] * 5)[:32] + ([0, 0, 0, 0, 1, 1, 1] * 5)[:32], bool)
    expected = np.where(zeros, old, values)
    np.testing.assert_array_equal(found, expect_accumulators(before, case, D_COLUMN, expected))


@pytest.mark.parametrize("negate", [(0, 1), (1, 0), (1, 1)])
def test_operands_are_negated(negate):
    case = Case("f16", "f16", "f16", negate=negate)
    before, found, values, _ = _run(case)
    np.testing.assert_array_equal(found, expect_accumulators(before, case, D_COLUMN, values))


def test_scale_input_d_divides_the_old_accumulator():
    case = Case("f16", "f16", "f16")
    before, found, values, _ = _run(case, rest="PRED, 3", scale=2.0**-3)
    np.testing.assert_array_equal(found, expect_accumulators(before, case, D_COLUMN, values))


@pytest.mark.parametrize("ctas", [1, 2])
def test_disabled_lanes_keep_what_they_hold(ctas):
    case = Case("f16", "f16", "f16", rows=128 * ctas, ctas=ctas)
    masks = [0xF0F0F0F0, 1, 0x80000000, 0xFFFF0000, 2, 4, 8, 16][: 4 * ctas]
    rest = "{" + ", ".join(hex(mask) for mask in masks) + "}, PRED"
    before, found, values, _ = _run(case, rest=rest)
    expected = expect_accumulators(before, case, D_COLUMN, values)
    for cta in range(ctas):
        for lane in range(128):
            if masks[4 * cta + lane // 32] >> (lane % 32) & 1:
                expected[cta, lane] = before[cta, lane]
    np.testing.assert_array_equal(found, expected)


def test_integers_saturate_only_where_asked():
    for saturate, last in ((0, 2**31 - 2**32 + 32 * 255 * 127 - 1), (1, 2**31 - 1)):
        case = Case("i8", "u8", "s8", "s32", saturate=saturate)
        program = TensorProgram(columns=288)
        a_codes = np.full((case.rows, 32), 255, np.uint8)
        b_codes = np.full((case.columns, 32), 127, np.uint8)
        put_accumulators(program, case, D_COLUMN, np.full((case.rows, case.columns), 2**31 - 1.0))
        a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
        _issue(program, case, a_text, b_text, accumulate=True)
        found, _ = program.run()
        assert (found[0, :, : case.columns].view(np.int32) == last).all()


def test_a_k_step_moves_the_start_inside_the_swizzle_atom():
    case = Case("f16", "f16", "f16", columns=64)
    rng = np.random.default_rng(5)
    wide = Case("f16", "f16", "f16", columns=64, depth=64)
    a_codes, a, b_codes, b = make_operands(wide, rng)
    program = TensorProgram(columns=288)
    a_text, b_text = place_operands(program, wide, a_codes, b_codes, A_COLUMN)
    for step in range(4):
        for text in (a_text, b_text):
            program.lines.append(f"add.u64 {text}, {text}, {2 if step else 0};")
        _issue(program, case, a_text, b_text, accumulate=step > 0)
    found, _ = program.run()
    expected = expect_accumulators(program.tensor[:, :, :288], case, D_COLUMN, a @ b.T)
    np.testing.assert_array_equal(found[:, :, :288], expected)


GOOD = plain_descriptor(Case("f16", "f16", "f16"))


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [
        ("f16", GOOD | 1 << 2, "field 'sparsity'"),
        ("f16", GOOD | 1 << 6, "field 'reserved'"),
        ("f16", GOOD | 1 << 3, "field 'saturate'"),
        ("f16", GOOD & ~(3 << 4) | 2 << 4, "field 'D type'"),
        ("f16", GOOD | 2 << 7, "field 'A type'"),
        ("tf32", GOOD, "field 'A type'"),
        ("f16", GOOD & ~(31 << 24) | 2 << 24, "M = 32"),
        ("f16", GOOD & ~(63 << 17) | 33 << 17, "N = 264"),
        ("f8f6f4", GOOD | 5 << 7 | 1 << 15, "field 'transpose A'"),
        ("i8", plain_descriptor(Case("i8", "s8", "s8", "s32")) | 1 << 13, "field 'negate'"),
    ],
)
def test_an_illegal_instruction_descriptor_is_a_fault_that_names_the_field(kind, bits, message):
    case = Case("f16", "f16", "f16")
    program = TensorProgram(columns=32)
    a_codes, _, b_codes, _ = make_operands(case, np.random.default_rng(1))
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    wrong = Case(kind, "f16", "f16")
    _issue(program, wrong, a_text, b_text, accumulate=False, idesc=bits)
    with pytest.raises(HalfbyteError, match=message):
        program.run()


def test_shared_memory_beyond_the_ctas_is_a_fault():
    case = Case("f16", "f16", "f16")
    program = TensorProgram(columns=32)
    a_codes, _, b_codes, _ = make_operands(case, np.random.default_rng(1))
    a_text, b_text = place_operands(program, case, a_codes, b_codes, A_COLUMN)
    program.lines.append(f"add.u64 {a_text}, {a_text}, 0x1000;")
    _issue(program, case, a_text, b_text, accumulate=False)
    with pytest.raises(HalfbyteError, match=r"A of tcgen05\.mma"):
        program.run()
