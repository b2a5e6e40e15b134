"""The kernel on a virtual GPU of each target, or on a real one, bit by bit with the reference.

A B200 meets every case; the others meet what their code has of its own, and some of the rest.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halfbyte.arch.gpus import find_gpu
from halfbyte.formats.activation import ACTIVATION_FORMATS
from halfbyte.kernels.quantize_act_lora.config import choose_config
from tests.kernels.quantize_act_lora import gpu_cases
from tests.kernels.quantize_act_lora.quantize_runs import (
    DTYPES,
    CompileSource,
    Shape,
    assert_equals_reference,
    check_call,
    make_operands,
    make_request,
    run,
)

GPUS = ("b200", "b300", "h200", "rtx5090")
OTHERS = GPUS[1:]
NUM_PAIRS = 7  # of gpu_cases.PAIRS that every GPU meets


def on(*gpus: str) -> pytest.MarkDecorator:
    """Run a test on each of `gpus`; pytest goes by GPU, so that each has one session.

    Alone in its mark: with other parameters in it pytest would open sessions test by test.
    """
    return pytest.mark.parametrize("gpu", gpus, indirect=True)


@pytest.fixture
def target(request: pytest.FixtureRequest) -> str:
    """Return the target of the GPU that the test runs on."""
    return find_gpu(request.node.callspec.params["gpu"]).target


@pytest.fixture(autouse=True)
def nothing_found(gpu: Any) -> Iterator[None]:
    """Fail a test whose launches have findings, notes included."""
    yield
    assert [str(one) for record in gpu.log for one in record.findings] == []


@on(*GPUS)
@pytest.mark.parametrize(("mode", "dtype", "shape"), gpu_cases.PAIRS[:NUM_PAIRS], ids=str)
def test_same_bytes_as_the_reference(
    compile_source: CompileSource, target: str, mode: str, dtype: str, shape: Shape
) -> None:
    gpu_cases.check_pair(compile_source, target, (mode, dtype, shape))


@on("b200")
@pytest.mark.parametrize(("mode", "dtype", "shape"), gpu_cases.PAIRS[NUM_PAIRS:], ids=str)
def test_same_bytes_with_the_other_dtype(
    compile_source: CompileSource, target: str, mode: str, dtype: str, shape: Shape
) -> None:
    gpu_cases.check_pair(compile_source, target, (mode, dtype, shape))


@on("b200")
@pytest.mark.parametrize("content", gpu_cases.CONTENTS)
@pytest.mark.parametrize("mode", ACTIVATION_FORMATS)
def test_hard_contents(compile_source: CompileSource, target: str, mode: str, content: str) -> None:
    gpu_cases.check_contents(compile_source, target, mode, content)


@on(*OTHERS)
@pytest.mark.parametrize(
    ("mode", "content"),
    [("nvfp4_dynamic", "extremes"), ("int4", "spoilt"), ("nvfp4_nunchaku", "magnitudes")],
)
def test_some_hard_contents(
    compile_source: CompileSource, target: str, mode: str, content: str
) -> None:
    gpu_cases.check_contents(compile_source, target, mode, content)


@on("b200", "h200")  # with the conversion instruction, and without it
def test_every_float16_is_encoded(compile_source: CompileSource, target: str) -> None:
    gpu_cases.check_every_float16(compile_source, target)


@on("b200", "h200")
@pytest.mark.parametrize(
    ("cluster_k", "rows", "lora_dtype"),
    [(1, 16, "float32"), (2, 64, "bfloat16"), (8, 16, "float16"), (4, 128, "float32")],
)
def test_integers_are_summed_exactly(
    compile_source: CompileSource, target: str, cluster_k: int, rows: int, lora_dtype: str
) -> None:
    gpu_cases.check_integers(compile_source, target, (cluster_k, rows), lora_dtype)


@on("b200")
@pytest.mark.parametrize(
    ("rows", "rank_tile"),
    [(16, 256), (32, 128), (64, 64), (128, 16), (16, 16), (32, 256), (64, 256), (128, 128)],
)
def test_every_tile_size(
    compile_source: CompileSource, target: str, rows: int, rank_tile: int
) -> None:
    operands = make_operands(Shape(70, 200, 136), "bfloat16")
    request = make_request(operands, "nvfp4_nunchaku", target)
    check_call(compile_source, operands, request, rows=rows, rank_tile=rank_tile, stages=2)


@on("b200")
@pytest.mark.parametrize("mode", ["nvfp4_dynamic", "uint4_shifted"])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_rows_may_be_strided_and_unaligned(
    compile_source: CompileSource, target: str, mode: str, offset: int
) -> None:
    plain = make_operands(Shape(9, 83, 5), "float16")
    whole = torch.full((9, 107 if offset == 1 else 104), float("nan"), dtype=torch.float16)
    x = whole[:, offset : offset + 83]
    x.copy_(plain.x)
    operands = dataclasses.replace(plain, x=x)
    request = make_request(operands, mode, target)
    assert request.x_is_aligned == (offset != 1)
    check_call(compile_source, operands, request)


@on("b200")
def test_programmatic_dependent_launch_gives_the_same_bytes(
    compile_source: CompileSource, target: str
) -> None:
    operands = make_operands(Shape(20, 200, 16), "float16")
    request = make_request(operands, "nvfp4_dynamic", target)
    check_call(compile_source, operands, request, use_pdl=True)


@on("b200")
def test_without_smooth(compile_source: CompileSource, target: str) -> None:
    plain = make_operands(Shape(20, 200, 16), "float16")
    operands = dataclasses.replace(plain, smooth=None)
    check_call(compile_source, operands, make_request(operands, "nvfp4_static", target))


@on("b200")
def test_one_program_serves_every_shape(
    compile_source: CompileSource, target: str, gpu: Any
) -> None:
    config = choose_config(
        make_request(make_operands(gpu_cases.SHAPES[0], "float16"), "nvfp4_nunchaku", target)
    )
    programs = []
    for shape in (Shape(1, 64, 8), Shape(40, 130, 3), Shape(16, 1, 50)):
        operands = make_operands(shape, "float16")
        result = run(compile_source, config, operands)
        assert_equals_reference(result, operands, config)
        programs.append(gpu.log.records[-1].request.kernel)
    assert len(set(programs)) == 1


@pytest.mark.long
@on(*GPUS)
@pytest.mark.parametrize("content", gpu_cases.CONTENTS)
@pytest.mark.parametrize("mode", ACTIVATION_FORMATS)
def test_all_hard_contents(
    compile_source: CompileSource, target: str, mode: str, content: str
) -> None:
    gpu_cases.check_chosen_contents(compile_source, target, mode, content)


@pytest.mark.long
@on("b200")
@pytest.mark.parametrize("shape", gpu_cases.SHAPES, ids=str)
@pytest.mark.parametrize("lora_dtype", DTYPES)
@pytest.mark.parametrize("dtype", gpu_cases.HALVES)
@pytest.mark.parametrize("mode", ACTIVATION_FORMATS)
def test_same_bytes_as_the_reference_everywhere(
    compile_source: CompileSource, target: str, mode: str, dtype: str, lora_dtype: str, shape: Shape
) -> None:
    operands = make_operands(shape, dtype, seed=1)
    check_call(compile_source, operands, make_request(operands, mode, target, lora_dtype))


@pytest.mark.long
@on("b200")
@pytest.mark.parametrize("m", [1, 16, 64, 256, 4352])
def test_production_sizes(compile_source: CompileSource, target: str, m: int) -> None:
    operands = make_operands(Shape(m, 3840, 128), "bfloat16")
    check_call(compile_source, operands, make_request(operands, "nvfp4_nunchaku", target))
