"""Every mode and dtype on a virtual B200, bit by bit against the reference."""

from typing import Any

import pytest

from halfbyte.formats.activation import ACTIVATION_FORMATS
from tests.kernels.quantize_act_lora.quantize_runs import (
    DTYPES,
    CompileSource,
    Shape,
    check_call,
    make_operands,
    make_request,
)

pytestmark = pytest.mark.usefixtures("b200")
TARGET = "sm_100a"

SHAPES = (
    Shape(1, 64, 8),
    Shape(3, 48, 16),
    Shape(17, 100, 24),
    Shape(130, 1000, 33),
    Shape(257, 96, 64),
    Shape(128, 256, 0),
    Shape(5, 1, 1),
)
HALVES = ("float16", "bfloat16")
# Pairwise: each mode meets both dtypes, each shape both dtypes and several modes.
PAIRS = [
    (mode, HALVES[(index + number) % 2], SHAPES[(3 * index + number) % len(SHAPES)])
    for number in range(2)
    for index, mode in enumerate(ACTIVATION_FORMATS)
]


@pytest.fixture(autouse=True)
def nothing_found(b200: Any) -> Any:
    yield
    assert [str(one) for record in b200.log for one in record.findings] == []


@pytest.mark.parametrize(("mode", "dtype", "shape"), PAIRS, ids=str)
def test_same_bytes_as_the_reference(
    compile_source: CompileSource, mode: str, dtype: str, shape: Shape
) -> None:
    operands = make_operands(shape, dtype)
    check_call(compile_source, operands, make_request(operands, mode, TARGET))


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lora_dtype", DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mode", ACTIVATION_FORMATS)
def test_same_bytes_as_the_reference_everywhere(
    compile_source: CompileSource, mode: str, dtype: str, lora_dtype: str, shape: Shape
) -> None:
    operands = make_operands(shape, dtype, seed=1)
    check_call(compile_source, operands, make_request(operands, mode, TARGET, lora_dtype))
