"""The kernel on a virtual H200, bit by bit against the reference."""

from typing import Any

import pytest

from halfbyte.formats.activation import ACTIVATION_FORMATS
from tests.kernels.quantize_act_lora import gpu_cases
from tests.kernels.quantize_act_lora.quantize_runs import CompileSource, Shape

TARGET = "sm_90a"


@pytest.fixture(autouse=True)
def nothing_found(h200: Any) -> Any:
    """Fail a test whose launches have findings, notes included."""
    yield
    assert [str(one) for record in h200.log for one in record.findings] == []


@pytest.mark.parametrize(("mode", "dtype", "shape"), gpu_cases.PAIRS[:7], ids=str)
def test_same_bytes_as_the_reference(
    compile_source: CompileSource, mode: str, dtype: str, shape: Shape
) -> None:
    gpu_cases.check_pair(compile_source, TARGET, (mode, dtype, shape))


@pytest.mark.parametrize(
    ("mode", "content"),
    [("nvfp4_dynamic", "extremes"), ("int4", "spoilt"), ("nvfp4_nunchaku", "magnitudes")],
)
def test_hard_contents(compile_source: CompileSource, mode: str, content: str) -> None:
    gpu_cases.check_contents(compile_source, TARGET, mode, content)


@pytest.mark.long
@pytest.mark.parametrize("content", gpu_cases.CONTENTS)
@pytest.mark.parametrize("mode", ACTIVATION_FORMATS)
def test_all_hard_contents(compile_source: CompileSource, mode: str, content: str) -> None:
    gpu_cases.check_chosen_contents(compile_source, TARGET, mode, content)


def test_every_float16_is_encoded_without_the_conversion_instruction(
    compile_source: CompileSource,
) -> None:
    gpu_cases.check_every_float16(compile_source, TARGET)


def test_a_cluster_sums_in_order(compile_source: CompileSource) -> None:
    gpu_cases.check_integers(compile_source, TARGET, (4, 32), "float32")
